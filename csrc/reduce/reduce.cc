// Names of types and operations, which pairs are possible, and the way to the kernels.
#include "reduce/reduce.h"

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include "base/error.h"
#include "reduce/kernels.h"

#if defined(RINGCOMM_X86_KERNELS)
#include <cpuid.h>
#endif

namespace ringcomm {
namespace {

struct TypeFacts {
  const char* name;
  uint8_t numbers;  // in an element
};

constexpr TypeFacts kTypes[kDTypes] = {
    {"bool", 1},          {"uint8", 1},       {"int8", 1},    {"uint16", 1},    {"int16", 1},
    {"uint32", 1},        {"int32", 1},       {"uint64", 1},  {"int64", 1},     {"float16", 1},
    {"bfloat16", 1},      {"float32", 1},     {"float64", 1}, {"complex64", 2}, {"complex128", 2},
    {"float8_e4m3fn", 1}, {"float8_e5m2", 1},
};

struct OpFacts {
  const char* name;
  const char* needs = "another type of tensor";  // where not every type has the operation
};

constexpr const char* kOrdered = "a tensor of real numbers, which have an order";
constexpr const char* kBits = "an integer or bool tensor";
constexpr OpFacts kOps[kReduceOps] = {
    {"SUM"},
    {"AVG", "a tensor of numbers"},
    {"PRODUCT"},
    {"MIN", kOrdered},
    {"MAX", kOrdered},
    {"BAND", kBits},
    {"BOR", kBits},
    {"BXOR", kBits},
    {"PREMUL_SUM", "a floating-point or complex tensor"},
};

const TypeFacts& facts(DType dtype) { return kTypes[static_cast<int>(dtype)]; }
const OpFacts& facts(ReduceOp op) { return kOps[static_cast<int>(op)]; }

// A number too large for e4m3 became NaN in some versions of torch, and the largest number in
// others. We do as the version we are built with.
const uint8_t kE4M3Overflow = torch::headeronly::Float8_e4m3fn(1e30f).x;

#if defined(RINGCOMM_X86_KERNELS)
// clang 14 does not know the name "f16c".
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// The best last.
constexpr InstructionSet kInstructionSets[] = {
    {"plain", kernels_plain::kKernels, [] { return true; }},
#if defined(RINGCOMM_X86_KERNELS)
    {"avx2", kernels_avx2::kKernels, has_avx2},
    {"avx512", kernels_avx512::kKernels, has_avx512},
#endif
};

const InstructionSet* best() {
  const InstructionSet* found = nullptr;
  for (const InstructionSet& set : kInstructionSets) {
    if (set.available()) found = &set;
  }
  return found;
}

const HostKernels& kernels() {
  return current_instruction_set().load(std::memory_order_relaxed)->kernels;
}

}  // namespace

const char* to_string(DType dtype) { return facts(dtype).name; }
const char* to_string(ReduceOp op) { return facts(op).name; }

std::string why_not(DType dtype, ReduceOp op) {
  if (kernels().reduce[static_cast<int>(dtype)][static_cast<int>(op)]) return {};
  return str("ReduceOp.", to_string(op), " needs ", facts(op).needs, ", not ", to_string(dtype));
}

void reduce(const Reduction& what, bool final, std::span<std::byte* const> dsts,
            std::span<const std::byte* const> srcs, uint64_t count) {
  const Kernel* row = kernels().reduce[static_cast<int>(what.dtype)];
  Kernel kernel = row[static_cast<int>(what.op)];
  RINGCOMM_CHECK(kernel, why_not(what.dtype, what.op));
  RINGCOMM_CHECK(!srcs.empty() && !dsts.empty(), "a reduction needs a source and a destination");
  RINGCOMM_CHECK(what.ranks > 0, "a reduction needs a positive number of ranks");
  if (what.op == ReduceOp::kAvg && !final) kernel = row[static_cast<int>(ReduceOp::kSum)];
  kernel({dsts.data(), srcs.data(), dsts.size(), srcs.size(), count * facts(what.dtype).numbers,
          what.ranks, what.factor, kE4M3Overflow});
}

void scale(DType dtype, double factor, std::byte* dst, const std::byte* src, uint64_t count) {
  const Kernel kernel = kernels().scale[static_cast<int>(dtype)];
  RINGCOMM_CHECK(kernel, why_not(dtype, ReduceOp::kPremulSum));
  kernel({&dst, &src, 1, 1, count * facts(dtype).numbers, 1, factor, kE4M3Overflow});
}

void quantize(Coding coding, const Quantization& job) {
  kernels().blocks[static_cast<int>(coding)].quantize(job);
}

void dequantize(Coding coding, const Dequantization& job) {
  RINGCOMM_CHECK(job.sources > 0, "dequantize needs a source");
  kernels().blocks[static_cast<int>(coding)].dequantize(job);
}

uint8_t e4m3_overflow() { return kE4M3Overflow; }

std::atomic<const InstructionSet*>& current_instruction_set() {
  static std::atomic<const InstructionSet*> chosen{best()};
  return chosen;
}

std::span<const InstructionSet> known_instruction_sets() { return kInstructionSets; }

}  // namespace ringcomm
