// Tensors as spans of memory. Nothing is packed; a tensor is copied only where its memory does not
// hold its elements in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "plan/spans.h"
#include "reduce/reduce.h"

namespace ringcomm {

// Throws a RuntimeError: "ringcomm::all_reduce: invalid root rank: 7".
struct Refusal {
  const char* collective;
  [[noreturn]] void operator()(const std::string& why) const;
};

// Returns the type as the reductions know it; nullopt if they cannot compute with it.
std::optional<DType> dtype_of(at::ScalarType type);
// Returns a type of the same size, for collectives that only move bytes.
DType movable_dtype(at::ScalarType type);

// Refuses what ringcomm does not serve: sparse tensors, devices other than CPU and CUDA.
void check_served(const Refusal& refuse, const at::Tensor& tensor);

uint64_t bytes_of(const at::Tensor& tensor);
// Returns a hash of the order in which elements lie in dense memory; 0 where that is the order of
// their indices, and where they have to be copied.
uint64_t layout_of(const at::Tensor& tensor);
Span span_of(const at::Tensor& tensor);  // its memory; it is contiguous

// The copies that stand in for some tensors of a call while it lasts.
class Staging {
 public:
  Span input(const at::Tensor& tensor);
  // Returns memory for a result. `apart`: always in a copy. Copies replace the tensors' content in
  // the order of these calls.
  Span output(const at::Tensor& tensor, bool apart = false);
  // Returns memory where the result replaces the input. Dense memory is used whatever the order of
  // its elements: every rank must have the same layout_of() it.
  Span in_place(const at::Tensor& tensor, bool apart = false);
  // Copies these elements, each multiplied as ringcomm::scale() does.
  Span scaled(const Span& span, const at::TensorOptions& options, double factor);

  bool empty() const { return inputs_.empty() && results_.empty(); }
  // Copies results to where they belong. Call it after success.
  void finish() const;

 private:
  std::vector<at::Tensor> inputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> results_;  // the caller's, the copy
};

}  // namespace ringcomm
