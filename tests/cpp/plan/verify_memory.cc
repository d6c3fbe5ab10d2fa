#include "verify_memory.h"

#include <algorithm>
#include <numeric>

namespace ringcomm::verify_detail {
namespace {

[[noreturn]] void fail(const std::string& what) { throw Violation(what); }

// Whose contributions must be where in a rank's output, and from where in their inputs.
class Origins {
 public:
  struct Origin {
    uint64_t ranks;
    uint64_t offset;
  };

  Origins(const Program& program, Rank rank)
      : program_(program), shape_(program.shapes[static_cast<size_t>(rank)]), rank_(rank) {
    for (Rank r = 0; r < shape_.size; ++r) all_ += mark(r);
    const bool split = shape_.collective == Collective::kAllToAll;
    for (const uint64_t part : split ? shape_.recv : shape_.shards) {
      begins_.push_back(end_);
      end_ += part;
    }
  }

  Origin at(uint64_t offset) const {
    switch (shape_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        return {all_, offset};
      case Collective::kReduceScatter:
        return {all_, begins_[static_cast<size_t>(rank_)] + offset};
      case Collective::kBroadcast:
        return {mark(shape_.root), offset};
      case Collective::kScatter:
        return {mark(shape_.root), begins_[static_cast<size_t>(rank_)] + offset};
      case Collective::kAllGather:
      case Collective::kGather:
      case Collective::kAllToAll:
        return from_part(offset);
      case Collective::kBarrier:
        break;
    }
    fail("a barrier has no output");
  }

 private:
  Origin from_part(uint64_t offset) const {
    if (offset >= end_) fail("the output is larger than its shards");
    const auto part = std::ranges::upper_bound(begins_, offset) - begins_.begin() - 1;
    const uint64_t within = offset - begins_[static_cast<size_t>(part)];
    if (shape_.collective != Collective::kAllToAll) return {mark(static_cast<Rank>(part)), within};
    const Shape& theirs = program_.shapes[static_cast<size_t>(part)];
    return {mark(static_cast<Rank>(part)), offset_of(theirs.send, rank_) + within};
  }

