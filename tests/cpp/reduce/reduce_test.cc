// The reduce kernels, every type x operation x instruction set, against a scalar model that
// converts with torch/headeronly, bit for bit.
//   reduce_test [FILTER]     only checks whose name contains FILTER
#include "reduce/reduce.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "instruction_sets.h"
#include "reduce_inputs.h"
#include "reduce_model.h"

namespace ringcomm {
namespace {

using model::Bytes;
using model::Inputs;
using model::one_nan;
using model::Placed;

[[noreturn]] void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

void expect(bool condition, const std::string& what) {
  if (!condition) fail(what);
}

std::string describe(DType dtype, ReduceOp op) {
  return std::string(to_string(dtype)) + ' ' + to_string(op) + ' ' + instruction_set();
}

void expect_same(const Bytes& got, const Bytes& wanted, DType dtype, const std::string& what) {
  if (got == wanted) return;
  size_t at = 0;
  while (got[at] == wanted[at]) ++at;
  const size_t size = size_of(dtype), element = at / size;
  std::string hex;
  for (const Bytes* bytes : {&got, &wanted}) {
    hex += bytes == &got ? ": got 0x" : ", wanted 0x";
    for (size_t i = size; i-- > 0;) {
      char digits[3];
      std::snprintf(digits, 3, "%02x", unsigned((*bytes)[element * size + i]));
      hex += digits;
    }
  }
  fail(str(what, ", element ", element, " of ", got.size() / size, hex));
}

void check_against(const Bytes& wanted, const Reduction& what, bool final,
                   const std::vector<Bytes>& inputs, size_t variant) {
  const size_t size = size_of(what.dtype), count = wanted.size() / size;
  std::vector<Placed> sources, extra;
  for (size_t s = 0; s < inputs.size(); ++s) {
    sources.emplace_back(inputs[s], (variant + s) % 5 * size);
  }
  for (size_t d = 0; d < variant % 3; ++d) extra.emplace_back(wanted, (variant + d) % 7 * size);
  std::vector<const std::byte*> srcs;
  std::vector<std::byte*> dsts;
  for (Placed& source : sources) srcs.push_back(source.data());
  for (Placed& placed : extra) {
    std::memset(placed.data(), 0x5a, wanted.size());
    dsts.push_back(placed.data());
  }
  const size_t in_place = variant % inputs.size();
  if (extra.empty() || variant % 2) dsts.push_back(sources[in_place].data());

  const std::string name = str(describe(what.dtype, what.op), final ? "" : " not final", ", ",
                               inputs.size(), " sources, variant ", variant);
  reduce(what, final, dsts, srcs, count);
  for (Placed& placed : extra) {
    expect(placed.intact(), name + ": wrote outside its destination");
    expect_same(placed.content(), wanted, what.dtype, name);
  }
  for (size_t s = 0; s < sources.size(); ++s) {
    const bool is_dst = dsts.back() == sources[s].data();
    expect(sources[s].intact(), name + ": wrote outside its destination");
    expect_same(sources[s].content(), is_dst ? wanted : inputs[s], what.dtype, name);
  }
}

template <class F>
void for_each_pair(F&& visit) {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      visit(DType{static_cast<uint8_t>(d)}, ReduceOp{static_cast<uint8_t>(o)});
    }
  }
}

template <class F>
void for_each_instruction_set(F&& visit) {
  const std::string chosen = instruction_set();
  for (const std::string& name : instruction_sets()) {
    use_instruction_set(name);
    visit();
  }
  use_instruction_set(chosen);
}

