// The ranks of a group that are on other hosts. This rank has memory and a session for those that
// it has reached, and for those that have spoken to it. Of the others it has a line of text: how
// each is reached.
#pragma once

#include <memory>

#include "net/network.h"
#include "transport/remote.h"

namespace ringcomm {

// One line a rank. The text may be memory that all ranks of a host map.
class Contacts {
 public:
  Contacts() = default;
  Contacts(Mapping text, uint64_t bytes, int ranks);  // throws UsageError
  Contact of(Rank rank) const;
  Rank rank_of(const ProcessId& id) const;  // -1: it is no rank's

 private:
  Mapping text_;
  std::vector<uint32_t> begins_;  // where each line begins, and where the last one ends
  std::vector<ProcessId> ids_;
};

class RemoteRanks final : public Directory {
 public:
  explicit RemoteRanks(int size) : peers_(static_cast<size_t>(size)) {}
  ~RemoteRanks() override;
  RemoteRanks(const RemoteRanks&) = delete;

  // Has the network take frames of the group from all ranks from now on. `ends` is for each of
  // them.
  void open(Network& network, uint64_t channel, Contacts contacts, const RemotePeer::Ends& ends);
  void add(std::unique_ptr<RemotePeer> peer);
  size_t size() const { return peers_.size(); }  // of the group

  RemotePeer* find(Rank rank) const {  // null: it is of this host, or neither has spoken
    return peers_[static_cast<size_t>(rank)].load(std::memory_order_acquire);  // partner: add()
  }
  RemotePeer& get(Rank rank);  // any thread
  template <typename Act>
  void for_each(Act&& act) const {  // calls act for all that find() knows
    for (const auto& slot : peers_) {
      if (RemotePeer* const peer = slot.load(std::memory_order_acquire)) act(*peer);
    }
  }
  Network* network() const { return network_; }  // null in tests without one
  void forget();                                 // in a forked child: the network is its parent's

  // Returns the words about a rank that failed, if another one has told of it first.
  const RankState* told_of(Rank rank) const {
    const bool known =
        told_rank_.load(std::memory_order_acquire) == rank;  // partner: keep_failure_of()
    return known ? &told_ : nullptr;
  }
  // Keeps these words, and returns true, if they are the first of their kind.
  bool keep_failure_of(Rank rank, const RankState& state);

  // ---- the network's
  std::optional<Contact> contact_of(const ProcessId& id) override;
  Receiver* receiver(const ProcessId& id, Wire& wire) override;

 private:
  Network* network_ = nullptr;
  uint64_t channel_ = 0;
  Contacts contacts_;
  RemotePeer::Ends ends_{};
  std::vector<std::atomic<RemotePeer*>> peers_;  // by rank
  std::mutex mutex_;                             // guards what follows
  std::vector<std::unique_ptr<RemotePeer>> made_;
  RankState told_;  // written once, before told_rank_
  std::atomic<Rank> told_rank_{-1};
};

}  // namespace ringcomm
