// The choice of segments and copies by the times of operations, which are made up, so that
// nothing here depends on this machine's speed, and with groups that try all ways and must give the
// same results in each.
#include "exec/tuner.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <random>

#include "comm/communicator.h"
#include "cpp/processes.h"
#include "exec/stopwatch.h"

namespace ringcomm::testing {
namespace {

constexpr int kUsual = 2;

// Takes `turns` turns, each as long as `cost` says; returns the way of the last one.
int take_turns(Contest& contest, uint32_t turns, const std::function<double(int)>& cost) {
  int way = -1;
  for (uint32_t i = 0; i < turns; ++i) {
    way = contest.next([&] { return contest.fastest(); });
    if (contest.tries_now()) contest.took(way, cost(way));
  }
  return way;
}

void the_fastest_way_wins() {
  for (int fastest = 0; fastest < 8; ++fastest) {
    Contest contest(8, kUsual);
    const auto cost = [&](int way) { return way == fastest ? 0.9 : 1.0; };
    require(take_turns(contest, 1, cost) == kUsual, "the usual way is not tried first");
    require(take_turns(contest, 99, cost) == fastest, "way ", fastest, " did not win");
  }
}

void the_usual_way_stays_where_others_are_hardly_better() {
  Contest contest(8, kUsual);
  const int way = take_turns(contest, 100, [](int way) { return way == kUsual ? 1.0 : 0.97; });
  require(way == kUsual, "way ", way, " for three hundredths");
}

void a_disturbed_try_decides_nothing() {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Contest contest(8, kUsual);
    std::array<int, 8> disturbed{};  // at most two tries of each way
    const int way = take_turns(contest, 100, [&](int way) {
      const bool hit = disturbed[static_cast<size_t>(way)] < 2 && random() % 2 == 0;
      disturbed[static_cast<size_t>(way)] += hit ? 1 : 0;
      return (way == 5 ? 0.8 : 1.0) * (hit ? 50 : 1);
    });
    require(way == 5, "seed ", seed, ": way ", way);
  }
}

void a_machine_that_changes_is_noticed_and_looking_costs_little() {
  Contest contest(8, kUsual);
  int tried = 0, fastest = 5;
  const auto cost = [&](int way) {
    ++tried;
    return way == fastest ? 0.5 : 1.0;
  };
  require(take_turns(contest, Contest::kPeriod, cost) == 5, "way 5 did not win");
  require(tried <= 24, tried, " of ", Contest::kPeriod, " turns are tries");
  fastest = 1;
  require(take_turns(contest, Contest::kPeriod, cost) == 1, "way 1 did not win later");
}

// ---- all ranks of a group

struct Call {
  Collective collective;
  uint64_t bytes;
};

Shape shape_of(const Call& call, int size) {
  Shape shape;
  shape.collective = call.collective;
  shape.size = size;
  shape.geometry = Geometry::for_ranks(size);
  shape.bytes = call.bytes;
  const auto ranks = static_cast<size_t>(size);
  if (sharded(call.collective)) shape.shards.assign(ranks, call.bytes / ranks);
  return shape;
}

struct Choice {
  uint64_t segment;
  bool streams;
};

// Returns the time that rank `rank` takes for a call. On each rank another way is the fastest. The
// caches that a machine claims to have are nowhere in this, nor in the tuner.
double cost_of(Rank rank, const Choice& choice, const Call& call) {
  const auto best = Tuner::kSegments[(static_cast<size_t>(rank) + call.bytes / 3) % 4];
  return (choice.segment == best ? 1.0 : 1.3) * (choice.streams == (rank % 2 == 1) ? 1.0 : 1.2);
}

// Ranks that run ahead of one another as far as operations let them: one ends when all have begun.
class Ranks {
 public:
  Ranks(int size, uint32_t seed) : random_(seed), seen_(static_cast<size_t>(size)) {
    for (auto& word : words_) word.store(0);
    for (Rank rank = 0; rank < size; ++rank) tuners_.emplace_back(rank, words_.data());
    begun_.assign(tuners_.size(), 0);
    ended_.assign(tuners_.size(), 0);
  }

  void run(const std::vector<Call>& calls) {
    while (std::ranges::min(ended_) < calls.size()) {
      const size_t r = random_() % tuners_.size();
      if (begun_[r] == ended_[r]) {
        if (begun_[r] < calls.size()) begin(r, calls[begun_[r]]);
      } else if (std::ranges::min(begun_) >= begun_[r]) {
        end(r, calls[ended_[r]]);
      }
    }
  }
  const std::vector<Choice>& seen(Rank rank) const { return seen_[static_cast<size_t>(rank)]; }

