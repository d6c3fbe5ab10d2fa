// Codecs: between numbers in memory and the numbers they are accumulated in. Included like
// operations.inc.h. A codec has
//   Stored, Acc       an element in memory, and in the accumulator
//   kParts            accumulator vectors that one register of stored elements makes
//   Register<kLanes>  such a register; each of its parts has kLanes lanes
//   decode(register, parts), encode(parts) -> register
// Which element is in which part and lane is the codec's affair: no operation looks at neighbours.
//
// Every NaN that is stored is its type's positive quiet NaN (0x7fc00000, 0x7e00, 0x7fc0, 0x7f):
// which operand's NaN an addition passes on, and the sign of inf - inf, differ between
// instruction sets, compilers and architectures; results must not.

// Accumulated as stored, in T: unsigned where numbers wrap, signed or not where they compare.
template <class T>
struct Integer {
  using Stored = T;
  using Acc = T;
  static constexpr int kParts = 1;
  template <int kLanes>
  using Register = Vector<T, kLanes>;

  template <class V>
  static constexpr void decode(V value, V (&parts)[1]) {
    parts[0] = value;
  }
  static constexpr auto encode(const auto (&parts)[1]) { return parts[0]; }
};

// A bool made by a view may hold any byte: all but 0 are true.
struct Bool : Integer<uint8_t> {
  template <class V>
  static constexpr void decode(V value, V (&parts)[1]) {
    parts[0] = bits_as<V>(value != V{}) & uint8_t{1};
  }
};

template <class T>
struct Float : Integer<T> {
  static constexpr auto encode(const auto (&parts)[1]) { return canonical_nan(parts[0]); }
};

// Numbers of 16 or 8 bits, taken from 32-bit words by shifts alone: a part is every second or
// fourth element, and no width is converted, which compilers and instruction sets are bad at.
// A format decodes a code that stands in the upper bits of a word, the others being zero, and
// encodes into the lower bits.
template <class Format>
struct Packed {
  using Stored = typename Format::Stored;
  using Acc = float;
  static constexpr int kParts = sizeof(float) / sizeof(Stored);
  static constexpr int kBits = 8 * sizeof(Stored);
  template <int kLanes>
  using Register = Vector<uint32_t, kLanes>;

  template <class U, class F>
  static constexpr void decode(U words, F (&parts)[kParts]) {
    constexpr uint32_t kUpper = ~0u << (32 - kBits);
    parts[0] = Format::template decode<F>(words << (32 - kBits));
    for (int part = 1; part < kParts; ++part) {
      const U code = (words << (32 - kBits - part * kBits)) & kUpper;
      parts[part] = Format::template decode<F>(code);
    }
  }
  template <class F>
  static constexpr auto encode(const F (&parts)[kParts]) {
    using U = Vector<uint32_t, kLanesOf<F>>;
    U words = Format::template encode<U>(parts[0]);
    for (int part = 1; part < kParts; ++part) {
      words |= Format::template encode<U>(parts[part]) << (part * kBits);
    }
    return words;
  }
};

struct BFloat16Format {
  using Stored = uint16_t;
  static constexpr uint32_t kNan = 0x7fc0;
  template <class F, class U>
  static constexpr F decode(U code) {
    return bits_as<F>(code);
  }
  template <class U, class F>
  static constexpr U encode(F value) {
    const U bits = bits_as<U>(canonical_nan(value));
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
};

// An IEEE-like format of 16 or 8 bits. It converts like torch/headeronly, without branches. No step
// meets an fp32 denormal, so the mode that flushes them to zero changes nothing.
template <class T, uint32_t kMantissa, uint32_t kBias, uint32_t kNan_>
struct SmallFormat {
  using Stored = T;
  static constexpr uint32_t kNan = kNan_;
  static constexpr int kUnused = 32 - 8 * sizeof(T);
  static constexpr uint32_t kSign = 0x80000000u >> kUnused;
  static constexpr uint32_t kShift = 23 - kMantissa;
  static constexpr uint32_t kRebias = (127 - kBias) << 23;
  // The fp32 power of two whose last bit weighs as much as the smallest denormal: adding it rounds
  // to denormals, subtracting it normalizes them.
  static constexpr uint32_t kMagic = (127 - kBias + kShift + 1) << 23;

