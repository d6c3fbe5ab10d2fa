// The kernels of reduce/quantize.h. Included by kernels.inc.h only, inside its namespaces.

constexpr int kLanes = kVectorBytes / 4;
constexpr int kWords = kBlock / 4;  // of 4 codes
using Floats = Vector<float, kLanes>;
using Uints = Vector<uint32_t, kLanes>;
using Ints = Vector<int32_t, kLanes>;

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr float kLeastScale = 0x1p-117f;

// 32 bits by chance for each number: MurmurHash3's finalizer, of its index and two keys.
struct Chance {
  uint32_t first, second;

  Uints of(Uints index) const {
    Uints hash = index + first;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13) ^ second) * 0xc2b2ae35u;
    return hash ^ (hash >> 16);
  }
};

// A coding has the largest code; `nearest` and `by_chance` make codes of numbers in its units, and
// `decode` takes one in the upper bits of a word.
struct Int8Coding {
  static constexpr float kLargest = 127;
  // Whose last bit weighs 1: adding it rounds to nearest even, and the sum ends in the code.
  static constexpr float kMagic = 0x1.8p23f;

  static Uints nearest(Floats value) { return bits_as<Uints>(value + kMagic) & 0xffu; }
  // Adds one of 2^16 numbers, which lie evenly between -1/2 and 1/2.
  static Uints by_chance(Floats value, Uints chance) {
    value = value > kLargest ? splat<Floats>(kLargest) : value;
    value = value < -kLargest ? splat<Floats>(-kLargest) : value;
    const auto drawn = __builtin_convertvector(bits_as<Ints>(chance >> 16), Floats);
    return nearest(value + (drawn * 0x1p-16f - (0.5f - 0x1p-17f)));
  }
  static Floats decode(Uints code) {
    return __builtin_convertvector(bits_as<Ints>(code) >> 24, Floats);
  }
};

struct Float8Coding {
  using Format = Float8E4M3Format;
  static constexpr float kLargest = 448;

  static Uints nearest(Floats value) { return Format::encode_small<Uints>(value, 0x7e, 0x7e); }
  // Adds chance below the last bit, and cuts. Denormals are cut in the binade above theirs, whose
  // last bit weighs as much.
  static Uints by_chance(Floats value, Uints chance) {
    constexpr float kLeast = 0x1p-6f;
    const Uints bits = bits_as<Uints>(value);
    Floats size = bits_as<Floats>(bits & kMagnitude);
    size = size > kLargest ? splat<Floats>(kLargest) : size;
    const auto denormal = size < kLeast;
    const Uints cut = bits_as<Uints>(denormal ? size + kLeast : size) + (chance >> 12);
    const Uints code = (cut - Format::kRebias) >> Format::kShift;
    return (denormal ? code - 8 : code) | ((bits >> 24) & 0x80u);
  }
  static Floats decode(Uints code) { return Format::decode<Floats>(code); }
};

