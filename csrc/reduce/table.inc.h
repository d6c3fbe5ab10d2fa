// The codec and operation that compute a pair. Included inside the namespaces of kernels.inc.h and
// of the device kernels, each of which says before what a `kKernel<Codec, Op, kUnit>` is, and
// `Kernel` and `KernelTable`. kUnit: how many numbers must stay together.

constexpr Kernel& entry(KernelTable& table, DType dtype, ReduceOp op) {
  return table.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

// Sums, products and bits do not know signs: signed types share the unsigned ones' kernels.
template <class T>
constexpr void add_integer(KernelTable& table, DType dtype) {
  using Wrapping = Integer<std::make_unsigned_t<T>>;
  entry(table, dtype, ReduceOp::kSum) = kKernel<Wrapping, Sum>;
  entry(table, dtype, ReduceOp::kAvg) = kKernel<Wrapping, IntegerAvg<T>>;
  entry(table, dtype, ReduceOp::kProduct) = kKernel<Wrapping, Product>;
  entry(table, dtype, ReduceOp::kMin) = kKernel<Integer<T>, Min>;
  entry(table, dtype, ReduceOp::kMax) = kKernel<Integer<T>, Max>;
  entry(table, dtype, ReduceOp::kBand) = kKernel<Wrapping, Band>;
  entry(table, dtype, ReduceOp::kBor) = kKernel<Wrapping, Bor>;
  entry(table, dtype, ReduceOp::kBxor) = kKernel<Wrapping, Bxor>;
}

// The entries that real and complex numbers share: to a sum, a complex number is two numbers.
template <class Codec>
constexpr void add_sums(KernelTable& table, DType dtype) {
  entry(table, dtype, ReduceOp::kSum) = kKernel<Codec, Sum>;
  entry(table, dtype, ReduceOp::kPremulSum) = kKernel<Codec, Sum>;
  entry(table, dtype, ReduceOp::kAvg) = kKernel<Codec, FloatAvg>;
  table.scale[static_cast<int>(dtype)] = kKernel<Codec, Scale>;
}

template <class Codec>
constexpr void add_real(KernelTable& table, DType dtype) {
  add_sums<Codec>(table, dtype);
  entry(table, dtype, ReduceOp::kProduct) = kKernel<Codec, Product>;
  entry(table, dtype, ReduceOp::kMin) = kKernel<Codec, Min>;
  entry(table, dtype, ReduceOp::kMax) = kKernel<Codec, Max>;
}

template <class Codec>
constexpr void add_complex(KernelTable& table, DType dtype) {
  add_sums<Codec>(table, dtype);
  entry(table, dtype, ReduceOp::kProduct) = kKernel<Codec, ComplexProduct, 2>;
}

constexpr void add_bool(KernelTable& table) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    entry(table, DType::kBool, op) = kKernel<Bool, Bor>;
  }
  for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    entry(table, DType::kBool, op) = kKernel<Bool, Band>;
  }
  entry(table, DType::kBool, ReduceOp::kBxor) = kKernel<Bool, Bxor>;
}

constexpr KernelTable all_kernels() {
  KernelTable table{};
  add_bool(table);
  add_integer<uint8_t>(table, DType::kUint8);
  add_integer<int8_t>(table, DType::kInt8);
  add_integer<uint16_t>(table, DType::kUint16);
  add_integer<int16_t>(table, DType::kInt16);
  add_integer<uint32_t>(table, DType::kUint32);
  add_integer<int32_t>(table, DType::kInt32);
  add_integer<uint64_t>(table, DType::kUint64);
  add_integer<int64_t>(table, DType::kInt64);
  add_real<Float16>(table, DType::kFloat16);
  add_real<BFloat16>(table, DType::kBFloat16);
  add_real<Float<float>>(table, DType::kFloat32);
  add_real<Float<double>>(table, DType::kFloat64);
  add_complex<Float<float>>(table, DType::kComplex64);
  add_complex<Float<double>>(table, DType::kComplex128);
  add_real<Float8E4M3>(table, DType::kFloat8E4M3);
  add_real<Float8E5M2>(table, DType::kFloat8E5M2);
  return table;
}