void every_pair_equals_the_model() {
  static constexpr size_t kCounts[] = {0,  1,  2,  3,  5,   8,   15,  17,
                                       31, 33, 63, 65, 127, 131, 257, 771};
  Inputs inputs;
  size_t variant = 0;
  for_each_pair([&](DType dtype, ReduceOp op) {
    if (!why_not(dtype, op).empty()) return;
    for (size_t sources = 1; sources <= 9; ++sources) {
      for (size_t count : kCounts) {
        std::vector<Bytes> made(sources);
        for (Bytes& bytes : made) bytes = inputs.make(dtype, count);
        // More ranks than an int8 holds, too.
        const Reduction what{dtype, op, variant % 11 == 0 ? 200 : static_cast<int>(sources)};
        const bool final = variant % 4 != 0;
        const Bytes wanted = model::reduced_any(what, final, made);
        for_each_instruction_set([&] { check_against(wanted, what, final, made, variant); });
        ++variant;
      }
    }
  });
}

// Direct plans add up an operand of each rank, in one step.
void as_many_sources_as_a_group_has_ranks() {
  Inputs inputs;
  size_t variant = 0;
  for_each_pair([&](DType dtype, ReduceOp op) {
    if (!why_not(dtype, op).empty()) return;
    for (const size_t sources : {255, 256, 257, 4096}) {
      if (sources > 257 && op > ReduceOp::kAvg) continue;
      std::vector<Bytes> made(sources);
      for (Bytes& bytes : made) bytes = inputs.make(dtype, 67);
      const Reduction what{dtype, op, static_cast<int>(sources)};
      const Bytes wanted = model::reduced_any(what, true, made);
      for_each_instruction_set([&] { check_against(wanted, what, true, made, variant++); });
    }
  });
}

// All numbers of 8 and 16 bits through fp32 and back, scaled so that all kinds of rounding happen.
template <class Type>
void check_conversions(DType dtype) {
  using Stored = typename Type::Stored;
  constexpr size_t kCount = size_t{1} << (8 * sizeof(Stored));
  std::vector<Stored> all(kCount), got(kCount);
  for (size_t i = 0; i < kCount; ++i) all[i] = static_cast<Stored>(i);
  std::vector<double> factors = {1, -1, 0.5, 3, 1e30, 1e-30, 0, HUGE_VAL, 0x1p-14, 0x1p-149};
  for (int bit = 1; bit <= 23; ++bit) {
    for (double e : {0.0, 0x1p-23, -0x1p-23}) factors.push_back(1 + std::ldexp(1, -bit) + e);
    factors.push_back(std::ldexp(1, -bit));
  }
  for (double factor : factors) {
    scale(dtype, factor, reinterpret_cast<std::byte*>(got.data()),
          reinterpret_cast<const std::byte*>(all.data()), kCount);
    for (size_t i = 0; i < kCount; ++i) {
      const float number = Type::decode(all[i]) * static_cast<float>(factor);
      const Stored wanted = Type::encode(one_nan(number));
      if (got[i] != wanted) {
        fail(str(to_string(dtype), " ", instruction_set(), ": code ", i, " times ", factor, " is ",
                 +got[i], ", not ", +wanted));
      }
    }
  }
}

void conversions_equal_torchs() {
  for_each_instruction_set([] {
    check_conversions<model::Float16>(DType::kFloat16);
    check_conversions<model::BFloat16>(DType::kBFloat16);
    check_conversions<model::Float8E4M3>(DType::kFloat8E4M3);
    check_conversions<model::Float8E5M2>(DType::kFloat8E5M2);
  });
}

template <class T>
void check_scale(DType dtype, Inputs& inputs) {
  const Bytes input = inputs.make(dtype, 1003);
  Bytes wanted = input;
  for (size_t at = 0; at < input.size(); at += sizeof(T)) {
    T value;
    std::memcpy(&value, &input[at], sizeof(T));
    value = one_nan(value * static_cast<T>(0.1));
    std::memcpy(&wanted[at], &value, sizeof(T));
  }
  for_each_instruction_set([&] {
    Bytes got = input;
    scale(dtype, 0.1, got.data(), got.data(), 1003);
    expect_same(got, wanted, dtype, str("scale ", to_string(dtype), " ", instruction_set()));
  });
}

void scale_multiplies_in_the_accumulator() {
  Inputs inputs;
  check_scale<float>(DType::kFloat32, inputs);
  check_scale<float>(DType::kComplex64, inputs);
  check_scale<double>(DType::kFloat64, inputs);
  check_scale<double>(DType::kComplex128, inputs);
}

