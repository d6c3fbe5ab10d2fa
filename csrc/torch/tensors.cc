#include "torch/tensors.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "torch/options.h"

namespace ringcomm {
namespace {

constexpr std::pair<at::ScalarType, DType> kTypes[] = {
    {at::kFloat, DType::kFloat32},
    {at::kBFloat16, DType::kBFloat16},
    {at::kHalf, DType::kFloat16},
    {at::kDouble, DType::kFloat64},
    {at::kLong, DType::kInt64},
    {at::kInt, DType::kInt32},
    {at::kByte, DType::kUint8},
    {at::kBool, DType::kBool},
    {at::kChar, DType::kInt8},
    {at::kShort, DType::kInt16},
    {at::kUInt16, DType::kUint16},
    {at::kUInt32, DType::kUint32},
    {at::kUInt64, DType::kUint64},
    {at::kComplexFloat, DType::kComplex64},
    {at::kComplexDouble, DType::kComplex128},
    {at::kFloat8_e4m3fn, DType::kFloat8E4M3},
    {at::kFloat8_e5m2, DType::kFloat8E5M2},
};

// Does memory hold the values, or does torch negate or conjugate them on the way?
bool is_plain(const at::Tensor& tensor) { return !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor plain_copy(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Copies are no part of what a user differentiates.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

}  // namespace

void Refusal::operator()(const std::string& why) const {
  TORCH_CHECK(false, kBackendName, "::", collective, ": ", why);
}

std::optional<DType> dtype_of(at::ScalarType type) {
  for (const auto& [theirs, ours] : kTypes) {
    if (theirs == type) return ours;
  }
  return std::nullopt;
}

DType movable_dtype(at::ScalarType type) {
  return dtype_of(type).value_or(unsigned_of(c10::elementSize(type)));
}

void check_served(const Refusal& refuse, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) {
    refuse(str("only supports dense tensors, this one is ", c10::str(tensor.layout()),
               ": call .to_dense() first"));
  }
  if (tensor.is_cpu() || tensor.is_cuda()) return;
  refuse(str("the tensor is on ", tensor.device().str(), ", and ringcomm serves CPU and CUDA"));
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

uint64_t layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !is_plain(tensor) || !tensor.is_non_overlapping_and_dense()) {
    return 0;
  }
  uint64_t hash = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 1) continue;  // its stride means nothing
    hash =
        mix(hash, {static_cast<uint64_t>(tensor.size(i)), static_cast<uint64_t>(tensor.stride(i))});
  }
  return hash | 1;
}

Span span_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), bytes_of(tensor)};
}

Span Staging::input(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && is_plain(tensor)) return span_of(tensor);
  const BelowAutograd guard;
  return span_of(inputs_.emplace_back(plain_copy(tensor)));
}

Span Staging::output(const at::Tensor& tensor, bool apart) {
  if (!apart && tensor.is_contiguous() && is_plain(tensor)) return span_of(tensor);
  at::assert_no_internal_overlap(tensor);
  const BelowAutograd guard;
  const auto copy = at::empty_like(tensor, {}, at::MemoryFormat::Contiguous);
  return span_of(results_.emplace_back(tensor, copy).second);
}

Span Staging::in_place(const at::Tensor& tensor, bool apart) {
  const bool in_order = is_plain(tensor) && tensor.is_contiguous() && !apart;
  if (in_order || layout_of(tensor) != 0) return span_of(tensor);
  at::assert_no_internal_overlap(tensor);
  const BelowAutograd guard;
  const at::Tensor copy = plain_copy(tensor);  // which may be the tensor itself
  return span_of(results_.emplace_back(tensor, apart ? copy.clone() : copy).second);
}

Span Staging::scaled(const Span& span, const at::TensorOptions& options, double factor) {
  const BelowAutograd guard;
  const auto type = c10::toRealValueType(options.dtype().toScalarType());  // both parts alike
  const auto count = static_cast<int64_t>(span.bytes / c10::elementSize(type));
  const auto numbers = at::for_blob(span.data, {count})
                           .options(options.dtype(type))
                           .target_device(options.device())
                           .make_tensor();
  const bool small = c10::isFloat8Type(type);  // torch does not multiply these
  const auto product = (small ? numbers.to(at::kFloat) : numbers).mul(factor);
  return span_of(inputs_.emplace_back(product.to(type)));
}

void Staging::finish() const {
  if (results_.empty()) return;
  const BelowAutograd guard;
  for (const auto& [tensor, copy] : results_) tensor.copy_(copy);
}

}  // namespace ringcomm
