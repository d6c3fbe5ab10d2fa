// all_reduce of sparse tensors. It gathers the numbers of elements, then the elements: their
// indices and values. Every rank adds them up.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "torch/call_parts.h"

namespace ringcomm {
namespace {

constexpr int64_t kMostDims = 16;
constexpr int64_t kRow = 3 + kMostDims;  // what a rank says of its tensor; see describe()

class SparseSum {
 public:
  // If this rank has several tensors, their sum is its part, and all get the result.
  SparseSum(const Tensors& tensors, bool average, RankAndSize self)
      : self_(self), average_(average), tensors_(tensors) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    input_ = tensors[0].coalesce();
    for (size_t i = 1; i < tensors.size(); ++i) input_ = (input_ + tensors[i]).coalesce();
    mine_ = at::zeros({kRow}, at::kLong);
    rows_ = at::empty({self.size, kRow}, at::kLong);
    describe(mine_.data_ptr<int64_t>());
  }

  // First the rows. The tensors live as long as this object.
  Operation first() const {
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.input = {span_of(mine_)};
    operation.output = {span_of(rows_)};
    operation.shards.assign(static_cast<size_t>(self_.size), bytes_of(mine_));
    operation.layout = kSparseLayout;
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
  void describe(int64_t* row) const {
    row[0] = input_.sparse_dim();
    row[1] = input_.dense_dim();
    row[2] = input_._nnz();
    std::copy(input_.sizes().begin(), input_.sizes().end(), row + 3);
  }
  const int64_t* row(Rank rank) const { return rows_.const_data_ptr<int64_t>() + rank * kRow; }
  int64_t elements(Rank rank) const { return row(rank)[2]; }

  void check_rows() const {
    for (Rank rank = 0; rank < self_.size; ++rank) {
      const int64_t *theirs = row(rank), *ours = row(self_.rank);
      const bool same = theirs[0] == ours[0] && theirs[1] == ours[1] &&
                        std::equal(theirs + 3, theirs + kRow, ours + 3);
      if (same) continue;
      const at::IntArrayRef sizes(theirs + 3, static_cast<size_t>(theirs[0] + theirs[1]));
      throw MismatchError(ringcomm::str(
          "all_reduce of sparse tensors: rank ", self_.rank, " gave one of ", input_.sizes(),
          " with ", ours[0], " sparse dimensions, rank ", rank, " one of ", sizes, " with ",
          theirs[0], ": every rank must give the same sizes"));
    }
  }

  void gather_elements(Operation& operation) {
    indices_ = input_._indices().t().contiguous();  // those of an element together
    values_ = input_._values().contiguous();
    auto sizes = values_.sizes().vec();
    sizes[0] = rows_.select(1, 2).sum().item<int64_t>();  // of elements()
    all_indices_ = at::empty({sizes[0], input_.sparse_dim()}, at::kLong);
    all_values_ = at::empty(sizes, values_.options());
    operation.input = {span_of(indices_), span_of(values_)};
    operation.output.clear();
    int64_t first = 0;
    for (Rank rank = 0; rank < self_.size; ++rank) {
      for (const at::Tensor& all : {all_indices_, all_values_}) {
        operation.output.push_back(span_of(all.narrow(0, first, elements(rank))));
      }
      first += elements(rank);
      const auto theirs = std::span(operation.output).last(2);
      operation.shards[static_cast<size_t>(rank)] = theirs[0].bytes + theirs[1].bytes;
    }
  }

  void finish() {
    const auto sum = at::_sparse_coo_tensor_unsafe(all_indices_.t().contiguous(), all_values_,
                                                   input_.sizes(), input_.options())
                         .coalesce();
    const at::Tensor result = average_ ? sum / self_.size : sum;
    for (at::Tensor& tensor : tensors_) tensor.copy_(result);
  }

  const RankAndSize self_;
  const bool average_;
  Tensors tensors_;
  at::Tensor input_, mine_, rows_, indices_, all_indices_, values_, all_values_;
};

}  // namespace

Call sparse_all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, RankAndSize self) {
  constexpr Refusal refuse{"all_reduce"};
  check_alike(refuse, tensors);
  const at::Tensor& tensor = tensors[0];
  if (!tensor.is_cpu()) {
    refuse(str("the tensor is sparse and on ", tensor.device().str(),
               ": move it to the CPU, or call .to_dense() first"));
  }
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  if (average && tensors.size() > 1) {
    refuse("ReduceOp.AVG takes one sparse tensor of each rank: add them up before");
  }
  if (op.op_ != c10d::ReduceOp::SUM && !average) {
    refuse(
        "unsupported reduction operation (allreduce of sparse tensors only works with "
        "ReduceOp.SUM and AVG)");
  }
  if (tensor.dim() > kMostDims) refuse(str("a sparse tensor of ", tensor.dim(), " dimensions"));
  const auto sum = std::make_shared<SparseSum>(tensors, average, self);
  Call call(c10d::OpType::_ALLREDUCE_SPARSE, "ringcomm:sparse_all_reduce", Collective::kAllGather);
  call.operation = sum->first();
  call.continuation = {[sum](Operation& operation) { return sum->next(operation); }, 1};
  call.inputs = call.outputs = tensors;
  return call;
}

}  // namespace ringcomm
