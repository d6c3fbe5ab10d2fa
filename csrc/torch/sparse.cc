// all_reduce of sparse tensors. It gathers the numbers of elements, then the elements: their
// indices and values. Every rank adds them up.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "torch/call.h"

namespace ringcomm {
namespace {

class SparseSum {
 public:
  SparseSum(const at::Tensor& tensor, bool average, RankAndSize self)
      : self_(self), average_(average), tensor_(tensor) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    input_ = tensor.coalesce();
    mine_ = at::tensor({input_._nnz()}, at::kLong);
    counts_ = at::empty({self.size}, at::kLong);
  }

  // First the numbers of elements. The tensors live as long as this object.
  Operation first() const {
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.input = {span_of(mine_)};
    operation.output = {span_of(counts_)};
    operation.shards.assign(static_cast<size_t>(self_.size), bytes_of(mine_));
    Operation call;
    call.collective = Collective::kAllReduce;
    call.dtype = movable_dtype(input_.scalar_type());
    call.op = average_ ? ReduceOp::kAvg : ReduceOp::kSum;
    call.layout = mix(static_cast<uint64_t>(input_.scalar_type()),
                      static_cast<uint64_t>(input_.sparse_dim()));
    for (const int64_t size : input_.sizes()) {
      call.layout = mix(call.layout, static_cast<uint64_t>(size));
    }
    make_part(operation, std::move(call), Purpose::kSparse);
    return operation;
  }

  bool next(Operation& operation) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (all_values_.defined()) {
      finish();
      return false;
    }
    gather_elements(operation);
    return true;
  }

 private:
  void gather_elements(Operation& operation) {
    indices_ = input_._indices().t().contiguous();  // those of an element together
    values_ = input_._values().contiguous();
    auto sizes = values_.sizes().vec();
    sizes[0] = counts_.sum().item<int64_t>();
    all_indices_ = at::empty({sizes[0], input_.sparse_dim()}, at::kLong);
    all_values_ = at::empty(sizes, values_.options());
    operation.input = {span_of(indices_), span_of(values_)};
    operation.output.clear();
    int64_t first = 0;
    for (Rank rank = 0; rank < self_.size; ++rank) {
      const int64_t count = counts_.const_data_ptr<int64_t>()[rank];
      for (const at::Tensor& all : {all_indices_, all_values_}) {
        operation.output.push_back(span_of(all.narrow(0, first, count)));
      }
      first += count;
      const auto theirs = std::span(operation.output).last(2);
      operation.shards[static_cast<size_t>(rank)] = theirs[0].bytes + theirs[1].bytes;
    }
  }

  void finish() {
    const auto sum = at::_sparse_coo_tensor_unsafe(all_indices_.t().contiguous(), all_values_,
                                                   input_.sizes(), input_.options())
                         .coalesce();
    tensor_.copy_(average_ ? sum / self_.size : sum);
  }

  const RankAndSize self_;
  const bool average_;
  at::Tensor tensor_, input_, mine_, counts_, indices_, all_indices_, values_, all_values_;
};

}  // namespace

Call sparse_all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, RankAndSize self) {
  constexpr Refusal refuse{"all_reduce"};
  const at::Tensor& tensor = only_one(refuse, tensors);
  if (!tensor.is_cpu()) {
    refuse(str("the tensor is sparse and on ", tensor.device().str(),
               ": move it to the CPU, or call .to_dense() first"));
  }
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  if (op.op_ != c10d::ReduceOp::SUM && !average) {
    refuse(
        "unsupported reduction operation (allreduce of sparse tensors only works with "
        "ReduceOp.SUM and AVG)");
  }
  const auto sum = std::make_shared<SparseSum>(tensor, average, self);
  Call call(c10d::OpType::_ALLREDUCE_SPARSE, Collective::kAllGather);
  call.name = "sparse_all_reduce";
  call.operation = sum->first();
  call.continuation = [sum](Operation& operation) { return sum->next(operation); };
  call.inputs = call.outputs = tensors;
  return call;
}

}  // namespace ringcomm
