// What the ranks of a group that is being made tell one another: in stages, in each of which every
// rank says something to all. A rank that gives up says why, and all give up.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transport/rendezvous.h"

namespace ringcomm {

class Assembly {
 public:
  virtual ~Assembly() = default;
  virtual void begin() = 0;
  // The next stage: what every rank says, one line each, and last rank 0's word for all.
  virtual std::vector<std::string> exchange(const std::string& mine) = 0;
  virtual void skip() = 0;
  // While a rank is awaited by other means: throws when it is in vain. It may be slow.
  virtual void check(const std::vector<Rank>& awaited) = 0;
  // This rank gives up: before it closes what the others would take for its death.
  virtual void give_up(const std::exception& error) = 0;

  // That this rank cannot reach `other`, which awaits it, and why.
  virtual void set_apart(Rank other, const std::string& why) = 0;
  virtual bool some_are_apart() = 0;
  virtual std::string apart_from(Rank other) = 0;  // what it said; ""

  // Before a rank's death is told: throws what it or another has said, if one gave up.
  virtual void check_last_words() = 0;

  // How it is known that a rank has died, from now on.
  std::function<std::optional<PeerError>(Rank)> died = [](Rank) { return std::nullopt; };
};

// Through the store. Rank 0 reads what the others say and writes one list, so that a store which
// serves n ranks is asked n times, not n².
//
// The store is polled: torch's blocking waits cannot be interrupted and log warnings. Pauses grow
// with the time that has passed, so a rank that waits long asks twice a second.
class StoreAssembly final : public Assembly {
 public:
  StoreAssembly(Store& store, const RendezvousOptions& options, const Deadline& deadline)
      : store_(store), options_(options), deadline_(deadline) {
    died = [&store](Rank rank) { return store.died(rank); };
  }

  void begin() override;
  std::vector<std::string> exchange(const std::string& mine) override;
  void skip() override { ++stage_; }
  void check(const std::vector<Rank>& awaited) override;
  void give_up(const std::exception& error) override;
  void set_apart(Rank other, const std::string& why) override;
  bool some_are_apart() override;
  std::string apart_from(Rank other) override;
  void check_last_words() override;

 private:
  // In this order; the last two where ranks are on several hosts.
  static constexpr std::array kStages = {"card", "mapped", "contact", "ready"};

  std::string key(size_t stage, const std::string& whose) const {
    return str(prefix_, kStages.at(stage), "/", whose);
  }
  std::string key(Rank rank) const { return key(stage_, str(rank)); }
  std::string list(size_t stage) const { return key(stage, "all"); }
  std::string trouble() const { return prefix_ + "failed"; }
  std::string apart(const std::string& pair) const { return prefix_ + "apart" + pair; }
  std::string read_list();
  std::string write_list();
  template <typename Ready>
  bool await(Ready&& ready);
  void rest(Clock::duration pause);
  void check_dead();
  TimeoutError late(const std::vector<Rank>& ranks) const;
  std::vector<Rank> silent(Rank otherwise);

  Store& store_;
  const RendezvousOptions& options_;
  const Deadline& deadline_;
  std::string prefix_;  // of this life's keys
  size_t stage_ = 0;    // in progress, or next
};

}  // namespace ringcomm
