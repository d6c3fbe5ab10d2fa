// The planner that docs/algorithms.md writes step by step: printed, proved, and run by threads.
//
//   first_planner print BYTES RANKS    the plans of all ranks, in words
//   first_planner prove                sequences of it and of another planner; and of wrong ones
//   first_planner run                  the sums that it computes
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpp/world.h"
#include "exec/host_executor.h"
#include "plan/builder.h"
#include "plan_cases.h"
#include "verify/plan_text.h"

namespace ringcomm::testing {
namespace {

// docs: planner
// A star: every rank sends its input to rank 0, which adds all up and sends the sum back.
Plan star_all_reduce(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kTree, rank);  // a tree of one level
  const Segments segments{shape.bytes, shape.slot_bytes()};
  const auto feed = [&](Rank from, Rank to) {
    Feed made = plan.feed(from, to, shape.bytes);
    made.credits = false;  // the answer says that the message was read
    return made;
  };
  plan.repeat({segments.count(), segments.unit, {}}, [&](uint64_t s) {
    const Ref mine = plan.input(segments.offset(s)), sum = plan.output(segments.offset(s));
    const Stretch stretch = segments.stretch(s);
    if (rank != 0) {
      plan.put(feed(rank, 0), s, mine, stretch);
      plan.wait(0);
      plan.copy(sum, plan.slot(feed(0, rank), s), stretch);
      return;
    }
    std::vector<Ref> sources = {mine};
    for (Rank r = 1; r < shape.size; ++r) sources.push_back(plan.slot(feed(r, 0), s));
    plan.wait_all();
    plan.reduce({sum}, sources, stretch, true);
    for (Rank r = 1; r < shape.size; ++r) plan.put(feed(0, r), s, sum, stretch);
  });
  return plan.finish();
}
// docs: end

Shape shape_of(int size, uint64_t bytes) {
  Shape shape;
  shape.collective = Collective::kAllReduce;
  shape.size = size;
  shape.element = 4;
  shape.bytes = bytes;
  shape.geometry = tiny(size);
  return shape;
}

Program program_of(int size, uint64_t bytes, bool in_place) {
  const Shape shape = shape_of(size, bytes);
  Program program{std::vector<Shape>(static_cast<size_t>(size), shape), {}, in_place};
  for (Rank rank = 0; rank < size; ++rank) program.plans.push_back(star_all_reduce(shape, rank));
  return program;
}

void print(uint64_t bytes, int size) {
  for (const Plan& plan : program_of(size, bytes, false).plans) {
    std::fputs(to_text(plan).c_str(), stdout);
  }
}

// Rank 0 adds up first, and waits for the others' inputs then.
Program hasty() {
  Program program = program_of(3, 8, false);
  std::vector<Step>& steps = program.plans[0].steps;
  std::rotate(steps.begin(), steps.begin() + 2, steps.begin() + 3);
  return program;
}

void prove() {
  int sequences = 0, dropped = 0, caught = 0;
  for (int size = 2; size <= 8; ++size) {
    for (const uint64_t bytes : {0u, 4u, 112u, 116u, 256u, 512u, 516u, 2000u}) {
      for (const bool in_place : {false, true}) {
        const Program once = program_of(size, bytes, in_place);
        const Program other =
            ringcomm::program_of(shape_of(size, 1000), Algorithm::kDirect, in_place);
        for (const auto& sequence : {std::vector{once, once, once}, {other, once, other}}) {
          const std::string violation = verify(sequence);
          require(violation.empty(), size, " ranks, ", bytes, " bytes: ", violation);
          ++sequences;
        }
        for (const Dropped& pair : cases::pairs_of(once, 0b010)) {
          ++dropped;
          caught += !verify({once, once, once}, {.dropped = pair}).empty() ||
                    !verify({other, once, other}, {.dropped = pair}).empty();
        }
      }
    }
  }
  std::printf("proved: %d sequences\n", sequences);
  std::printf("caught: %d of %d plans without a signal and its wait\n", caught, dropped);
  std::printf("adds up before it waits: %s\n", verify({hasty()}).c_str());
  require(caught == dropped, "a signal that nothing needs");
}

// Three times in a row, so that both halves of the memory are used again.
void run_as(Communicator& group, uint64_t elements) {
  Transport& transport = group.state().transport();
  HostExecutor executor(transport);
  const Shape shape = shape_of(group.size(), elements * 4);
  const auto plan = std::make_shared<const Plan>(star_all_reduce(shape, group.rank()));
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    std::vector<float> data(elements, static_cast<float>(group.rank() + 1));
    const Span memory{reinterpret_cast<std::byte*>(data.data()), elements * 4};
    executor.input().assign({memory});
    executor.output().assign({memory});
    executor.start(plan, sequence, Reduction{});
    const auto ready = [&] { return executor.ready(); };
    while (executor.advance() == HostExecutor::Status::kBlocked) {
      transport.doorbell().sleep(kSignalNews, ready, std::chrono::milliseconds(50));
    }
    const auto sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
    for (const float element : data) require(element == sum, element, " instead of ", sum);
  }
}

void run() {
  for (const int size : {2, 3, 5}) {
    for (const uint64_t elements : {1u, 28u, 29u, 128u, 1000u}) {
      World world(size, tiny(size));
      run_threads(size, [&](Rank rank) { run_as(*world.join<Transport>(rank), elements); });
      std::printf("ok %d ranks, %lu elements\n", size, elements);
    }
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  const std::string verb = argc > 1 ? argv[1] : "";
  try {
    if (verb == "print" && argc == 4) {
      print(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
    } else if (verb == "prove") {
      prove();
    } else if (verb == "run") {
      run();
    } else {
      std::fprintf(stderr, "first_planner print BYTES RANKS, prove, or run\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
  return 0;
}
