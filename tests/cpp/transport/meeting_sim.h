// Ranks that meet through a store, in virtual time: their requests to it, and how long those take.
#pragma once

#include <map>

#include "cpp/harness.h"
#include "fibers.h"
#include "transport/assembly.h"
#include "transport/roster.h"

namespace ringcomm::testing {

struct MeetingSetup {
  int ranks = 64;
  int local = 8;  // of each host
  uint64_t seed = 1;
  Clock::duration spread{};                                  // ranks come within such a time
  Clock::duration latency = std::chrono::microseconds(100);  // of a question and its answer
  Clock::duration service = std::chrono::microseconds(20);   // of the store, for each question,
  Clock::duration look_up = std::chrono::nanoseconds(300);   // and each key in it
  double bytes_per_second = 1e9;
  bool set_waits = false;  // for an answer: c10d's TCPStore does not
  Clock::duration timeout = std::chrono::seconds(60);
  Rank absent = -1;               // never comes
  std::vector<int> members = {};  // in a larger job; empty: it is the job
};

// A server that answers one question after the other.
struct VirtualServer {
  VirtualServer(Fibers& fibers, const MeetingSetup& setup) : fibers(fibers), setup(setup) {}

  void take(size_t keys, uint64_t bytes, bool waits) {
    const auto arrives = fibers.now() + setup.latency / 2;
    const std::chrono::duration<double> carried(static_cast<double>(bytes) /
                                                setup.bytes_per_second);
    busy_until = std::max(busy_until, arrives) + setup.service +
                 static_cast<int64_t>(keys) * setup.look_up +
                 std::chrono::duration_cast<Clock::duration>(carried);
    if (waits) fibers.sleep_until(busy_until + setup.latency / 2);
  }

  Fibers& fibers;
  const MeetingSetup& setup;
  Clock::time_point busy_until{};
  std::map<std::string, std::string> values;
  std::map<std::string, int64_t> counters;
};

// One rank's connection to the server. As c10d's TCPStore: a get waits for its key first.
class VirtualStore final : public Store {
 public:
  explicit VirtualStore(VirtualServer& server) : server_(server) {}

  void set(const std::string& key, const std::string& value) override {
    server_.values[key] = value;
    ask({key}, value.size(), server_.setup.set_waits);
  }
  bool has(const std::string& key) override { return has_all({key}); }
  bool has_all(const std::vector<std::string>& keys) override {
    const bool all =
        std::ranges::all_of(keys, [&](const auto& key) { return server_.values.contains(key); });
    ask(keys, 1);
    return all;
  }
  std::string get(const std::string& key) override {
    const std::string value = server_.values.at(key);
    ask({key}, 0);
    ask({key}, value.size());
    return value;
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    constexpr size_t kAtOnce = 512;  // as torch/store_adapter.h has it
    for (size_t from = 0; from < keys.size(); from += kAtOnce) {
      const auto some = std::span(keys).subspan(from, std::min(kAtOnce, keys.size() - from));
      uint64_t bytes = 0;
      for (const std::string& key : some)
        bytes += values.emplace_back(server_.values.at(key)).size();
      ask({some.begin(), some.end()}, bytes);
    }
    return values;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const int64_t sum = server_.counters[key] += amount;
    ask({key}, sizeof sum);
    return sum;
  }
  Clock::time_point now() override { return server_.fibers.now(); }
  bool wait(Clock::duration most) override {
    server_.fibers.sleep_until(now() + most);
    return false;
  }

  uint64_t requests = 0, bytes = 0;
  struct Death {};
  Clock::time_point killed = Clock::time_point::max();  // at its next request after that

 private:
  void ask(const std::vector<std::string>& keys, uint64_t value_bytes, bool waits = true) {
    uint64_t carried = value_bytes;
    for (const std::string& key : keys) carried += key.size();
    ++requests;
    bytes += carried;
    if (now() >= killed) throw Death();
    server_.take(keys.size(), carried, waits);
  }

