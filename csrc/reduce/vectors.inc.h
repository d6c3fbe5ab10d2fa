// Vectors of kVectorBytes or less, and functions of any of them. Included by kernels.inc.h
// only, inside its namespaces.

template <class T, int kLanes>
struct VectorOf {
  using Type [[gnu::vector_size(sizeof(T) * kLanes)]] = T;
};
// GCC's and Clang's portable vectors: one source, and the operators mean the same for every width.
template <class T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::Type;

template <class V>
using ElementOf = std::remove_cvref_t<decltype(V{}[0])>;
template <class V>
inline constexpr int kLanesOf = sizeof(V) / sizeof(ElementOf<V>);

template <class V>
[[gnu::always_inline]] inline V splat(ElementOf<V> value) {
  return value - V{};  // x - 0 is x, for -0 too
}

template <class To, class From>
[[gnu::always_inline]] inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &value, sizeof(To));
  return to;
}

// The first kBytes of a vector; the rest is zero.
template <class V, int kBytes = sizeof(V)>
[[gnu::always_inline]] inline V load(const void* at) {
  V value{};
  __builtin_memcpy(&value, at, kBytes);
  return value;
}

template <int kBytes, class V>
[[gnu::always_inline]] inline void store(void* at, V value) {
  __builtin_memcpy(at, &value, kBytes);
}

// value < limit, as a mask, for values below 2^31: SSE and AVX2 compare signed integers only.
template <class U>
[[gnu::always_inline]] inline auto below(U value, uint32_t limit) {
  using I = Vector<int32_t, kLanesOf<U>>;
  return bits_as<I>(value) < splat<I>(static_cast<int32_t>(limit));
}

template <class V>
[[gnu::always_inline]] inline V canonical_nan(V value) {
  return value == value ? value : splat<V>(__builtin_nanf(""));
}
