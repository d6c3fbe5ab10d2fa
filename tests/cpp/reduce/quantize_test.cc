// Blocks of 8 bits: every instruction set makes the same codes, residuals and sums, bit by bit.
#include "reduce/quantize.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "cpp/harness.h"
#include "instruction_sets.h"

namespace ringcomm {
namespace {

using testing::Random;
using testing::require;

struct Result {
  std::vector<std::byte> blocks;
  std::vector<float> residual, sums;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Any bits, so that denormals, infs and NaNs are among them; or numbers of one size.
std::vector<float> numbers(uint64_t count, bool any, Random& random) {
  std::vector<float> some(count);
  for (float& number : some) {
    const auto bits = static_cast<uint32_t>(random.next());
    if (any && random.below(300) == 0) {
      std::memcpy(&number, &bits, sizeof(number));
    } else {
      number = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-30f;
    }
  }
  return some;
}

Result work(Coding coding, bool by_chance, uint64_t count, bool any, size_t sources) {
  Random random(count + sources);
  Result result;
  const uint64_t bytes = blocks_of(count) * kBlockBytes;
  result.blocks.resize(bytes * sources);
  result.sums.resize(count);
  for (size_t source = 0; source < sources; ++source) {
    const std::vector<float> src = numbers(count, any, random);
    result.residual = numbers(count, false, random);
    quantize(coding, {.src = src.data(),
                      .residual = source == 0 ? nullptr : result.residual.data(),
                      .blocks = result.blocks.data() + source * bytes,
                      .count = count,
                      .by_chance = by_chance,
                      .seed = random.next(),
                      .first = static_cast<uint32_t>(random.next())});
  }
  dequantize(coding, {.blocks = result.blocks.data(),
                      .source_bytes = bytes,
                      .sources = sources,
                      .divisor = 3,
                      .dst = result.sums.data(),
                      .count = count});
  return result;
}

void every_instruction_set_makes_the_same_bits() {
  for (const uint64_t count : {1, 63, 256, 257, 511, 512, 5000}) {
    for (int variant = 0; variant < 8; ++variant) {
      const Coding coding{static_cast<uint8_t>(variant & 1)};
      const bool by_chance = variant & 2, any = variant & 4;
      const size_t sources = 1 + count % 4;
      use_instruction_set("plain");
      const Result wanted = work(coding, by_chance, count, any, sources);
      for (const std::string& name : instruction_sets()) {
        use_instruction_set(name);
        const Result got = work(coding, by_chance, count, any, sources);
        require(got.blocks == wanted.blocks, name, " makes other codes of ", count, " numbers");
        require(same(got.residual, wanted.residual), name, " leaves other residuals of ", count);
        require(same(got.sums, wanted.sums), name, " makes other sums of ", count, " numbers");
      }
    }
  }
}

// Nothing is written past the end of a tensor, nor of its last block.
void the_end_is_kept() {
  for (const std::string& name : instruction_sets()) {
    use_instruction_set(name);
    for (const uint64_t count : {1, 255, 257}) {
      std::vector<float> src(count, 1), residual(count + 1, 7), dst(count + 1, 7);
      residual[count] = dst[count] = 42;
      const uint64_t bytes = blocks_of(count) * kBlockBytes;
      std::vector<std::byte> blocks(bytes + 1, std::byte{0x5a});
      quantize(Coding::kInt8, {.src = src.data(),
                               .residual = residual.data(),
                               .blocks = blocks.data(),
                               .count = count});
      dequantize(Coding::kInt8, {.blocks = blocks.data(), .dst = dst.data(), .count = count});
      require(blocks[bytes] == std::byte{0x5a}, name, " writes past the blocks");
      require(residual[count] == 42 && dst[count] == 42, name, " writes past the tensor");
      require(dst[count - 1] == 8, name, " loses the last number");
    }
  }
}

}  // namespace
}  // namespace ringcomm

int main(int argc, char** argv) {
  using namespace ringcomm;
  return testing::run_checks(
      {{"same_bits", every_instruction_set_makes_the_same_bits}, {"the_end", the_end_is_kept}},
      argc, argv);
}
