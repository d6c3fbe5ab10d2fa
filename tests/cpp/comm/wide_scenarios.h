// Scenarios for a group of the program `wide`, with the outcome that every rank must see.
#pragma once

#include <csignal>

#include "cpp/comm/wide_rank.h"

namespace ringcomm::testing {

constexpr uint64_t kLoopBytes = 4096;
constexpr int kGroupSize = 16;

// "rank 3" or "ranks 1, 3", not "rank 31".
inline bool names(const std::string& text, Rank rank) {
  const std::string number = str(rank);
  for (size_t at = text.find(number); at != std::string::npos; at = text.find(number, at + 1)) {
    const size_t end = at + number.size();
    if (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) continue;
    const std::string before = text.substr(0, at);
    if (before.ends_with("rank ") || before.ends_with("ranks ") || before.ends_with(", ")) {
      return true;
    }
  }
  return false;
}

// The error of `body`, that must come and name the rank.
inline void must_fail(WideRank& self, double since, Rank culprit,
                      const std::function<void()>& body) {
  Seat& seat = self.seat();
  try {
    body();
  } catch (const Failure&) {
    throw;  // a wrong result, or the end of the time
  } catch (const std::exception& error) {
    seat.heard_after = now_seconds() - (since > 0 ? since : self.board().killed_at.load());
    std::snprintf(seat.heard, sizeof seat.heard, "%s", error.what());
    require(names(error.what(), culprit), "rank ", culprit, " is not named: ", error.what());
    return;
  }
  throw Failure("there was no error");
}

// A failed group ends as soon as one that works.
inline void leave_failed(WideRank& self) {
  self.doing("leaves the failed group");
  const double begin = now_seconds();
  self.group().shutdown();
  self.seat().left_after = now_seconds() - begin;
}

inline Exercise sum_of(const WideRank& self, uint64_t bytes = kLoopBytes) {
  return {Collective::kAllReduce, bytes, self.options().ranks, self.rank(), 0};
}

// The parent kills it once all ranks are in the loop.
inline void killed(WideRank& self) {
  Exercise sum = sum_of(self);
  self.gate();
  self.doing("sums until a rank is killed");
  must_fail(self, 0, self.options().value, [&] {
    while (!self.deadline().passed()) {
      sum.run(self.group());
      sum.check();
      ++self.seat().loops;
    }
  });
  leave_failed(self);
}

inline void mismatched(WideRank& self) {
  Exercise sum = sum_of(self);
  Exercise other(Collective::kBarrier, 0, self.options().ranks, self.rank(), 0);
  self.gate();
  self.doing("calls what another rank does not");
  must_fail(self, now_seconds(), self.options().value, [&] {
    if (self.options().chosen("mismatch", self.rank())) other.run(self.group());
    sum.run(self.group(), 2);  // where the first had returned already
  });
  require(std::string(self.seat().heard).find("barrier") != std::string::npos,
          "the other call is not told: ", self.seat().heard);
  leave_failed(self);
}

// It lives, and calls nothing.
inline void missing(WideRank& self) {
  const auto timeout = std::chrono::milliseconds(2000);
  Exercise sum = sum_of(self);
  self.group().state().set_timeout(timeout);
  self.gate();
  if (!self.options().chosen("missing", self.rank())) {
    self.doing("waits for a rank that calls nothing");
    const double begin = now_seconds() + std::chrono::duration<double>(timeout).count();
    must_fail(self, begin, self.options().value, [&] { sum.run(self.group()); });
  }
  self.gate();
  leave_failed(self);
}

// Each second a group of 16 drawn ranks; then three groups a rank.
inline void make_groups(WideRank& self) {
  const auto ranks = static_cast<uint64_t>(self.options().ranks);
  Random random(self.options().seed);
  const Deadline end(WideRank::seconds(self.options().value));
  for (int number = 0; number < self.options().value; ++number) {
    std::vector<Rank> all(ranks);
    std::iota(all.begin(), all.end(), 0);
    for (size_t i = 0; i < ranks; ++i) std::swap(all[i], all[i + random.below(ranks - i)]);
    all.resize(std::min<size_t>(kGroupSize, ranks));
    self.doing(str("makes group ", number));
    self.gate();
    const Deadline second(std::chrono::seconds(1));
    if (std::ranges::find(all, self.rank()) != all.end()) {
      const uint64_t asked = self.requests();
      const auto group = self.join(str("group", number), all);
      const double took = second.elapsed_seconds();
      self.seat().longest = std::max(self.seat().longest, took);
      self.seat().total += static_cast<double>(self.requests() - asked);
      ++self.seat().count;
      Exercise sum(Collective::kAllReduce, kLoopBytes, group->size(), group->rank(), 0);
      sum.run(*group, 3);
      sum.check();
      group->shutdown();
    }
    std::this_thread::sleep_for(second.left());
  }
}

// The sides of a mesh of so many ranks in three dimensions, as even as they can be.
inline std::array<int, 3> sides_of(int ranks) {
  std::array<int, 3> best{1, 1, ranks};
  for (int a = 1; a * a * a <= ranks; ++a) {
    for (int b = a; ranks % a == 0 && a * b * b <= ranks; ++b) {
      if (ranks % (a * b) == 0) best = {a, b, ranks / (a * b)};
    }
  }
  return best;
}

// The groups of this rank along each side, as DeviceMesh makes them.
inline void make_mesh(WideRank& self) {
  const auto sides = sides_of(self.options().ranks);
  std::vector<std::shared_ptr<Communicator>> groups;
  self.stage("mesh", 1, [&](int) {
    int stride = self.options().ranks;
    for (const int side : sides) {
      stride /= side;
      const Rank first = self.rank() - self.rank() / stride % side * stride;
      std::vector<Rank> members;
      for (int i = 0; i < side; ++i) members.push_back(first + i * stride);
      groups.push_back(self.join(str("mesh", groups.size(), '/', first), members));
    }
  });
  self.stage("mesh, used", 1, [&](int) {
    for (const auto& group : groups) {
      Exercise sum(Collective::kAllReduce, kLoopBytes, group->size(), group->rank(), 0);
      sum.run(*group);
      sum.check();
    }
  });
  for (const auto& group : groups) group->shutdown();
}

// Rank 0 ends it: it says so before a sum that no rank can leave before rank 0 enters it.
inline void loop(WideRank& self) {
  Exercise sum = sum_of(self), large = sum_of(self, 1 << 18);
  Exercise gather(Collective::kAllGather, 1 << 18, self.options().ranks, self.rank(), 0);
  Exercise trade(Collective::kAllToAll, 1 << 14, self.options().ranks, self.rank(), 0);
  std::vector<Exercise*> all{&sum, &large, &gather};
  if (self.options().checked("all_to_all")) all.push_back(&trade);
  self.gate();
  self.doing("loops");
  const Deadline end(WideRank::seconds(self.options().value));
  for (int number = 0; number <= self.board().last_loop; ++number) {
    require(!self.deadline().passed(), "the time is over");
    if (self.rank() == 0 && end.passed()) self.board().last_loop = number;
    for (Exercise* exercise : all) {
      exercise->run(self.group());
      exercise->check();
    }
    ++self.seat().loops;
  }
}

// Measures how often idle groups wake: voluntary switches a second, of all threads.
inline void idle(WideRank& self) {
  std::vector<Rank> all(static_cast<size_t>(self.options().ranks));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::shared_ptr<Communicator>> groups;
  self.stage("idle groups", 1, [&](int) {
    for (int i = 0; i < self.options().value; ++i) {
      groups.push_back(self.join(str("idle", i), all));
      Exercise sum(Collective::kAllReduce, 8, self.options().ranks, self.rank(), 0);
      sum.run(*groups.back());
      sum.check();
    }
  });
  self.doing("is idle");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const uint64_t before = voluntary_switches();
  const double begin = now_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  self.seat().total = static_cast<double>(voluntary_switches() - before) / (now_seconds() - begin);
  self.gate();
  for (const auto& group : groups) group->shutdown();
}

// All of a rank's life.
inline void live(WideRank& self) {
  const WideOptions& options = self.options();
  self.prepare();
  if (options.is("absent")) {
    if (options.chosen("absent", self.rank())) return;
    self.doing("meets");
    const double begin = now_seconds() + options.timeout;
    return must_fail(self, begin, options.value, [&] { self.join(); });
  }
  self.meet();
  if (options.checks) self.check_all();
  if (options.is("kill")) return killed(self);
  if (options.is("mismatch")) return mismatched(self);
  if (options.is("missing")) return missing(self);
  if (options.is("groups")) {
    make_groups(self);
    make_mesh(self);
  }
  if (options.is("loop")) loop(self);
  if (options.is("idle")) idle(self);
  self.leave();
}

}  // namespace ringcomm::testing
