// A rank of the program `wide`: enters its host, makes the group, and runs the collectives.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <sys/resource.h>

#include "cpp/comm/wide_exercise.h"
#include "cpp/comm/wide_footprint.h"
#include "cpp/comm/wide_options.h"
#include "cpp/oracle.h"

namespace ringcomm::testing {

// This process goes into the network namespace of that name.
inline void enter_host(const std::string& name) {
  const Fd host(::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!host || ::setns(host.get(), CLONE_NEWNET) != 0) throw SystemError("entering host " + name);
}

// Where a rank of such a host listens: the address of its one link.
inline Places places_here(const ProcessConfig&, const std::string&) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) throw SystemError("getifaddrs");
  Places places;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
    char text[INET_ADDRSTRLEN];
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
    places.addresses = {text};
  }
  ::freeifaddrs(all);
  return places;
}

inline void limit_to(decltype(RLIMIT_AS) what, uint64_t most) {
  rlimit both{};
  ::getrlimit(what, &both);
  both.rlim_cur = std::min<rlim_t>(most, both.rlim_max);
  if (::setrlimit(what, &both) != 0) throw SystemError("setrlimit");
}

class WideRank {
 public:
  WideRank(const WideOptions& options, Board& board, StoreTable& table, Rank rank)
      : options_(options),
        board_(board),
        table_(table),
        rank_(rank),
        seat_(board.seat(rank)),
        deadline_(seconds(options.deadline)),
        store_(table, rank, faults()) {}

  static Clock::duration seconds(double some) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(some));
  }

  void prepare() {
    doing("prepares");
    ProcessConfig config;
    config.transport = options_.tcp ? "tcp" : "auto";
    config.run = "wide/0";
    if (!options_.hosts.empty()) {
      const auto& host = options_.hosts[static_cast<size_t>(rank_ / options_.local)];
      enter_host(host);
      config.host = host;
      config.places = places_here;
    }
    Process::get().configure(config);
    Footprint measured;
    measured.begin[0] = board_.began;
    measured.end[0] = now_seconds();
    note("start", measured);  // the program's own costs
    if (options_.nofile > 0) limit_to(RLIMIT_NOFILE, options_.nofile);
    if (options_.room_mib > 0) {
      limit_to(RLIMIT_AS, footprint_now().vm_bytes + (options_.room_mib << 20));
    }
  }

  std::shared_ptr<Communicator> join(const std::string& name, const std::vector<Rank>& members) {
    CommunicatorOptions options;
    const auto place = std::ranges::find(members, rank_);
    options.rank = static_cast<Rank>(place - members.begin());
    options.size = static_cast<int>(members.size());
    options.global_ranks = members;
    return create(name, options);
  }
  std::shared_ptr<Communicator> join() {
    CommunicatorOptions options;
    options.rank = rank_;
    options.size = options_.told > 0 ? options_.told : options_.ranks;
    if (options_.chosen("differ", rank_)) ++options.size;
    return create("world", options);
  }

  void meet() {
    doing("meets");
    Footprint measured;
    measured.begin[0] = board_.began;  // the fork of the first
    group_ = join();
    measured.end[0] = now_seconds();
    note("meeting", measured);
  }

  // Every collective in every size: exact results, and the time of a call.
  void check_all() {
    for (int i = 0; i < kCollectives; ++i) {
      const auto collective = static_cast<Collective>(i);
      if (!options_.checked(to_string(collective))) continue;
      for (const uint64_t bytes : options_.sizes) {
        check(collective, bytes);
        if (collective == Collective::kBarrier) break;
      }
    }
    for (const uint64_t bytes : options_.sizes) {
      if (!options_.checked("messages")) break;
      stage(str("messages/", bytes), 1, [&](int) {
        for (const int step : {1, options_.ranks / 2}) exchange_messages(*group_, step, bytes);
      });
    }
    if (options_.random == 0) return;
    Random random(options_.seed);
    uint64_t number = 0;
    stage("random", 1, [&](int) {
      for (uint64_t i = 0; i < options_.random; ++i) {
        perform(*group_, random_call(random, options_.ranks, 4000), ++number);
      }
    });
  }

  void leave() {
    doing("leaves");
    board_.gate(options_.ranks, deadline_);
    group_->shutdown();
    group_.reset();
  }

  // ---- parts of scenarios

  void doing(const std::string& what) {
    std::snprintf(seat_.doing, sizeof seat_.doing, "%s", what.c_str());
  }
  void gate() { board_.gate(options_.ranks, deadline_); }
  // All ranks begin it together; `body(calls)` runs in three batches.
  void stage(const std::string& name, int calls, const std::function<void(int)>& body,
             size_t batches = 1) {
    doing(name);
    Footprint measured;
    measured.calls = calls;
    gate();
    for (size_t batch = 0; batch < batches; ++batch) {
      measured.begin[batch] = now_seconds();
      body(calls);
      measured.end[batch] = now_seconds();
    }
    gate();  // costs are counted before any rank goes on
    note(name, measured);
  }

  const WideOptions& options() const { return options_; }
  Board& board() { return board_; }
  Seat& seat() { return seat_; }
  Rank rank() const { return rank_; }
  Communicator& group() { return *group_; }
  const Deadline& deadline() const { return deadline_; }
  uint64_t requests() const { return table_.counts.at(static_cast<size_t>(rank_)).requests; }

 private:
  StoreFaults faults() const {
    StoreFaults faults;
    faults.delay = std::chrono::milliseconds(options_.store_delay_ms);
    if (options_.store_loss == rank_) faults.lost_request = 3;
    return faults;
  }

  std::shared_ptr<Communicator> create(const std::string& name, CommunicatorOptions& options) {
    options.name = name;
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.timeout));
    return Communicator::create(store_, options);
  }

  void check(Collective collective, uint64_t bytes) {
    const std::string name = collective == Collective::kBarrier
                                 ? std::string("barrier")
                                 : str(to_string(collective), "/", bytes);
    const Rank root = static_cast<Rank>(bytes % static_cast<uint64_t>(options_.ranks));
    Exercise exercise(collective, bytes, options_.ranks, rank_, root);
    doing(name);
    exercise.run(*group_);
    exercise.check();
    stage(
        name, options_.calls, [&](int calls) { exercise.run(*group_, calls); },
        Footprint::kBatches);
    exercise.check();
    Footprint& measured = seat_.footprints[static_cast<size_t>(seat_.stages.load()) - 1];
    std::snprintf(measured.algorithm, sizeof measured.algorithm, "%s",
                  to_string(group_->host().algorithm_of(exercise.operation())));
  }

  void note(const std::string& name, const Footprint& measured) {
    const auto number = static_cast<size_t>(seat_.stages.load());
    Footprint footprint = footprint_now();
    footprint.calls = measured.calls;
    footprint.begin = measured.begin;
    footprint.end = measured.end;
    const auto& counts = table_.counts.at(static_cast<size_t>(rank_));
    footprint.requests = counts.requests;
    footprint.store_bytes = counts.bytes;
    std::snprintf(footprint.name, sizeof footprint.name, "%s", name.c_str());
    seat_.footprints.at(number) = footprint;
    seat_.stages.store(static_cast<int>(number) + 1);
  }

  const WideOptions& options_;
  Board& board_;
  StoreTable& table_;
  const Rank rank_;
  Seat& seat_;
  const Deadline deadline_;
  WideStore store_;
  std::shared_ptr<Communicator> group_;
};

}  // namespace ringcomm::testing
