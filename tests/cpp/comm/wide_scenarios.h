// What may happen to a group of the program `wide`, and what must follow on every rank.
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
inline void must_fail(WideRank& one, double since, Rank culprit,
                      const std::function<void()>& body) {
  Seat& seat = one.seat();
  try {
    body();
  } catch (const Failure&) {
    throw;  // a wrong result, or the end of the time
  } catch (const std::exception& error) {
    seat.heard_after = now_seconds() - (since > 0 ? since : one.board().killed_at.load());
    std::snprintf(seat.heard, sizeof seat.heard, "%s", error.what());
    require(names(error.what(), culprit), "rank ", culprit, " is not named: ", error.what());
    return;
  }
  throw Failure("there was no error");
}

// A failed group ends as soon as one that works.
inline void leave_failed(WideRank& one) {
  one.doing("leaves the failed group");
  const double begin = now_seconds();
  one.group().shutdown();
  one.seat().left_after = now_seconds() - begin;
}

inline Exercise sum_of(const WideRank& one, uint64_t bytes = kLoopBytes) {
  return {Collective::kAllReduce, bytes, one.options().ranks, one.rank(), 0};
}

// The parent kills it once all ranks are in the loop.
inline void killed(WideRank& one) {
  Exercise sum = sum_of(one);
  one.gate();
  one.doing("sums until a rank is killed");
  must_fail(one, 0, one.options().value, [&] {
    while (!one.deadline().passed()) {
      sum.run(one.group());
      sum.check();
      ++one.seat().loops;
    }
  });
  leave_failed(one);
}

inline void mismatched(WideRank& one) {
  Exercise sum = sum_of(one);
  Exercise other(Collective::kBarrier, 0, one.options().ranks, one.rank(), 0);
  one.gate();
  one.doing("calls what another rank does not");
  must_fail(one, now_seconds(), one.options().value, [&] {
    if (one.options().chosen("mismatch", one.rank())) other.run(one.group());
    sum.run(one.group(), 2);  // where the first had returned already
  });
  require(std::string(one.seat().heard).find("barrier") != std::string::npos,
          "the other call is not told: ", one.seat().heard);
  leave_failed(one);
}

// It lives, and calls nothing.
inline void missing(WideRank& one) {
  const auto timeout = std::chrono::milliseconds(2000);
  Exercise sum = sum_of(one);
  one.group().state().set_timeout(timeout);
  one.gate();
  if (!one.options().chosen("missing", one.rank())) {
    one.doing("waits for a rank that calls nothing");
    const double begin = now_seconds() + std::chrono::duration<double>(timeout).count();
    must_fail(one, begin, one.options().value, [&] { sum.run(one.group()); });
  }
  one.gate();
  leave_failed(one);
}

// Each second a group of 16 drawn ranks; then three groups a rank.
inline void make_groups(WideRank& one) {
  const auto ranks = static_cast<uint64_t>(one.options().ranks);
  Random random(one.options().seed);
  const Deadline end(WideRank::seconds(one.options().value));
  for (int number = 0; number < one.options().value; ++number) {
    std::vector<Rank> all(ranks);
    std::iota(all.begin(), all.end(), 0);
    for (size_t i = 0; i < ranks; ++i) std::swap(all[i], all[i + random.below(ranks - i)]);
    all.resize(std::min<size_t>(kGroupSize, ranks));
    one.doing(str("makes group ", number));
    one.gate();
    const Deadline second(std::chrono::seconds(1));
    if (std::ranges::find(all, one.rank()) != all.end()) {
      const uint64_t asked = one.requests();
      const auto group = one.join(str("group", number), all);
      const double took = second.elapsed_seconds();
      one.seat().longest = std::max(one.seat().longest, took);
      one.seat().total += static_cast<double>(one.requests() - asked);
      ++one.seat().count;
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
inline void make_mesh(WideRank& one) {
  const auto sides = sides_of(one.options().ranks);
  std::vector<std::shared_ptr<Communicator>> groups;
  one.stage("mesh", 1, [&](int) {
    int stride = one.options().ranks;
    for (const int side : sides) {
      stride /= side;
      const Rank first = one.rank() - one.rank() / stride % side * stride;
      std::vector<Rank> members;
      for (int i = 0; i < side; ++i) members.push_back(first + i * stride);
      groups.push_back(one.join(str("mesh", groups.size(), '/', first), members));
    }
  });
  one.stage("mesh, used", 1, [&](int) {
    for (const auto& group : groups) {
      Exercise sum(Collective::kAllReduce, kLoopBytes, group->size(), group->rank(), 0);
      sum.run(*group);
      sum.check();
    }
  });
  for (const auto& group : groups) group->shutdown();
}

// Rank 0 ends it: it says so before a sum that no rank can leave before rank 0 enters it.
inline void loop(WideRank& one) {
  Exercise sum = sum_of(one), large = sum_of(one, 1 << 18);
  Exercise gather(Collective::kAllGather, 1 << 18, one.options().ranks, one.rank(), 0);
  Exercise trade(Collective::kAllToAll, 1 << 14, one.options().ranks, one.rank(), 0);
  std::vector<Exercise*> all{&sum, &large, &gather};
  if (one.options().checked("all_to_all")) all.push_back(&trade);
  one.gate();
  one.doing("loops");
  const Deadline end(WideRank::seconds(one.options().value));
  for (int number = 0; number <= one.board().last_loop; ++number) {
    require(!one.deadline().passed(), "the time is over");
    if (one.rank() == 0 && end.passed()) one.board().last_loop = number;
    for (Exercise* each : all) {
      each->run(one.group());
      each->check();
    }
    ++one.seat().loops;
  }
}

// What idle groups wake: voluntary switches a second, of all threads.
inline void idle(WideRank& one) {
  std::vector<Rank> all(static_cast<size_t>(one.options().ranks));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::shared_ptr<Communicator>> groups;
  one.stage("idle groups", 1, [&](int) {
    for (int i = 0; i < one.options().value; ++i) {
      groups.push_back(one.join(str("idle", i), all));
      Exercise sum(Collective::kAllReduce, 8, one.options().ranks, one.rank(), 0);
      sum.run(*groups.back());
      sum.check();
    }
  });
  one.doing("is idle");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const uint64_t before = voluntary_switches();
  const double begin = now_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  one.seat().total = static_cast<double>(voluntary_switches() - before) / (now_seconds() - begin);
  one.gate();
  for (const auto& group : groups) group->shutdown();
}

// All of a rank's life.
inline void live(WideRank& one) {
  const WideOptions& options = one.options();
  one.prepare();
  if (options.is("absent")) {
    if (options.chosen("absent", one.rank())) return;
    one.doing("meets");
    const double begin = now_seconds() + options.timeout;
    return must_fail(one, begin, options.value, [&] { one.join(); });
  }
  one.meet();
  if (options.checks) one.check_all();
  if (options.is("kill")) return killed(one);
  if (options.is("mismatch")) return mismatched(one);
  if (options.is("missing")) return missing(one);
  if (options.is("groups")) {
    make_groups(one);
    make_mesh(one);
  }
  if (options.is("loop")) loop(one);
  if (options.is("idle")) idle(one);
  one.leave();
}

}  // namespace ringcomm::testing
