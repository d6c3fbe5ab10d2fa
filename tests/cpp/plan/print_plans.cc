// Prints the plans of all ranks of a group between hosts.
//
//   print_plans COLLECTIVE ALGORITHM BYTES RANKS [LOCAL]
//
// BYTES: the whole message, of float32 elements. LOCAL: ranks of each host, for hierarchical plans.
#include <cstdio>
#include <cstdlib>

#include "plan/select.h"
#include "verify/plan_text.h"

namespace ringcomm {
namespace {

constexpr uint64_t kElement = 4;

void print_plans(const Shape& shape, Algorithm algorithm) {
  for (Rank rank = 0; rank < shape.size; ++rank) {
    std::fputs(to_text(make_plan(shape, rank, algorithm)).c_str(), stdout);
  }
}

}  // namespace
}  // namespace ringcomm

int main(int argc, char** argv) {
  using namespace ringcomm;
  if (argc < 5 || argc > 6) {
    std::fprintf(stderr, "print_plans COLLECTIVE ALGORITHM BYTES RANKS [LOCAL]\n");
    return 2;
  }
  try {
    const int size = std::atoi(argv[4]);
    RINGCOMM_CHECK(size > 0, "no group has ", argv[4], " ranks");
    const uint64_t share = std::strtoull(argv[3], nullptr, 10) / static_cast<uint64_t>(size);
    Shape shape;
    const auto collective = collective_called(argv[1]);
    RINGCOMM_CHECK(collective, "there is no collective '", argv[1], "'");
    shape.collective = *collective;
    shape.size = size;
    shape.element = kElement;
    shape.bytes = std::strtoull(argv[3], nullptr, 10);
    shape.local = argc > 5 ? std::atoi(argv[5]) : 1;
    shape.shards.assign(static_cast<size_t>(size), share / kElement * kElement);
    shape.send = shape.recv = shape.shards;
    shape.geometry = Geometry::across_hosts(size);
    print_plans(shape, algorithm_called(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "print_plans: %s\n", error.what());
    return 1;
  }
  return 0;
}