// The numbers to encode, in full; returns the bits of their largest magnitude, an inf or a NaN
// being larger than any number.
[[gnu::always_inline]] inline int32_t gather(float* block, const Quantization& args, uint64_t at) {
  const uint64_t count = args.count - at < kBlock ? args.count - at : kBlock;
  if (count < kBlock) {
    for (uint64_t i = 0; i < kBlock; ++i) {
      block[i] = i < count ? args.src[at + i] + (args.residual ? args.residual[at + i] : 0) : 0;
    }
  }
  Ints most{};
  for (uint64_t i = 0; i < kBlock; i += kLanes) {
    Floats value = load<Floats>(count < kBlock ? block + i : args.src + at + i);
    if (args.residual && count == kBlock) value += load<Floats>(args.residual + at + i);
    store<sizeof(value)>(block + i, value);
    const Ints size = bits_as<Ints>(bits_as<Uints>(value) & kMagnitude);
    most = size > most ? size : most;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  return largest;
}

template <class Code, bool kByChance>
[[gnu::always_inline]] inline void encode(const float* block, std::byte* codes, float inverse,
                                          Chance chance, uint32_t index) {
  Uints lanes{};
  for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  for (uint32_t w = 0; w < kWords; w += kLanes) {
    Uints words{};
    for (uint32_t part = 0; part < 4; ++part) {
      const uint32_t i = part * kWords + w;
      const Floats value = load<Floats>(block + i) * inverse;
      Uints code{};
      if constexpr (kByChance) {
        code = Code::by_chance(value, chance.of(lanes + (index + i)));
      } else {
        code = Code::nearest(value);
      }
      words |= code << (8 * part);
    }
    store<sizeof(words)>(codes + 4 * w, words);
  }
}

template <class Code>
[[gnu::always_inline]] inline Floats decoded(Uints words, int part, float scale) {
  return Code::decode((words << (24 - 8 * part)) & 0xff000000u) * scale;
}

template <class Code, bool kByChance>
void quantize_by(const Quantization& args) {
  const Chance chance{static_cast<uint32_t>(args.seed), static_cast<uint32_t>(args.seed >> 32)};
  alignas(kVectorBytes) float block[kBlock];
  std::byte* to = args.blocks;
  for (uint64_t at = 0; at < args.count; at += kBlock, to += kBlockBytes) {
    const int32_t largest = gather(block, args, at);
    const bool finite = static_cast<uint32_t>(largest) < kInfinity;
    float scale = bits_as<float>(largest) / Code::kLargest;
    scale = scale > kLeastScale ? scale : kLeastScale;
    if (!finite) scale = __builtin_nanf("");
    store<sizeof(scale)>(to, scale);
    if (finite) {
      const uint32_t index = args.first + static_cast<uint32_t>(at);
      encode<Code, kByChance>(block, to + 4, 1 / scale, chance, index);
    } else {
      __builtin_memset(to + 4, 0, kBlock);
    }
    if (!args.residual) continue;
    for (uint32_t w = 0; w < kWords; w += kLanes) {
      const Uints words = load<Uints>(to + 4 + 4 * w);
      for (uint32_t part = 0; part < 4; ++part) {
        float* const left = block + part * kWords + w;
        const Floats error =
            load<Floats>(left) - decoded<Code>(words, static_cast<int>(part), scale);
        store<sizeof(error)>(left, finite ? error : Floats{});
      }
    }
    const uint64_t count = args.count - at < kBlock ? args.count - at : kBlock;
    __builtin_memcpy(args.residual + at, block, count * sizeof(float));
  }
}

template <class Code>
void quantize_kernel(const Quantization& args) {
  args.by_chance ? quantize_by<Code, true>(args) : quantize_by<Code, false>(args);
}

template <class Code>
void dequantize_kernel(const Dequantization& args) {
  alignas(kVectorBytes) float rest[kBlock];
  const std::byte* from = args.blocks;
  for (uint64_t at = 0; at < args.count; at += kBlock, from += kBlockBytes) {
    const bool whole = args.count - at >= kBlock;
    float* const dst = whole ? args.dst + at : rest;
    for (uint32_t w = 0; w < kWords; w += kLanes) {
      Floats total[4] = {};
      const std::byte* source = from;
      for (size_t s = 0; s < args.sources; ++s, source += args.source_bytes) {
        const float scale = load<float>(source);
        const Uints words = load<Uints>(source + 4 + 4 * w);
        for (int part = 0; part < 4; ++part) {
          const Floats value = decoded<Code>(words, part, scale);
          total[part] = s ? total[part] + value : value;
        }
      }
      for (uint32_t part = 0; part < 4; ++part) {
        const Floats value = args.divisor != 1 ? total[part] / args.divisor : total[part];
        store<sizeof(value)>(dst + part * kWords + w, canonical_nan(value));
      }
    }
    if (!whole) __builtin_memcpy(args.dst + at, rest, (args.count - at) * sizeof(float));
  }
}

constexpr BlockKernels kBlockKernels[kCodings] = {
    {quantize_kernel<Int8Coding>, dequantize_kernel<Int8Coding>},
    {quantize_kernel<Float8Coding>, dequantize_kernel<Float8Coding>},
};
