// Ranks that would run different plans never get a wrong number: they agree when they meet, and
// where they could not, they compare at every operation.
#include "comm/communicator.h"
#include "cpp/processes.h"
#include "cpp/world.h"

namespace ringcomm::testing {
namespace {

using Millis = std::chrono::milliseconds;
using Requested = std::optional<Algorithm>;

std::string text_of(const Requested& requested) {
  return requested ? to_string(*requested) : "none";
}

struct Buffers {
  Buffers(Collective collective, int size, Rank rank) {
    const size_t whole = 3000 * static_cast<size_t>(size);
    in.assign(whole, static_cast<float>(rank + 1));
    out.assign(whole, -1.0f);
    what.collective = collective;
    what.dtype = DType::kFloat32;
    const bool shards = sharded(collective), split = collective == Collective::kAllToAll;
    if (shards) what.shards.assign(static_cast<size_t>(size), 4 * 3000);
    if (split) what.send = what.recv = std::vector<uint64_t>(static_cast<size_t>(size), 4 * 3000);
    if (!shards && !split && collective != Collective::kBarrier) what.bytes = 4 * 3000;
    what.input = {{reinterpret_cast<std::byte*>(in.data()), bytes_in(rank)}};
    what.output = {{reinterpret_cast<std::byte*>(out.data()), bytes_out(rank)}};
  }
  uint64_t bytes_in(Rank rank) const {
    const uint64_t whole = 4 * in.size(), part = 4 * 3000;
    switch (what.collective) {
      case Collective::kBarrier:
        return 0;
      case Collective::kReduceScatter:
      case Collective::kAllToAll:
        return whole;
      case Collective::kScatter:
        return rank == 0 ? whole : 0;
      case Collective::kBroadcast:
        return rank == 0 ? part : 0;
      default:
        return part;
    }
  }
  uint64_t bytes_out(Rank rank) const {
    const uint64_t whole = 4 * in.size(), part = 4 * 3000;
    switch (what.collective) {
      case Collective::kBarrier:
        return 0;
      case Collective::kAllGather:
      case Collective::kAllToAll:
        return whole;
      case Collective::kGather:
        return rank == 0 ? whole : 0;
      case Collective::kReduce:
        return rank == 0 ? part : 0;
      default:
        return part;
    }
  }

  std::vector<float> in, out;
  Operation what;
};

Geometry small(int size) {
  Geometry geometry;
  geometry.size = size;
  geometry.segment_bytes = 4096;
  geometry.inbox_bytes = 2048;
  return geometry;
}

// Rank 1 goes another way than the others: an error everywhere, soon, that says so.
void differ(int size, Collective collective, const std::function<void(World::Terms&)>& usual,
            const std::function<void(World::Terms&)>& odd) {
  World world(size, small(size));
  std::atomic<int> told{0};  // ranks that raised an error that tells them apart
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank, rank == 1 ? odd : usual);
    Buffers buffers(collective, size, rank);
    std::string text;
    try {
      // Rooted ones may end on a rank that is needed no longer: the next one cannot.
      for (int i = 0; i < 3; ++i) group->run(buffers.what);
    } catch (const std::exception& error) {
      text = error.what();
    }
    require(!text.empty(), "rank ", rank, " noticed nothing");
    if (text.find("runs it by") != std::string::npos) ++told;
    group->shutdown(Millis(0));
  });
  require(told > 0, "nobody says what differs");
}

void algorithms_differ(int size) {
  for (int i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    for (const Algorithm a : algorithms_of(collective)) {
      for (const Algorithm b : algorithms_of(collective)) {
        // One host has no hierarchy: a request for it means the table's algorithm.
        if (a == b || a == Algorithm::kHierarchical || b == Algorithm::kHierarchical) continue;
        differ(
            size, collective,
            [a](World::Terms& terms) { terms.options.algorithm = Rules(to_string(a)); },
            [b](World::Terms& terms) { terms.options.algorithm = Rules(to_string(b)); });
      }
    }
  }
}

void terms_differ() {
  const auto usual = [](World::Terms& terms) { terms.options.algorithm = Rules("ring"); };
  const auto with = [&](const std::function<void(World::Terms&)>& change) {
    differ(3, Collective::kAllReduce, usual, [&](World::Terms& terms) {
      usual(terms);
      change(terms);
    });
  };
  with([](World::Terms& terms) { terms.geometry.slots = 4; });
  with([](World::Terms& terms) { terms.geometry.line_bytes = 64; });
  with([](World::Terms& terms) { terms.geometry.one_shot_bytes = 1; });
  with([](World::Terms& terms) { terms.word = "alpha 1 beta 1 gamma 1"; });
}

// ---- meeting

