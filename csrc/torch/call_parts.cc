#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "torch/call.h"

namespace ringcomm {
namespace {

// torch's operations are ours, in the same order.
static_assert(int{c10d::ReduceOp::SUM} == int(ReduceOp::kSum) &&
              int{c10d::ReduceOp::AVG} == int(ReduceOp::kAvg) &&
              int{c10d::ReduceOp::PRODUCT} == int(ReduceOp::kProduct) &&
              int{c10d::ReduceOp::MIN} == int(ReduceOp::kMin) &&
              int{c10d::ReduceOp::MAX} == int(ReduceOp::kMax) &&
              int{c10d::ReduceOp::BAND} == int(ReduceOp::kBand) &&
              int{c10d::ReduceOp::BOR} == int(ReduceOp::kBor) &&
              int{c10d::ReduceOp::BXOR} == int(ReduceOp::kBxor) &&
              int{c10d::ReduceOp::PREMUL_SUM} == int(ReduceOp::kPremulSum));

double premul_factor(const Refusal& refuse, const c10d::ReduceOp& op) {
  // The old name, which torch keeps beside the new one of 2.13.
  const auto* supplement = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse("ReduceOp.PREMUL_SUM comes without its factor");
  if (!supplement->tensor_factor.defined()) return supplement->double_factor;
  return supplement->tensor_factor.item().toDouble();
}

using Memory = std::pair<const void*, uint64_t>;  // where it begins, and its bytes
Memory memory_of(const at::Tensor& tensor) { return {tensor.const_data_ptr(), bytes_of(tensor)}; }

struct Range {  // memory of an operation's input or output
  uintptr_t start, end;
  uint64_t offset;  // of its first byte in the whole input or output
  bool input;
};

void add_ranges(std::vector<Range>& ranges, const std::vector<Span>& spans, bool input) {
  uint64_t offset = 0;
  for (const Span& span : spans) {
    const auto start = reinterpret_cast<uintptr_t>(span.data);
    if (span.bytes > 0) ranges.push_back({start, start + span.bytes, offset, input});
    offset += span.bytes;
  }
}

// Is the memory that they share this rank's own part of both?
bool is_own(const Range& a, const Range& b, const Shared& own) {
  const Range &input = a.input ? a : b, &output = a.input ? b : a;
  const uintptr_t start = std::max(a.start, b.start), end = std::min(a.end, b.end);
  const uint64_t in = input.offset + (start - input.start) - own.input;
  const uint64_t out = output.offset + (start - output.start) - own.output;
  return in == out && in <= own.bytes && end - start <= own.bytes - in;
}

// Those that occur more than once, like all in `[tensor] * n`: the last result is to stay in them.
std::set<Memory> repeated(at::TensorList tensors) {
  if (tensors.size() < 2) return {};
  std::vector<Memory> all;
  all.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) all.emplace_back(memory_of(tensor));
  std::ranges::sort(all);
  std::set<Memory> several;
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i] == all[i - 1] && all[i].second > 0) several.insert(all[i]);
  }
  return several;
}

bool is_in(const std::set<Memory>& some, const at::Tensor& tensor) {
  return !some.empty() && some.contains(memory_of(tensor));
}

// `wholes[i]` consists of one chunk a rank. The result has, for each rank, its chunk of each whole.
std::vector<Span> by_rank(const std::vector<Span>& wholes, int size) {
  std::vector<Span> spans;
  spans.reserve(wholes.size() * static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    for (const Span& whole : wholes) {
      const uint64_t bytes = whole.bytes / static_cast<uint64_t>(size);
      spans.push_back({whole.data + bytes * static_cast<uint64_t>(rank), bytes});
    }
  }
  return spans;
}

}  // namespace

// ---- checks

Rank checked_root(const Refusal& refuse, int64_t root, int size, int64_t tensor) {
  c10d::assertRootRank(refuse, root, size);
  c10d::assertRootTensor(refuse, tensor, 1);
  return static_cast<Rank>(root);
}

void check_all_served(const Refusal& refuse, at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) check_served(refuse, tensor);
}

void check_same_type(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() == model.scalar_type()) continue;
    c10d::assertTypeMatch(refuse, model.options(), tensors, i);
  }
}

void check_same_shape(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors) {
  check_same_type(refuse, model, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    c10d::assertSizesMatch(refuse, model.sizes(), tensors, i);
  }
}

void check_wholes(const Refusal& refuse, const Tensors& wholes, const Tensors& parts, int size) {
  c10d::assertNonEmpty(refuse, parts);
  if (wholes.size() != parts.size()) {
    refuse("requires input/output tensor lists to have the same length");
  }
  check_all_served(refuse, wholes);
  check_all_served(refuse, parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (wholes[i].scalar_type() != parts[i].scalar_type()) {
      c10d::assertTypeMatch(refuse, parts[i].options(), wholes, i);
    }
    if (wholes[i].numel() == parts[i].numel() * size) continue;
    refuse(str("invalid tensor size at index ", i, " (expected ", parts[i].numel(),
               " elements times the ", size, " ranks of the group, got ", wholes[i].numel(), ")"));
  }
}

