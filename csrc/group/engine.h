// An engine does one kind of a group's work: collectives on the host, messages, or operations on a
// device. The group loops over its engines, and knows little more of them than this.
#pragma once

#include <array>
#include <atomic>
#include <exception>

#include "base/deadline.h"
#include "group/wheel.h"

namespace ringcomm {

class Engine {
 public:
  // Tells whether something has been asked for that has not ended.
  virtual bool pending() = 0;
  // Tells whether a worker must look at it though nothing is pending.
  virtual bool watched() const { return false; }
  // Tells whether progress() would move something. Asked before a sleep: all loads are seq_cst.
  virtual bool ready(Driver&) { return false; }
  // Moves as much as it can. Returns true when something moved. Lets the driver go before
  // callbacks.
  virtual bool progress(Driver& driver) = 0;
  // Looks at peers and deadlines, and fails the group where they say so: the slow path.
  virtual void check() = 0;
  // Notes operations that are over, and so have ended well. Called before the group fails.
  virtual void note_progress() {}
  // Reacts to the failure of the group, once the peers know.
  virtual void fail(const std::exception_ptr&) {}
  // Ends all pending work after a failure, and calls back. No lock is held.
  virtual void end_failed() {}
  // Returns the longest sleep between two calls of progress().
  virtual Clock::duration poll_interval() { return kPollInterval; }

  static constexpr auto kPollInterval = std::chrono::milliseconds(20);
  static constexpr auto kStreamInterval =
      std::chrono::microseconds(50);  // streams ring no doorbell

 protected:
  ~Engine() = default;
};

// The engines of a group. Partner of each place: add().
class Engines {
 public:
  void add(Engine& engine) {
    for (std::atomic<Engine*>& place : places_) {
      Engine* nobody = nullptr;
      if (place.compare_exchange_strong(nobody, &engine, std::memory_order_seq_cst)) return;
    }
  }
  // Visits the last one first: streams and messages, then collectives, whose driver sleeps.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
      if (Engine* const it = place->load(std::memory_order_seq_cst)) visit(*it);
    }
  }
  // Asks every one of them, also when one has said yes. Returns whether any has.
  template <typename Ask>
  bool ask_all(const Engine* except, Ask&& ask) const {
    bool yes = false;
    for_each([&](Engine& engine) { yes |= &engine != except && ask(engine); });
    return yes;
  }

 private:
  std::array<std::atomic<Engine*>, 3> places_{};
};

}  // namespace ringcomm
