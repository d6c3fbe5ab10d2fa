#include "torch/tensors.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/hash.h>

#include "base/error.h"
#include "torch/options.h"

namespace ringcomm {
namespace {

Span span_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), bytes_of(tensor)};
}

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
  switch (type) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUint8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUint16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUint32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUint64;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    default:
      return std::nullopt;
  }
}

DType movable_dtype(at::ScalarType type) {
  if (const auto known = dtype_of(type)) return *known;
  switch (c10::elementSize(type)) {
    case 2:
      return DType::kUint16;
    case 4:
      return DType::kUint32;
    case 8:
      return DType::kUint64;
    default:
      return DType::kUint8;
  }
}

void check_served(const Refusal& refuse, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) {
    refuse(str("only supports dense tensors, this one is ", c10::str(tensor.layout()),
               ": call .to_dense() first"));
  }
  if (tensor.is_cpu() || tensor.is_cuda()) return;
  refuse(str("the tensor is on ", tensor.device().str(), ", and ringcomm serves CPU and CUDA"));
}

void check_on_cpu(const Refusal& refuse, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  refuse(str("the tensor is sparse and on ", tensor.device().str(),
             ": move it to the CPU, or call .to_dense() first"));
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

uint64_t layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return 0;
  size_t hash = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 1) continue;  // its stride means nothing
    hash = c10::hash_combine(hash, static_cast<size_t>(tensor.size(i)));
    hash = c10::hash_combine(hash, static_cast<size_t>(tensor.stride(i)));
  }
  return hash | 1;
}

Span Staging::input(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && is_plain(tensor)) return span_of(tensor);
  const BelowAutograd guard;
  return span_of(inputs_.emplace_back(plain_copy(tensor)));
}

Span Staging::output(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && is_plain(tensor)) return span_of(tensor);
  at::assert_no_internal_overlap(tensor);
  const BelowAutograd guard;
  auto copy =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  return span_of(results_.emplace_back(tensor, std::move(copy)).second);
}

Span Staging::in_place(const at::Tensor& tensor, uint64_t& layout) {
  if (is_plain(tensor)) {
    if (tensor.is_contiguous()) return span_of(tensor);
    if (tensor.is_non_overlapping_and_dense()) {
      layout = c10::hash_combine(layout, layout_of(tensor));
      return span_of(tensor);
    }
  }
  at::assert_no_internal_overlap(tensor);
  const BelowAutograd guard;
  return span_of(results_.emplace_back(tensor, plain_copy(tensor)).second);
}

Span Staging::scratch(at::Device device, uint64_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  inputs_.push_back(at::empty({size}, at::TensorOptions().device(device).dtype(at::kByte)));
  return {static_cast<std::byte*>(inputs_.back().data_ptr()), bytes};
}

void Staging::finish() const {
  if (results_.empty()) return;
  const BelowAutograd guard;
  for (const auto& [tensor, copy] : results_) tensor.copy_(copy);
}

}  // namespace ringcomm