  const Program& program_;
  const Shape& shape_;
  const Rank rank_;
  uint64_t all_ = 0, end_ = 0;
  std::vector<uint64_t> begins_;  // of the shards, or of what is received
};

uint64_t sum(const std::vector<uint64_t>& parts) {
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
}

// What the caller hands in and gets out.
uint64_t input_bytes(const Shape& shape, Rank rank) {
  switch (shape.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return shape.bytes;
    case Collective::kBroadcast:
      return rank == shape.root ? shape.bytes : 0;
    case Collective::kReduceScatter:
      return sum(shape.shards);
    case Collective::kScatter:
      return rank == shape.root ? sum(shape.shards) : 0;
    case Collective::kAllGather:
    case Collective::kGather:
      return shape.shards[static_cast<size_t>(rank)];
    case Collective::kAllToAll:
      return sum(shape.send);
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

uint64_t output_bytes(const Shape& shape, Rank rank) {
  switch (shape.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return shape.bytes;
    case Collective::kReduce:
      return rank == shape.root ? shape.bytes : 0;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return shape.shards[static_cast<size_t>(rank)];
    case Collective::kAllGather:
      return sum(shape.shards);
    case Collective::kGather:
      return rank == shape.root ? sum(shape.shards) : 0;
    case Collective::kAllToAll:
      return sum(shape.recv);
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace

Memory::Memory(const std::vector<Program>& sequence) {
  const Shape& first = sequence.front().shapes.front();
  size_ = first.size;
  geometry_ = first.geometry;
  granule_ = first.element;
  for (const Program& program : sequence) {
    elements_.push_back(program.shapes.front().element);
    granule_ = std::min(granule_, elements_.back());
  }
  const size_t ranks = static_cast<size_t>(size_);
  shared_count_ = cells_of(geometry_.window_room()) +
                  ranks * (cells_of(geometry_.inbox_bytes) + cells_of(geometry_.line_bytes));
  count_ = 2 * ranks * shared_count_;
  for (size_t k = 0; k < sequence.size(); ++k) {
    for (Rank r = 0; r < size_; ++r) add_user(sequence[k], k, r);
  }
}

void Memory::add_user(const Program& program, size_t operation, Rank rank) {
  const Shape& shape = program.shapes[static_cast<size_t>(rank)];
  const size_t inputs = cells_of(input_bytes(shape, rank));
  const size_t outputs = cells_of(output_bytes(shape, rank));
  const size_t begin = count_;
  User user{begin, inputs, begin + inputs, outputs};
  if (program.in_place && inputs > 0 && outputs > 0) {
    const bool smaller_input = inputs < outputs, smaller_output = outputs < inputs;
    const size_t shard = smaller_input || smaller_output ? cells_of(shape.shard_offset(rank)) : 0;
    user.input = begin + (smaller_input ? shard : 0);
    user.output = begin + (smaller_output ? shard : 0);
  }
  count_ = std::max(user.input + inputs, user.output + outputs);
  pages_.resize(count_ / kPage + 1);
  for (size_t i = 0; i < inputs; ++i) {
    Cell& mine = cell(user.input + i);
    mine.value = {static_cast<uint32_t>(operation + 1), static_cast<uint32_t>(i), mark(rank), false,
                  mark(rank)};
    mine.writer = static_cast<int16_t>(rank);
  }
  users_.push_back(user);
}

// The whole of the memory that the operand is in.
Range Memory::bounds(const Ref& ref, size_t operation) const {
  const size_t windows = cells_of(geometry_.window_room());
  const size_t inboxes = cells_of(geometry_.inbox_bytes), lines = cells_of(geometry_.line_bytes);
  const size_t owner = static_cast<size_t>(ref.rank), from = static_cast<size_t>(ref.from);
  const size_t half = (2 * owner + operation % 2) * shared_count_;
  switch (ref.space) {
    case Space::kInput:
      return {user(operation, ref.rank).input, user(operation, ref.rank).input_count};
    case Space::kOutput:
      return {user(operation, ref.rank).output, user(operation, ref.rank).output_count};
    case Space::kWindow:
      return {half, windows};
    case Space::kInbox:
      return {half + windows + from * inboxes, inboxes};
    case Space::kLine:
      return {half + windows + static_cast<size_t>(size_) * inboxes + from * lines, lines};
  }
  fail("unknown space");
}

void Memory::check_rights(const Ref& ref, Rank rank, bool write) const {
  if (ref.rank < 0 || ref.rank >= size_ || ref.from < 0 || ref.from >= size_) fail("no such rank");
  const bool mine = ref.rank == rank;
  switch (ref.space) {
    case Space::kInput:
      if (write) fail("writes its input");
      if (!mine) fail("uses another rank's input");
      return;
    case Space::kOutput:
      if (!mine) fail("uses another rank's output");
      return;
    case Space::kWindow:
      if (write && !mine) fail("writes a window that is not its own");
      return;
    case Space::kInbox:
    case Space::kLine:
      if (ref.from == ref.rank) fail("uses an inbox from a rank to itself");
      if (write && ref.from != rank) fail("writes an inbox that another rank writes");
      if (!write && !mine) fail("reads another rank's inbox");
      return;
  }
}

Range Memory::locate(const Ref& ref, uint64_t bytes, size_t operation, Rank rank,
                     bool write) const {
  check_rights(ref, rank, write);
  const uint64_t element = elements_[operation];
  if (ref.offset % element != 0 || bytes % element != 0) fail("cuts an element");
  const Range whole = bounds(ref, operation);
  const size_t begin = ref.offset / granule_, count = bytes / granule_;
  if (begin + count > whole.count) fail("an operand leaves its memory");
  return {whole.begin + begin, count};
}

void Memory::Cell::note(Read next) {
  if (read.rank < 0 || read.rank == next.rank) {
    read = next;
    return;
  }
  const auto known = std::ranges::find(others, next.rank, &Read::rank);
  known == others.end() ? others.push_back(next) : void(*known = next);
}

void Memory::Cell::check_reads(const Clock& now) const {
  const auto check = [&](const Read& one) {
    if (one.rank < 0 || one.time <= now[static_cast<size_t>(one.rank)]) return;
    fail(str("overwrites what rank ", one.rank, " may still be reading"));
  };
  check(read);
  std::ranges::for_each(others, check);
}

const Value& Memory::read(size_t index, size_t operation, Rank rank, const Clock& now) {
  Cell& cell = this->cell(index);
  if (cell.value.operation == 0) fail("reads what nobody has written");
  if (cell.value.operation != operation + 1) {
    fail(str("reads what operation ", cell.value.operation - 1, " wrote"));
  }
  if (cell.written > now[static_cast<size_t>(cell.writer)]) {
    fail(str("reads what rank ", cell.writer, " may still be writing"));
  }
  cell.note({rank, now[static_cast<size_t>(rank)]});
  return cell.value;
}

void Memory::write(size_t index, const Value& value, Rank rank, const Clock& now) {
  Cell& cell = this->cell(index);
  if (cell.lent > 0) fail("overwrites the source of a put that may be under way");
  if (cell.writer >= 0 && cell.written > now[static_cast<size_t>(cell.writer)]) {
    fail(str("overwrites what rank ", cell.writer, " may still be writing"));
  }
  cell.check_reads(now);
  cell.read = {-1, 0};
  cell.others.clear();
  cell.value = value;
  cell.changed = true;
  cell.writer = static_cast<int16_t>(rank);
  cell.written = now[static_cast<size_t>(rank)];
}

void Memory::lend(const Range& range) {
  for (size_t i = 0; i < range.count; ++i) ++cell(range.begin + i).lent;
}

void Memory::give_back(const Range& range, Rank reader, const Clock& now) {
  for (size_t i = 0; i < range.count; ++i) {
    Cell& source = cell(range.begin + i);
    --source.lent;
    source.note({reader, now[static_cast<size_t>(reader)]});
  }
}

void Memory::check_results(const std::vector<Program>& sequence) const {
  for (size_t k = 0; k < sequence.size(); ++k) {
    for (Rank r = 0; r < size_; ++r) {
      check_output(sequence[k], k, r);
      check_input(sequence[k], k, r);
    }
    check_equal(sequence[k], k);
  }
}

void Memory::check_output(const Program& program, size_t operation, Rank rank) const {
  const User& at = user(operation, rank);
  const bool final = size_ > 1 && reduces(program.shapes.front().collective);
  const Origins origins(program, rank);
  for (size_t i = 0; i < at.output_count; ++i) {
    const Value& value = cell(at.output + i).value;
    const Origins::Origin origin = origins.at(i * granule_);
    const Value wanted{static_cast<uint32_t>(operation + 1),
                       static_cast<uint32_t>(origin.offset / granule_), origin.ranks, final,
                       value.order};
    if (value == wanted) continue;
    fail(str("operation ", operation, ": rank ", rank, "'s output at byte ", i * granule_,
             value.operation == 0 ? " was never written" : " is wrong", ": contributions of ranks ",
             value.ranks, ", byte ", value.index * granule_, ", final ", value.final,
             ", where it should be ", wanted.ranks, ", ", wanted.index * granule_, ", ", final));
  }
}

// All have added in the same order, so that they have bitwise equal results.
void Memory::check_equal(const Program& program, size_t operation) const {
  if (program.shapes.front().collective != Collective::kAllReduce) return;
  const User& first = user(operation, 0);
  for (Rank r = 1; r < size_; ++r) {
    for (size_t i = 0; i < first.output_count; ++i) {
      const size_t mine = user(operation, r).output + i;
      if (cell(mine).value.order == cell(first.output + i).value.order) continue;
      fail(str("operation ", operation, ": rank ", r, " adds byte ", i * granule_,
               " in another order than rank 0"));
    }
  }
}

void Memory::check_input(const Program& program, size_t operation, Rank rank) const {
  const User& at = user(operation, rank);
  for (size_t i = 0; i < at.input_count; ++i) {
    const size_t index = at.input + i;
    if (index >= at.output && index < at.output + at.output_count) continue;
    const Value kept{static_cast<uint32_t>(operation + 1), static_cast<uint32_t>(i), mark(rank),
                     false, mark(rank)};
    if (cell(index).value == kept) continue;
    fail(str("operation ", operation, " (", to_string(program.shapes.front().collective),
             "): rank ", rank, "'s input changed"));
  }
}

}  // namespace ringcomm::verify_detail
