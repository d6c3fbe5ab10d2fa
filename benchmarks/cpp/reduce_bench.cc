// Prints the speed of the reduce kernels, in GB/s: all sources read plus the destination written,
// by type, operation, instruction set, number of sources and bytes of each.
//   reduce_bench [FILTER]     only lines that contain FILTER, as "float32 SUM", "blocks" or "avx2"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpp/reduce/instruction_sets.h"
#include "reduce/quantize.h"
#include "reduce/reduce.h"

namespace ringcomm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Small numbers of the type: no NaN, no denormal, nothing that overflows.
void fill(std::vector<std::byte>& bytes, DType dtype) {
  static constexpr uint32_t kFloat = 0x3f810203;
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = dtype == DType::kFloat32 || dtype == DType::kComplex64
                   ? std::byte(kFloat >> (8 * (i % 4)))
                   : std::byte(i % 2 ? 0x3c : i % 64);
    if (dtype == DType::kBool) bytes[i] = std::byte(i % 2);
  }
}

// The best of several rounds: the machine is shared, and only ever adds time.
template <class F>
double best_seconds(F&& once, double budget) {
  once();
  double best = 1e9;
  const Clock::time_point start = Clock::now();
  while (seconds_since(start) < budget) {
    const Clock::time_point round = Clock::now();
    int times = 0;
    do {
      once();
      ++times;
    } while (seconds_since(round) < budget / 20);
    best = std::min(best, seconds_since(round) / times);
  }
  return best;
}

struct Case {
  DType dtype;
  ReduceOp op;
  size_t sources;
  size_t bytes;
};

double gigabytes_per_second(const Case& c) {
  std::vector<std::vector<std::byte>> buffers(c.sources + 1, std::vector<std::byte>(c.bytes));
  std::vector<const std::byte*> srcs;
  for (auto& buffer : buffers) {
    fill(buffer, c.dtype);
    srcs.push_back(buffer.data());
  }
  srcs.pop_back();
  std::byte* const dst = buffers.back().data();
  const Reduction what{c.dtype, c.op, static_cast<int>(c.sources)};
  const auto once = [&] { reduce(what, true, {&dst, 1}, srcs, c.bytes / size_of(c.dtype)); };
  const double moved = static_cast<double>(c.bytes * (c.sources + 1));
  return moved / best_seconds(once, 0.02) / 1e9;
}

void bench_all(const std::string& filter) {
  std::printf("%-14s %-10s %-7s %9s %9s %9s %9s\n", "GB/s", "", "", "2x64K", "4x64K", "2x4M",
              "4x4M");
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const DType dtype{static_cast<uint8_t>(d)};
      const ReduceOp op{static_cast<uint8_t>(o)};
      if (op == ReduceOp::kPremulSum || !why_not(dtype, op).empty()) continue;
      for (const std::string& isa : instruction_sets()) {
        char line[64];
        std::snprintf(line, sizeof(line), "%-14s %-10s %-7s", to_string(dtype), to_string(op),
                      isa.c_str());
        const std::string label = std::string(to_string(dtype)) + ' ' + to_string(op) + ' ' + isa;
        if (label.find(filter) == std::string::npos) continue;
        use_instruction_set(isa);
        std::printf("%s", line);
        for (size_t bytes : {size_t{64} << 10, size_t{4} << 20}) {
          for (size_t sources : {2, 4}) {
            std::printf(" %9.1f", gigabytes_per_second({dtype, op, sources, bytes}));
          }
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
}

// GB/s of fp32: quantized, and from two sources that are added up.
void bench_blocks(const std::string& filter) {
  constexpr uint64_t kCount = 1 << 18;
  std::vector<float> numbers(kCount), residual(kCount);
  for (uint64_t i = 0; i < kCount; ++i) numbers[i] = static_cast<float>(i % 1009) - 504;
  std::vector<std::byte> blocks(2 * blocks_of(kCount) * kBlockBytes);
  for (const Coding coding : {Coding::kInt8, Coding::kFloat8}) {
    for (const std::string& isa : instruction_sets()) {
      const std::string label = (coding == Coding::kInt8 ? "int8 " : "fp8 ") + isa;
      if (("blocks " + label).find(filter) == std::string::npos) continue;
      use_instruction_set(isa);
      Quantization job{.src = numbers.data(), .blocks = blocks.data(), .count = kCount};
      const auto rate = [](const auto& once) { return 4e-9 * kCount / best_seconds(once, 0.1); };
      const double nearest = rate([&] { quantize(coding, job); });
      job.by_chance = true;
      const double by_chance = rate([&] { quantize(coding, job); });
      job = {.src = numbers.data(),
             .residual = residual.data(),
             .blocks = blocks.data(),
             .count = kCount};
      const double feedback = rate([&] { quantize(coding, job); });
      const double sum = rate([&] {
        dequantize(coding, {.blocks = blocks.data(),
                            .source_bytes = blocks.size() / 2,
                            .sources = 2,
                            .divisor = 2,
                            .dst = numbers.data(),
                            .count = kCount});
      });
      std::printf("blocks %-12s nearest %5.1f  by chance %5.1f  feedback %5.1f  add 2 %5.1f GB/s\n",
                  label.c_str(), nearest, by_chance, feedback, sum);
    }
  }
}

void bench_one_element() {
  for (const std::string& isa : instruction_sets()) {
    use_instruction_set(isa);
    float a = 1, b = 2, c = 0;
    std::byte* const dst = reinterpret_cast<std::byte*>(&c);
    const std::byte* const srcs[] = {reinterpret_cast<std::byte*>(&a),
                                     reinterpret_cast<std::byte*>(&b)};
    const auto thousand = [&] {
      for (int i = 0; i < 1000; ++i) reduce({}, true, {&dst, 1}, srcs, 1);
    };
    std::printf("one float32, 2 sources, %-7s %6.1f ns\n", isa.c_str(),
                best_seconds(thousand, 0.02) * 1e6);
  }
}

}  // namespace
}  // namespace ringcomm

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  ringcomm::bench_one_element();
  ringcomm::bench_blocks(filter);
  ringcomm::bench_all(filter);
}