  VirtualServer& server_;
};

// One rank of a meeting, which talks as transport/rendezvous.cc does. Sockets and memory take no
// time.
class VirtualRank {
 public:
  VirtualRank(VirtualServer& server, Rank rank, const MeetingSetup& setup)
      : store(server), rank_(rank), setup_(setup) {
    options_.rank = rank;
    options_.size = setup.ranks;
    options_.name = "default";
    options_.members = setup.members;
    options_.warn = [this](const std::string& text) { warning += text; };
    for (Rank peer = 0; peer < setup.ranks; ++peer) all_.push_back(peer);
  }

  void meet() {
    const Deadline deadline(setup_.timeout, store.now());
    Assembly assembly(store, options_, deadline);
    try {
      assembly.begin();
      while (!met(assembly)) {
      }
      assembly.end();
    } catch (const VirtualStore::Death&) {
      failure = "dead";
    } catch (const std::exception& error) {
      failure = error.what();
      assembly.give_up(error);
    }
    ended = store.now();
  }

  VirtualStore store;
  Clock::time_point ended{};
  std::string failure;
  std::string heard;  // of the roster
  std::string warning;
  uint64_t nonce = 0;

 private:
  bool met(Assembly& assembly) {
    try {
      exchange(assembly);
      return true;
    } catch (const Assembly::Again&) {
      return false;
    }
  }

  void exchange(Assembly& assembly) {
    heard = assembly.gather(
        card().to_text(), [&](const auto& words) { return tell_hosts(assembly, words); },
        [&](const std::string& text) {
          const int host = Roster::from_text(text, setup_.ranks).host(rank_);
          return assembly.read(str("host", host)).find(card().to_text()) != std::string::npos;
        });
    const Roster roster = Roster::from_text(heard, setup_.ranks);
    const int host = roster.host(rank_);
    require(host == rank_ / setup_.local, "rank ", rank_, " is on host ", host);
    if (roster.hosts() < setup_.ranks) {
      assembly.exchange("", all_, [](const auto&) { return std::string(); });
    } else {
      assembly.skip();
    }
    if (roster.hosts() == 1) return;
    assembly.exchange(contact(), all_, [&](const auto& words) {
      std::string text;
      for (const std::string& word : words) text += word + '\n';
      assembly.leave("contacts", text);
      return str(text.size());
    });
    const bool first = rank_ % setup_.local == 0;
    if (first) assembly.read("contacts");
    assembly.read(str("host", (host + 1) % roster.hosts()));
    assembly.exchange("0", roster.first_ranks(), [](const auto& words) { return words[0]; });
    assembly.exchange("yes", all_, [](const auto&) { return std::string("all"); });
  }

  std::string tell_hosts(Assembly& assembly, const Assembly::Words& words) {
    std::vector<Card> cards;
    for (const std::string& word : words) {
      cards.push_back(Card::from_text(word, static_cast<Rank>(cards.size())));
    }
    Roster roster;
    roster.group_id = cards[0].nonce[0];
    roster.find_hosts(cards, {});
    std::vector<std::string> texts(static_cast<size_t>(roster.hosts()));
    for (Rank rank = 0; rank < setup_.ranks; ++rank) {
      texts[static_cast<size_t>(roster.host(rank))] += words[static_cast<size_t>(rank)] + '\n';
    }
    for (size_t host = 0; host < texts.size(); ++host) {
      assembly.leave(str("host", host), texts[host]);
    }
    return roster.to_text();
  }

  // As long as real ones.
  Card card() const {
    Card card;
    card.host = str("node-", 1000 + rank_ / setup_.local, ".cluster.example");
    card.build = "0123456789ab";
    card.boot_id = str("8b1c3f0e-6a5d-4f7b-9c2e-", 100'000'000'000 + rank_ / setup_.local);
    card.network = "4026531840";
    card.socket = str("ringcomm-", 10'000'000'000'000'000 + static_cast<uint64_t>(rank_));
    card.pid = 100'000 + rank_;
    card.nonce = {nonce, static_cast<uint64_t>(rank_)};
    return card;
  }
  std::string contact() const {
    return str("10.0.", rank_ / 256, ".", rank_ % 256, ":", 40'000 + rank_ % 10'000,
               " 0123456789abcdef0123456789abcdef fedcba9876543210fedcba9876543210");
  }

  const Rank rank_;
  const MeetingSetup& setup_;
  RendezvousOptions options_;
  std::vector<Rank> all_;
};

}  // namespace ringcomm::testing