void half_sums_round_once() {
  // 2048 + 1 + 1: each step rounded to fp16 would stay at 2048.
  const uint16_t big = 0x6800, unit = 0x3c00;
  const auto* at_unit = reinterpret_cast<const std::byte*>(&unit);
  const std::byte* srcs[] = {reinterpret_cast<const std::byte*>(&big), at_unit, at_unit};
  for_each_instruction_set([&] {
    uint16_t sum = 0;
    std::byte* dst = reinterpret_cast<std::byte*>(&sum);
    reduce({DType::kFloat16}, true, {&dst, 1}, srcs, 1);
    expect(sum == 0x6801, str("2048 + 1 + 1 in float16 is the number with bits ", sum));
  });
}

void nan_wins_min_and_max() {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3}) {
    Inputs inputs;
    Bytes zero(40 * size_of(dtype)), nan = zero;
    // All ones is a NaN of every type.
    for (std::byte& byte : nan) byte = std::byte{0xff};
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const Bytes wanted = model::reduced_any({dtype, op}, true, {nan});
      for (const auto& sources : {std::vector{nan, zero}, std::vector{zero, nan, zero}}) {
        for_each_instruction_set([&] { check_against(wanted, {dtype, op}, true, sources, 0); });
      }
    }
  }
}

void impossible_pairs_say_why() {
  expect(why_not(DType::kFloat32, ReduceOp::kBand) ==
             "Cannot use ReduceOp.BAND with tensors of float32: convert them to another type first",
         why_not(DType::kFloat32, ReduceOp::kBand));
  int possible = 0;
  for_each_pair([&](DType dtype, ReduceOp op) {
    const std::string reason = why_not(dtype, op);
    possible += reason.empty();
    std::byte bytes[16] = {};
    std::byte* const dst = bytes;
    const std::byte* const src = bytes;
    std::string thrown;
    try {
      reduce({dtype, op}, false, {&dst, 1}, {&src, 1}, 1);
    } catch (const UsageError& error) {
      thrown = error.what();
    }
    expect(thrown == reason,
           describe(dtype, op) + ": reduce says '" + thrown + "', why_not '" + reason + "'");
  });
  // 8 integers x 8, 6 reals x 6, 2 complex x 4, bool x 7.
  expect(possible == 64 + 36 + 8 + 7, str(possible, " pairs are possible"));
}

void names_are_torchs() {
  expect(to_string(DType::kFloat8E4M3) == std::string("float8_e4m3fn"), "float8_e4m3fn");
  expect(to_string(DType::kComplex128) == std::string("complex128"), "complex128");
  expect(to_string(ReduceOp::kPremulSum) == std::string("PREMUL_SUM"), "PREMUL_SUM");
  expect(size_of(DType::kComplex128) == 16 && size_of(DType::kBool) == 1, "sizes");
  expect(instruction_sets().front() == "plain", "plain comes first");
  expect(instruction_sets().back() == instruction_set(), "the best is in use");
}

struct Check {
  const char* name;
  void (*run)();
};

constexpr Check kChecks[] = {
    {"names_are_torchs", names_are_torchs},
    {"impossible_pairs_say_why", impossible_pairs_say_why},
    {"conversions_equal_torchs", conversions_equal_torchs},
    {"every_pair_equals_the_model", every_pair_equals_the_model},
    {"as_many_sources_as_a_group_has_ranks", as_many_sources_as_a_group_has_ranks},
    {"scale_multiplies_in_the_accumulator", scale_multiplies_in_the_accumulator},
    {"half_sums_round_once", half_sums_round_once},
    {"nan_wins_min_and_max", nan_wins_min_and_max},
};

}  // namespace
}  // namespace ringcomm

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  for (const auto& check : ringcomm::kChecks) {
    if (std::string(check.name).find(filter) == std::string::npos) continue;
    check.run();
    std::printf("ok %s\n", check.name);
    std::fflush(stdout);
  }
}