std::string meet_with(Store& store, Rank rank, int size, const Requested& requested,
                      Requested& agreed) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = Millis(20'000);
  if (requested) options.algorithm = Rules(to_string(*requested));
  try {
    const auto group = Communicator::create(store, options);
    Buffers buffers(Collective::kAllReduce, size, rank);
    agreed = group->state().requested_algorithm(make_shape(buffers.what, group->geometry()));
    group->run(buffers.what);
    const float sum = static_cast<float>(size * (size + 1)) / 2;
    for (size_t i = 0; i < 3000; ++i) require(buffers.out[i] == sum, "a wrong sum");
    group->shutdown();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const PeerError& error) {
    return error.what();
  }
  return "";
}

// All follow rank 0's word; if a rank wants something else, all raise an error.
void requests() {
  const Requested none, ring = Algorithm::kRing, doubling = Algorithm::kDoubling;
  const struct {
    std::vector<Requested> by_rank;
    const char* error;
  } cases[] = {
      {{none, none, none}, nullptr},
      {{ring, none, none}, nullptr},
      {{doubling, none, doubling}, nullptr},
      {{ring, ring, ring}, nullptr},
      {{none, none, ring}, "rank 0 asks for no algorithm, and rank 2 for the algorithm ring"},
      {{ring, doubling, none},
       "rank 0 asks for the algorithm ring, and rank 1 for the algorithm doubling"},
  };
  for (const auto& [by_rank, error] : cases) {
    LocalStore store;
    run_threads(3, [&, error = error](Rank rank) {
      Requested agreed;
      const Requested& requested = by_rank[static_cast<size_t>(rank)];
      const std::string text = meet_with(store, rank, 3, requested, agreed);
      if (error == nullptr) {
        require(text.empty() && agreed == by_rank[0], "agreed on ", text_of(agreed), " ", text);
      } else {
        require(text.find(error) != std::string::npos, "'", text, "' says not: ", error);
      }
    });
  }
}

// A store in which a rank sees its own card as it is, and another build in those of the `others`.
class OtherBuild final : public Store {
 public:
  OtherBuild(Store& store, std::vector<Rank> others) : store_(store), others_(std::move(others)) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  bool has(const std::string& key) override { return store_.has(key); }
  std::string get(const std::string& key) override {
    const std::string text = store_.get(key);
    const auto is_card = [&](Rank rank) { return key.ends_with(str("/card/", rank)); };
    if (text.starts_with('!') || std::ranges::none_of(others_, is_card)) return text;
    return "1.0.0-123456789abc" + text.substr(text.find(' '));
  }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }

 private:
  Store& store_;
  const std::vector<Rank> others_;
};

void builds() {
  for (const Rank odd : {0, 1, 2}) {
    LocalStore store;
    run_threads(3, [&](Rank rank) {
      Requested agreed;
      const std::vector<Rank> rest = {(odd + 1) % 3, (odd + 2) % 3};
      OtherBuild mine(store, rank == odd ? rest : std::vector<Rank>{odd});
      const std::string text = meet_with(mine, rank, 3, {}, agreed);
      require(text.find("has build 1.0.0-123456789abc") != std::string::npos &&
                  text.find("of ringcomm, and rank") != std::string::npos &&
                  text.find("install the same version everywhere") != std::string::npos,
              "rank ", rank, ": ", text);
    });
  }
}

// Lists of tensors are told apart by a hash of their sizes and types. Those are small numbers, for
// which hashes that add and shift collide: float32[150], int32[50], uint8[100] with its first two
// types exchanged had the same one.
void hashes() {
  std::vector<std::array<uint64_t, 3>> tensors;  // elements, type, layout
  for (const uint64_t count : {1, 2, 3, 4, 50, 64, 100, 128, 150, 1000, 1024}) {
    for (uint64_t type = 0; type < 8; ++type) tensors.push_back({count, type, 0});
  }
  std::vector<uint64_t> all;
  all.reserve(tensors.size() * tensors.size() * tensors.size());
  for (const auto& [a, b, c] : tensors) {
    const uint64_t first = mix(0, {a, b, c});
    for (const auto& [d, e, f] : tensors) {
      const uint64_t second = mix(first, {d, e, f});
      for (const auto& [g, h, i] : tensors) all.push_back(mix(second, {g, h, i}));
    }
  }
  std::ranges::sort(all);
  require(std::ranges::adjacent_find(all) == all.end(), "two lists have the same hash");
}

std::vector<Check> all_checks() {
  return {{"algorithms_differ/2", [] { algorithms_differ(2); }},
          {"algorithms_differ/3", [] { algorithms_differ(3); }},
          {"terms_differ", terms_differ},
          {"requests", requests},
          {"hashes", hashes},
          {"builds", builds}};
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