 private:
  void begin(size_t r, const Call& call) {
    Shape shape = shape_of(call, static_cast<int>(tuners_.size()));
    manner_[r] = tuners_[r].next(shape, Algorithm::kDirect);
    seen_[r].push_back({shape.geometry.segment_bytes, manner_[r].streams});
    ++begun_[r];
  }
  void end(size_t r, const Call& call) {
    if (manner_[r].timed) {
      tuners_[r].took(cost_of(static_cast<Rank>(r), seen_[r].back(), call));
    }
    ++ended_[r];
  }

  std::mt19937 random_;
  std::array<std::atomic<uint8_t>, Tuner::kWords> words_;
  std::deque<Tuner> tuners_;
  std::vector<uint64_t> begun_, ended_;
  std::array<Manner, 8> manner_;
  std::vector<std::vector<Choice>> seen_;
};

void ranks_agree_on_segments_and_choose_their_copies() {
  const Call kinds[] = {{Collective::kAllReduce, 1 << 20},     {Collective::kAllReduce, 256 << 10},
                        {Collective::kAllGather, 3 << 20},     {Collective::kBroadcast, 64 << 20},
                        {Collective::kReduceScatter, 2 << 20}, {Collective::kAllReduce, 8},
                        {Collective::kGather, 4 << 20}};
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    std::mt19937 random(seed);
    std::vector<Call> calls;
    while (calls.size() < 20'000) {  // mostly the same again, as ranks come close to one another so
      const bool same = !calls.empty() && random() % 8 != 0;
      calls.push_back(same ? calls.back() : kinds[random() % std::size(kinds)]);
    }
    Ranks ranks(size, seed);
    ranks.run(calls);
    std::array<int, 7> tried{};
    for (size_t k = 0; k < calls.size(); ++k) {
      const Choice& first = ranks.seen(0)[k];
      for (Rank r = 1; r < size; ++r) {
        require(ranks.seen(r)[k].segment == first.segment, "seed ", seed, ", operation ", k,
                ": rank ", r, " has segments of ", ranks.seen(r)[k].segment, ", not ",
                first.segment);
      }
      if (k + 1000 < calls.size()) continue;  // by now nearly all are as was decided
      const size_t kind = static_cast<size_t>(
          std::ranges::find_if(kinds,
                               [&](const Call& call) {
                                 return call.collective == calls[k].collective &&
                                        call.bytes == calls[k].bytes;
                               }) -
          kinds);
      const uint64_t usual = Geometry::for_ranks(size).segment_bytes;
      const bool chosen = calls[k].bytes >= 256 << 10 && calls[k].collective != Collective::kGather;
      const uint64_t best = chosen ? Tuner::kSegments[calls[k].bytes / 3 % 4] : usual;
      bool decided = first.segment == best;
      for (Rank r = 0; r < size; ++r) {
        const bool copies =
            calls[k].bytes >= 1 << 20 && calls[k].collective != Collective::kReduceScatter;
        decided = decided && ranks.seen(r)[k].streams == (copies && r % 2 == 1);
      }
      tried[kind] += decided ? 0 : 1;
    }
    for (const int tries : tried) require(tries <= 26, "seed ", seed, ": ", tries, " tries");
  }
}

// A step of a segment is divided among threads, so more of them need longer ones.
void segments_grow_with_threads() {
  const auto longest = [](int threads) {
    std::array<std::atomic<uint8_t>, Tuner::kWords> words{};
    Tuner tuner(0, words.data(), threads);
    uint64_t most = 0;
    for (int i = 0; i < 24; ++i) {
      Shape shape = shape_of({Collective::kAllReduce, 64 << 20}, 2);
      if (tuner.next(shape, Algorithm::kDirect).timed) tuner.took(1.0);
      most = std::max(most, shape.geometry.segment_bytes);
      require(shape.geometry.window_bytes() <= shape.geometry.window_room(), threads, " threads");
    }
    return most;
  };
  require(longest(1) == 512 << 10 && longest(2) == 1 << 20 && longest(64) == Tuner::kLargest,
          "the longest segments are ", longest(1), ", ", longest(2), " and ", longest(64));
}

