// Names of types and operations, which pairs are possible, and the way to the kernels.
#include "reduce/reduce.h"

#include "base/error.h"
#include "reduce/kernels.h"

#if defined(RINGCOMM_X86_KERNELS)
#include <cpuid.h>
#endif

namespace ringcomm {
namespace {

constexpr const char* kTypes[kDTypes] = {
    "bool",    "uint8",     "int8",       "uint16",        "int16",       "uint32",
    "int32",   "uint64",    "int64",      "float16",       "bfloat16",    "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
};
constexpr const char* kOps[kReduceOps] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                          "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

uint64_t numbers_in(DType dtype) {  // in an element
  return dtype == DType::kComplex64 || dtype == DType::kComplex128 ? 2 : 1;
}

#if defined(RINGCOMM_X86_KERNELS)
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;  // clang 14 does not know the name "f16c"
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2");
}

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
  const InstructionSet* last = nullptr;
  for (const InstructionSet& set : kInstructionSets) {
    if (set.available()) last = &set;
  }
  return last;
}

const HostKernels& kernels() {
  return current_instruction_set().load(std::memory_order_relaxed)->kernels;
}

}  // namespace

const char* to_string(DType dtype) { return kTypes[static_cast<int>(dtype)]; }
const char* to_string(ReduceOp op) { return kOps[static_cast<int>(op)]; }

std::string why_not(DType dtype, ReduceOp op) {
  if (kernels().reduce[static_cast<int>(dtype)][static_cast<int>(op)]) return {};
  return str("Cannot use ReduceOp.", to_string(op), " with tensors of ", to_string(dtype),
             ": convert them to another type first");
}

void reduce(const Reduction& what, bool final, std::span<std::byte* const> dsts,
            std::span<const std::byte* const> srcs, uint64_t count) {
  const Kernel* row = kernels().reduce[static_cast<int>(what.dtype)];
  Kernel kernel = row[static_cast<int>(what.op)];
  RINGCOMM_CHECK(kernel, why_not(what.dtype, what.op));
  RINGCOMM_CHECK(!srcs.empty() && !dsts.empty(), "a reduction needs a source and a destination");
  RINGCOMM_CHECK(what.ranks > 0, "a reduction needs a positive number of ranks");
  if (what.op == ReduceOp::kAvg && !final) kernel = row[static_cast<int>(ReduceOp::kSum)];
  kernel({dsts.data(), srcs.data(), dsts.size(), srcs.size(), count * numbers_in(what.dtype),
          what.ranks, what.factor});
}

void scale(DType dtype, double factor, std::byte* dst, const std::byte* src, uint64_t count) {
  const Kernel kernel = kernels().scale[static_cast<int>(dtype)];
  RINGCOMM_CHECK(kernel, why_not(dtype, ReduceOp::kPremulSum));
  kernel({&dst, &src, 1, 1, count * numbers_in(dtype), 1, factor});
}

void quantize(Coding coding, const Quantization& args) {
  kernels().blocks[static_cast<int>(coding)].quantize(args);
}

void dequantize(Coding coding, const Dequantization& args) {
  RINGCOMM_CHECK(args.sources > 0, "dequantize needs a source");
  kernels().blocks[static_cast<int>(coding)].dequantize(args);
}

std::atomic<const InstructionSet*>& current_instruction_set() {
  static std::atomic<const InstructionSet*> chosen{best()};
  return chosen;
}

std::span<const InstructionSet> known_instruction_sets() { return kInstructionSets; }

}  // namespace ringcomm