void check_overlaps(const Refusal& refuse, const Operation& operation, const Shared& own) {
  std::vector<Range> ranges;
  add_ranges(ranges, operation.input, true);
  add_ranges(ranges, operation.output, false);
  std::ranges::sort(ranges, {}, &Range::start);
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = i + 1; j < ranges.size() && ranges[j].start < ranges[i].end; ++j) {
      const Range &a = ranges[i], &b = ranges[j];
      if (a.input && b.input) continue;  // reading twice harms nobody
      if (a.input != b.input && is_own(a, b, own)) continue;
      refuse(a.input == b.input ? "output tensors share some of their memory: give each its own"
                                : "an output shares memory with an input: give it its own");
    }
  }
}

// ---- filling in

void set_reduction(Call& call, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  const Refusal& refuse = call.refuse;
  Operation& operation = call.operation;
  if (op.op_ > c10d::ReduceOp::PREMUL_SUM) refuse("Unhandled ReduceOp");
  operation.op = static_cast<ReduceOp>(static_cast<c10d::ReduceOp::RedOpType>(op.op_));
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype) refuse(str("cannot compute with ", c10::toString(tensor.scalar_type()), " tensors"));
  operation.dtype = *dtype;
  if (operation.op == ReduceOp::kPremulSum) operation.factor = premul_factor(refuse, op);
  if (const std::string why = why_not(operation.dtype, operation.op); !why.empty()) refuse(why);
}

void compare(Operation& operation, at::TensorList tensors, bool in_place) {
  const bool several = tensors.size() > 1;
  if (several) operation.purpose = Purpose::kSeveral;
  for (const at::Tensor& tensor : tensors) {
    const uint64_t layout = in_place ? layout_of(tensor) : 0;
    const auto type = static_cast<uint64_t>(tensor.scalar_type());
    if (!several && layout == 0) {
      // No hash, because messages compare the lowest bits alone.
      if (!dtype_of(tensor.scalar_type())) operation.layout = type;
      return;
    }
    const uint64_t count = several ? static_cast<uint64_t>(tensor.numel()) : 0;
    operation.layout = mix(operation.layout, {count, type, layout});
  }
}

void set_moved_type(Call& call, at::TensorList tensors) {
  const auto type = tensors.empty() ? at::kByte : tensors[0].scalar_type();
  const bool uniform = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == type;
  });
  call.operation.dtype = uniform ? movable_dtype(type) : DType::kUint8;
}

at::TensorList flatten(Call& call, const TensorLists& lists) {
  for (const Tensors& list : lists) {
    call.lists.insert(call.lists.end(), list.begin(), list.end());
  }
  return call.lists;
}

void add_in_place(Call& call, const Tensors& tensors) {
  Operation& operation = call.operation;
  const auto apart = repeated(tensors);
  operation.input.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    operation.input.push_back(call.staging.in_place(tensor, is_in(apart, tensor)));
    operation.bytes += operation.input.back().bytes;
  }
  operation.output = operation.input;
  compare(operation, tensors, true);
  call.inputs = call.outputs = tensors;
}

void add_inputs(Call& call, at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    call.operation.input.push_back(call.staging.input(tensor));
  }
}

void add_outputs(Call& call, at::TensorList tensors) {
  const auto apart = repeated(tensors);
  for (const at::Tensor& tensor : tensors) {
    call.operation.output.push_back(call.staging.output(tensor, is_in(apart, tensor)));
  }
}

MessageKind kind_of(const Call& call) {
  const Operation& operation = call.operation;
  return {.sending = call.type == c10d::OpType::SEND,
          .dtype = operation.dtype,
          .count = memory_of(call).bytes / size_of(operation.dtype),
          .peer = *call.peer,
          .tag = call.tag,
          .line = operation.line,
          .layout = static_cast<uint32_t>(operation.layout)};
}

Span memory_of(const Call& call) {
  const bool sends = call.type == c10d::OpType::SEND;
  return sends ? call.operation.input[0] : call.operation.output[0];
}

std::vector<uint64_t> sizes_of(at::TensorList tensors) {
  std::vector<uint64_t> sizes;
  sizes.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) sizes.push_back(bytes_of(tensor));
  return sizes;
}

Call&& fill_shards(Call& call, Whole whole, Shards shards, RankAndSize self) {
  Operation& operation = call.operation;
  add_inputs(call, call.inputs);
  add_outputs(call, call.outputs);
  const bool in = whole == Whole::kInput;
  const at::TensorList own = in ? call.outputs : call.inputs;
  if (!reduces(operation.collective)) set_moved_type(call, own);
  compare(operation, own, false);
  std::vector<Span>& all = in ? operation.input : operation.output;
  if (shards == Shards::kWithin && all.size() > 1) all = by_rank(all, self.size);
  if (shards == Shards::kOneEach) {
    operation.shards = sizes_of(in ? call.inputs : call.outputs);
  } else {
    const uint64_t bytes = bytes_of(in ? operation.output : operation.input);
    operation.shards.assign(static_cast<size_t>(self.size), bytes);
  }
  const uint64_t mine = operation.shards[static_cast<size_t>(self.rank)];
  const uint64_t before = offset_of(operation.shards, self.rank);
  check_overlaps(call.refuse, operation, in ? Shared{before, 0, mine} : Shared{0, before, mine});
  return std::move(call);
}

}  // namespace ringcomm
