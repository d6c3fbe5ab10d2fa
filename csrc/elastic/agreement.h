// One member's part in the agreements of its world: it runs the decree (elastic/decree.h) over the
// links to the other members (elastic/link.h). A process has one.
//
// An epoch is the time between two agreements. Its members make a group, and work. When one is gone
// or a change is planned, each leaves the group and comes to agree(). The members that the decision
// names make the group of the next epoch. If one of them dies meanwhile, they agree once more.
//
// A process that joins is a *guest* of one epoch: in its group, behind the members, to be given the
// state of the training, and without a vote. The next agreement makes it a member, or drops it.
#pragma once

#include <functional>
#include <map>

#include "base/log.h"
#include "elastic/decree.h"
#include "elastic/link.h"
#include "transport/transport.h"

namespace ringcomm {

class Agreement {
 public:
  // `run`: the same for all members, and for no other world.
  Agreement(Neighbours& neighbours, const std::string& run, Logger logger);

  // The group of `epoch` works: it has the links to all members. Its last ranks are `guests`.
  // `made`: the decision that made this epoch; where agree() has returned it, it need not be told.
  void adopt(const Transport& transport, uint32_t epoch, int guests, const Decision& made = {});

  struct Question {
    uint64_t decided = 0;  // the last step that this member has applied
    bool voted = false;    // for the next one
    std::string extra;     // goes with the decision, should this member lead
    // With members that live and do not come. Then they are suspected: those of this host at once,
    // others only when they have got no answers for as long as silence may last.
    Clock::duration patience;
    // The store's answer, as soon as there is one. Called often with the same request.
    std::function<std::optional<Witness>(const Decree::Request&)> witness;
    std::function<void()> interrupt;  // called often: may throw to give up
  };
  struct Answer {
    uint32_t epoch = 0;  // the new one
    Decision decision;
    bool stays = false;      // this member is in it
    std::vector<Rank> from;  // the members that go on, by their ranks so far
  };
  // Returns the decision of the present epoch. If this member stays, it is in the next one then.
  // Throws TimeoutError when no other member is awaited and those that came are too few, for as
  // long as `timeout`. Throws PeerError at a guest that no member is left to decide for.
  Answer agree(const Question& question, Clock::duration timeout);
  // This member goes: the others need not wait for its end.
  void leave() {
    if (!decree_) return;
    decree_->leave();
    show();
  }

  // While the group of the present epoch is being made: throws PeerError if it never will be.
  void check_members();
  // The guests of the present epoch, by their cards (transport/host.h).
  void expect(const std::vector<std::string>& guests);
  // Through it the members that go on make the group of the present epoch. Null where guests join,
  // who need one that all reach.
  std::unique_ptr<Store> store() const;

 private:
  bool is_guest() const { return decree_->rank() >= decree_->size(); }
  void take_part(const Question& question);
  void hear();
  void give_up_the_awaited(const Deadline& patience);
  void show();
  void sleep(Clock::duration most);
  void next_epoch(const Answer& answer);
  std::shared_ptr<Link> link_to(const Transport& transport, Rank rank);
  void tell_who_is_awaited(const Deadline& patience);
  TimeoutError too_few(const Deadline& patience);

  Neighbours& neighbours_;
  const uint64_t channel_;
  const Logger logger_;
  SlipPage& page_;
  const Doorbell bell_;
  std::unique_ptr<Decree> decree_;
  std::vector<std::shared_ptr<Link>> links_;  // by rank; null: this member, or a new guest
  std::vector<Card> guests_;                  // of this host, while their group is being made
  Clock::time_point looked_;                  // at them
  std::map<const Wire*, std::weak_ptr<Link>> remote_;
  std::vector<std::byte> shown_;
  Clock::duration told_{0};
};

}  // namespace ringcomm
