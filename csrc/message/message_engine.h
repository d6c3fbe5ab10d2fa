// Moves a group's messages, and fails the group where a message cannot end well. If nothing of a
// message has moved yet, it can end alone.
#pragma once

#include "group/group_state.h"
#include "message/mailbox.h"

namespace ringcomm {

class MessageEngine final : public Engine {
 public:
  // `collectives` come first: a peer that has gone may have finished one for this rank.
  MessageEngine(GroupState& state, Engine& collectives)
      : state_(state), collectives_(collectives), mailbox_(state.transport(), state.recorder()) {}

  // Starts a send or receive, whose timeout is given.
  void post(const MessagePtr& message);
  // Does the same for a message that was asked for earlier: meanwhile the group may have failed.
  void post_late(const MessagePtr& message);
  // Ends a message whose wait was given up. The group goes on if nothing of it has moved.
  void give_up(const Message& message, const std::exception_ptr& error);
  void time_out(const Message& message, const Deadline& limit);

  // Window of this rank: see Mailbox. Peers may write into it from now on.
  uint32_t open_window(Span memory) {
    const uint32_t tag = mailbox_.open_window(memory);
    state_.kick();
    return tag;
  }
  void close_window(uint32_t tag, bool deregistered);
  uint64_t put_by(Rank peer, uint32_t tag) { return mailbox_.put_by(peer, tag); }

  bool pending() override { return mailbox_.pending(); }
  bool watched() const override {  // nobody may be waiting for a put
    return mailbox_.has_windows() && !state_.failed() && !state_.left();
  }
  bool ready(Driver&) override { return (pending() || watched()) && mailbox_.ready(); }
  bool progress(Driver& driver) override;
  void check() override;
  void end_failed() override {
    if (pending()) mailbox_.fail_all(state_.error());
  }

 private:
  bool move(auto&& move);
  std::vector<bool> gone_peers();
  void check_source(const Message& message, const std::vector<bool>& gone);

  GroupState& state_;
  Engine& collectives_;
  Mailbox mailbox_;
};

}  // namespace ringcomm
