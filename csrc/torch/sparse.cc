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
    // What a rank says of its tensor: how many elements it has, and a hash of its sizes.
    const auto sizes = static_cast<int64_t>(c10::get_hash(input_.sizes(), input_.sparse_dim()));
    mine_ = at::tensor({input_._nnz(), sizes}, at::kLong);
    rows_ = at::empty({self.size, 2}, at::kLong);
  }

  // First the rows. The tensors live as long as this object.
  Operation first() const {
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.input = {span_of(mine_)};
    operation.output = {span_of(rows_)};
    operation.shards.assign(static_cast<size_t>(self_.size), bytes_of(mine_));
    // What ranks compare is the call, not what is gathered for it.
    Operation asked;
    asked.collective = Collective::kAllReduce;
    asked.dtype = movable_dtype(input_.scalar_type());
    asked.op = average_ ? ReduceOp::kAvg : ReduceOp::kSum;
    asked.purpose = Purpose::kSparse;
    asked.layout = 1 + static_cast<uint64_t>(input_.scalar_type());
    operation.whole = make_descriptor(asked, 0);
    operation.whole_bytes = bytes_of(operation.output);
    return operation;
  }

  bool next(Operation& operation) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (all_values_.defined()) {
      finish();
      return false;
    }
    check_rows();
    gather_elements(operation);
    return true;
  }

 private:
  const int64_t* row(Rank rank) const { return rows_.const_data_ptr<int64_t>() + 2 * rank; }

  void check_rows() const {
    for (Rank rank = 0; rank < self_.size; ++rank) {
      if (row(rank)[1] == row(self_.rank)[1]) continue;
      throw MismatchError(ringcomm::str("all_reduce of sparse tensors: rank ", self_.rank,
                                        " gave one of ", input_.sizes(), " with ",
                                        input_.sparse_dim(), " sparse dimensions, and rank ", rank,
                                        " another: every rank must give the same sizes"));
    }
  }

  void gather_elements(Operation& operation) {
    indices_ = input_._indices().t().contiguous();  // those of an element together
    values_ = input_._values().contiguous();
    auto sizes = values_.sizes().vec();
    sizes[0] = rows_.select(1, 0).sum().item<int64_t>();
    all_indices_ = at::empty({sizes[0], input_.sparse_dim()}, at::kLong);
    all_values_ = at::empty(sizes, values_.options());
    operation.input = {span_of(indices_), span_of(values_)};
    operation.output.clear();
    operation.whole_bytes = static_cast<uint64_t>(all_indices_.nbytes() + all_values_.nbytes());
    int64_t first = 0;
    for (Rank rank = 0; rank < self_.size; ++rank) {
      for (const at::Tensor& all : {all_indices_, all_values_}) {
        operation.output.push_back(span_of(all.narrow(0, first, row(rank)[0])));
      }
      first += row(rank)[0];
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
  at::Tensor tensor_, input_, mine_, rows_, indices_, all_indices_, values_, all_values_;
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
  call.continuation = {[sum](Operation& operation) { return sum->next(operation); }, 1};
  call.inputs = call.outputs = tensors;
  return call;
}

}  // namespace ringcomm
