// all_reduce of sparse tensors. It gathers the numbers of elements, then their indices, then their
// values. Every rank adds them up.
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
  Operation first() { return gathering(mine_, rows_, kRow); }

  bool next(Operation& operation) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    switch (++stage_) {
      case 1:
        check_rows();
        operation = gather_indices();
        return true;
      case 2:
        operation = gather_values();
        return true;
      default:
        finish();
        return false;
    }
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

  // Gathers `each` numbers of each rank, or once the rows are there, of each element of its tensor.
  Operation gathering(const at::Tensor& from, const at::Tensor& to, int64_t each) const {
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.dtype = movable_dtype(from.scalar_type());
    operation.input = {{static_cast<std::byte*>(from.data_ptr()), bytes_of(from)}};
    operation.output = {{static_cast<std::byte*>(to.data_ptr()), bytes_of(to)}};
    for (Rank rank = 0; rank < self_.size; ++rank) {
      const int64_t count = stage_ == 0 ? each : elements(rank) * each;
      operation.shards.push_back(static_cast<uint64_t>(count) * from.element_size());
    }
    operation.layout = kSparseLayout;
    return operation;
  }

  Operation gather_indices() {
    indices_ = input_._indices().contiguous();
    const auto total = rows_.select(1, 2).sum().item<int64_t>();  // of elements()
    all_indices_ = at::empty({total * input_.sparse_dim()}, at::kLong);
    auto sizes = input_._values().sizes().vec();
    sizes[0] = total;
    all_values_ = at::empty(sizes, input_._values().options());
    return gathering(indices_, all_indices_, input_.sparse_dim());
  }

  Operation gather_values() {
    values_ = input_._values().contiguous();
    const int64_t total = all_values_.size(0);
    return gathering(values_, all_values_, total == 0 ? 0 : all_values_.numel() / total);
  }

  void finish() {
    std::vector<at::Tensor> indices;
    int64_t offset = 0;
    for (Rank rank = 0; rank < self_.size; ++rank) {
      const int64_t count = elements(rank) * input_.sparse_dim();
      indices.push_back(
          all_indices_.narrow(0, offset, count).view({input_.sparse_dim(), elements(rank)}));
      offset += count;
    }
    const auto sum = at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), all_values_, input_.sizes(),
                                                   input_.options())
                         .coalesce();
    const at::Tensor result = average_ ? sum / self_.size : sum;
    for (at::Tensor& tensor : tensors_) tensor.copy_(result);
  }

  const RankAndSize self_;
  const bool average_;
  Tensors tensors_;
  at::Tensor input_, mine_, rows_, indices_, all_indices_, values_, all_values_;
  int stage_ = 0;
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
  call.continuation = {[sum](Operation& operation) { return sum->next(operation); }, 2};
  call.inputs = call.outputs = tensors;
  return call;
}

}  // namespace ringcomm