  template <class U, class F>
  static constexpr F with_sign_and_denormals(U code, F normal) {
    const U magnitude = (code & 0x7fffffffu) >> kUnused;
    const F denormal = bits_as<F>(magnitude | kMagic) - bits_as<F>(splat<U>(kMagic));
    const U bits = below(magnitude, 1u << kMantissa) ? bits_as<U>(denormal) : bits_as<U>(normal);
    return bits_as<F>(bits | (code & 0x80000000u));
  }

  // The format has a 5-bit exponent, with inf at its upper end. The exponent is moved up so that
  // inf and NaN are fp32's, then down by an exact multiplication, which leaves those as they are.
  template <class F, class U>
  static constexpr F decode(U code) {
    static_assert(kBias == 15);
    const U raised = ((code & 0x7fffffffu) >> (kUnused - kShift)) + (2 * kRebias);
    return with_sign_and_denormals(code, bits_as<F>(raised) * 0x1p-112f);
  }

  template <class U, class F>
  static constexpr U encode(F value) {
    constexpr uint32_t kInf = 0x1f << kMantissa;
    return encode_small<U>(value, kInf - 1, kInf);
  }

  // Rounds to nearest even. A result above `largest` becomes `overflow`.
  template <class U, class F>
  static constexpr U encode_small(F value, uint32_t largest, uint32_t overflow) {
    const U bits = bits_as<U>(value);
    const U magnitude = bits & 0x7fffffffu;
    const U denormal = bits_as<U>(bits_as<F>(magnitude) + bits_as<F>(splat<U>(kMagic))) - kMagic;
    const U below_half = ((magnitude >> kShift) & 1u) + ((1u << (kShift - 1)) - 1);
    const U normal = (magnitude - kRebias + below_half) >> kShift;
    U code = below(magnitude, kRebias + (1u << 23)) ? denormal : normal;
    code = below(code, largest + 1) ? code : splat<U>(overflow);
    code |= (bits >> kUnused) & kSign;
    return below(magnitude, 0x7f800001u) ? code : splat<U>(kNan);
  }
};

using Float16Format = SmallFormat<uint16_t, 10, 15, 0x7e00>;
using Float8E5M2Format = SmallFormat<uint8_t, 2, 15, 0x7f>;

// No inf, and one NaN: the exponent needs no room at its upper end.
struct Float8E4M3Format : SmallFormat<uint8_t, 3, 7, 0x7f> {
  template <class F, class U>
  static constexpr F decode(U code) {
    const U magnitude = code & 0x7fffffffu;
    const U normal = (magnitude >> (kUnused - kShift)) + kRebias;
    const F value = with_sign_and_denormals(code, bits_as<F>(normal));
    return magnitude == splat<U>(0x7f000000u) ? splat<F>(__builtin_nanf("")) : value;
  }
  template <class U, class F>
  static constexpr U encode(F value) {
    return encode_small<U>(value, 0x7e, kE4M3Overflow);
  }
};

// fp16 where there are instructions for it, which take half a register. They keep NaNs' payloads;
// we do not.
struct HardwareFloat16 : Integer<uint16_t> {
  using Acc = float;

  template <class H, class F>
  static constexpr void decode(H half, F (&parts)[1]) {
    parts[0] = hardware_decode(half);
  }
  static constexpr auto encode(const auto (&parts)[1]) {
    return hardware_encode(canonical_nan(parts[0]));
  }
};

using Float16 = std::conditional_t<kHasHardwareHalf, HardwareFloat16, Packed<Float16Format>>;
using BFloat16 = Packed<BFloat16Format>;
using Float8E4M3 = Packed<Float8E4M3Format>;
using Float8E5M2 = Packed<Float8E5M2Format>;