void another_processs_word_is_not_trusted() {
  std::array<std::atomic<uint8_t>, Tuner::kWords> words;
  for (auto& word : words) word.store(255);
  Tuner tuner(1, words.data());
  for (int i = 0; i < 100; ++i) {
    Shape shape = shape_of({Collective::kAllReduce, 1 << 20}, 2);
    if (tuner.next(shape, Algorithm::kDirect).timed) tuner.took(1.0);
    require(
        std::ranges::find(Tuner::kSegments, shape.geometry.segment_bytes) != Tuner::kSegments.end(),
        "segments of ", shape.geometry.segment_bytes);
  }
}

void late_peers_are_not_counted() {
  const auto at = [](int ms) { return Clock::time_point(std::chrono::milliseconds(ms)); };
  Stopwatch watch;
  watch.start(at(1000));
  watch.block(3, at(1010));  // the first wait, for a rank that comes 500 ms later
  watch.block(3, at(1100));
  watch.meet(3, at(1510));
  watch.block(4, at(1510));  // the same for the next one
  watch.meet(4, at(1610));
  watch.meet(5, at(1611));   // was there
  watch.block(9, at(1630));  // a wait within the operation
  watch.meet(9, at(1640));
  const double seconds = watch.seconds(at(1650));
  require(seconds > 0.0499 && seconds < 0.0501, seconds, " s instead of 50 ms");
  watch.start(at(0));
  watch.meet(7, at(5));
  watch.block(8, at(5));
  watch.meet(8, at(10));
  require(watch.seconds(at(12)) < 0.0071, "the second start keeps something of the first");
}

// ---- groups

// Element i of a rank's input in its k-th call.
uint32_t value(size_t i, Rank rank, uint32_t k) {
  return static_cast<uint32_t>(i * 2654435761u) + static_cast<uint32_t>(rank) * 97u + k;
}

void run_and_look(Communicator& group, Collective collective, size_t elements, uint32_t calls) {
  const auto size = static_cast<size_t>(group.size());
  const bool reduces = collective == Collective::kAllReduce;
  std::vector<uint32_t> given(elements), got(reduces ? elements : elements * size);
  for (uint32_t k = 0; k < calls; ++k) {
    for (size_t i = 0; i < elements; ++i) given[i] = value(i, group.rank(), k);
    Operation operation;
    operation.collective = collective;
    operation.dtype = DType::kInt32;
    operation.input = {{reinterpret_cast<std::byte*>(given.data()), elements * 4}};
    operation.output = {{reinterpret_cast<std::byte*>(got.data()), got.size() * 4}};
    if (reduces) operation.bytes = elements * 4;
    if (!reduces) operation.shards.assign(size, elements * 4);
    group.run(operation);
    for (size_t i = 0; i < got.size(); ++i) {
      uint32_t expected = value(i % elements, static_cast<Rank>(i / elements), k);
      for (Rank r = 1; reduces && r < group.size(); ++r) expected += value(i, r, k);
      require(got[i] == expected, "call ", k, ", element ", i, ": ", got[i], ", not ", expected);
    }
  }
}

void all_ways_give_the_same(int size) {
  SharedStore store;
  require_all_zero(run_processes(size, [&](Rank rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.timeout = std::chrono::seconds(60);
    const auto group = Communicator::create(store, options);
    run_and_look(*group, Collective::kAllReduce, (600 << 10) / 4 + 5, 30);
    run_and_look(*group, Collective::kAllGather, (1300 << 10) / 4 + 3, 30);
    run_and_look(*group, Collective::kAllReduce, (1500 << 10) / 4 + 1, 30);
    run_and_look(*group, Collective::kAllReduce, (256 << 10) / 4, Contest::kPeriod + 20);
    group->run(Operation{});  // a barrier
    group->shutdown();
  }));
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks(
      {{"the fastest way wins", the_fastest_way_wins},
       {"the usual way stays", the_usual_way_stays_where_others_are_hardly_better},
       {"disturbed tries", a_disturbed_try_decides_nothing},
       {"a machine that changes", a_machine_that_changes_is_noticed_and_looking_costs_little},
       {"ranks agree", ranks_agree_on_segments_and_choose_their_copies},
       {"segments grow with threads", segments_grow_with_threads},
       {"a wrong word", another_processs_word_is_not_trusted},
       {"late peers", late_peers_are_not_counted},
       {"groups of 2", [] { all_ways_give_the_same(2); }},
       {"groups of 3", [] { all_ways_give_the_same(3); }}},
      argc, argv);
}
