// Operations. apply(a, b) combines, in the order of the sources; finish() ends. Included by
// kernels.inc.h and, on vectors of one lane, by cuda/codecs.inc.h, inside their namespaces.
// constexpr, so that nvcc takes them for the device, too (--expt-relaxed-constexpr).

struct Combine {
  static constexpr bool kHot = false;  // worth a copy of the loop for some numbers of sources
  static constexpr auto finish(auto value, const ReduceArgs&) { return value; }
};

struct Sum : Combine {
  static constexpr bool kHot = true;
  static constexpr auto apply(auto a, auto b) { return a + b; }
};

// Divides, rather than multiplying with 1 / ranks: the mean of equal numbers is that number.
struct FloatAvg : Sum {
  template <class V>
  static constexpr V finish(V value, const ReduceArgs& args) {
    return value / splat<V>(static_cast<ElementOf<V>>(args.ranks));
  }
};

// `T` says whether the wrapped sum is read as signed. Narrow types divide as 32 bits: ranks may be
// more than the type holds.
template <class T>
struct IntegerAvg : Sum {
  static constexpr bool kHot = false;
  template <class V>
  static constexpr V finish(V value, const ReduceArgs& args) {
    using Narrow = std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>;
    using Wide = std::conditional_t<sizeof(T) == 8, T, Narrow>;
    const Wide divisor = static_cast<Wide>(args.ranks);
    if constexpr (std::is_arithmetic_v<V>) {
      value = static_cast<V>(static_cast<T>(value) / divisor);
    } else {
      for (int lane = 0; lane < kLanesOf<V>; ++lane) {
        value[lane] = static_cast<ElementOf<V>>(static_cast<T>(value[lane]) / divisor);
      }
    }
    return value;
  }
};

struct Scale : Combine {
  static constexpr auto apply(auto a, auto) { return a; }
  template <class V>
  static constexpr V finish(V value, const ReduceArgs& args) {
    return value * splat<V>(static_cast<ElementOf<V>>(args.factor));
  }
};

struct Product : Combine {
  static constexpr auto apply(auto a, auto b) { return a * b; }
};

// Equal numbers (-0 and 0): the first. A NaN, of either, is the result.
struct Min : Combine {
  template <class V>
  static constexpr V apply(V a, V b) {
    const V least = b < a ? b : a;
    return std::is_floating_point_v<ElementOf<V>> ? (b == b ? least : b) : least;
  }
};

struct Max : Combine {
  template <class V>
  static constexpr V apply(V a, V b) {
    const V most = b > a ? b : a;
    return std::is_floating_point_v<ElementOf<V>> ? (b == b ? most : b) : most;
  }
};

struct Band : Combine {
  static constexpr auto apply(auto a, auto b) { return a & b; }
};

struct Bor : Combine {
  static constexpr auto apply(auto a, auto b) { return a | b; }
};

struct Bxor : Combine {
  static constexpr auto apply(auto a, auto b) { return a ^ b; }
};
