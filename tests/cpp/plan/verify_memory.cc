#include "verify_memory.h"

#include <algorithm>
#include <numeric>

namespace ringcomm::verify_detail {
namespace {

constexpr uint64_t one(Rank rank) { return uint64_t{1} << rank; }
uint64_t all(int size) { return size == 64 ? ~uint64_t{0} : one(size) - 1; }

[[noreturn]] void fail(const std::string& what) { throw Violation(what); }

struct Shard {
  Rank rank;
  uint64_t begin;  // of that rank's part in the whole side
};

Shard shard_at(const std::vector<uint64_t>& parts, uint64_t offset) {
  uint64_t begin = 0;
  for (size_t r = 0; r < parts.size(); ++r) {
    if (offset < begin + parts[r]) return {static_cast<Rank>(r), begin};
    begin += parts[r];
  }
  fail("the output is larger than its shards");
}

// What the byte at `offset` of rank's output must hold: whose contributions, and from where in
// their inputs.
struct Origin {
  uint64_t ranks;
  uint64_t offset;
};

Origin origin_of(const Program& program, Rank rank, uint64_t offset) {
  const Shape& shape = program.shapes[static_cast<size_t>(rank)];
  switch (shape.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return {all(shape.size), offset};
    case Collective::kReduceScatter:
      return {all(shape.size), shape.shard_offset(rank) + offset};
    case Collective::kBroadcast:
      return {one(shape.root), offset};
    case Collective::kScatter:
      return {one(shape.root), shape.shard_offset(rank) + offset};
    case Collective::kAllGather:
    case Collective::kGather: {
      const Shard shard = shard_at(shape.shards, offset);
      return {one(shard.rank), offset - shard.begin};
    }
    case Collective::kAllToAll: {
      const Shard shard = shard_at(shape.recv, offset);
      const std::vector<uint64_t>& sent = program.shapes[static_cast<size_t>(shard.rank)].send;
      uint64_t at = offset - shard.begin;
      for (Rank r = 0; r < rank; ++r) at += sent[static_cast<size_t>(r)];
      return {one(shard.rank), at};
    }
    case Collective::kBarrier:
      break;
  }
  fail("a barrier has no output");
}

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
  cells_.resize(2 * ranks * shared_count_);
  for (size_t k = 0; k < sequence.size(); ++k) {
    for (Rank r = 0; r < size_; ++r) add_user(sequence[k], k, r);
  }
  reads_.resize(cells_.size() * ranks);
}

void Memory::add_user(const Program& program, size_t operation, Rank rank) {
  const Shape& shape = program.shapes[static_cast<size_t>(rank)];
  const size_t inputs = cells_of(input_bytes(shape, rank));
  const size_t outputs = cells_of(output_bytes(shape, rank));
  const size_t begin = cells_.size();
  User user{begin, inputs, begin + inputs, outputs};
  if (program.in_place && inputs > 0 && outputs > 0) {
    const bool smaller_input = inputs < outputs, smaller_output = outputs < inputs;
    const size_t shard = smaller_input || smaller_output ? cells_of(shape.shard_offset(rank)) : 0;
    user.input = begin + (smaller_input ? shard : 0);
    user.output = begin + (smaller_output ? shard : 0);
  }
  cells_.resize(std::max(user.input + inputs, user.output + outputs));
  for (size_t i = 0; i < inputs; ++i) {
    Cell& cell = cells_[user.input + i];
    cell.value = {static_cast<uint32_t>(operation + 1), static_cast<uint32_t>(i), one(rank), false,
                  one(rank)};
    cell.writer = static_cast<int16_t>(rank);
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

const Value& Memory::read(size_t index, size_t operation, Rank rank, const Clock& now) {
  const Cell& cell = cells_[index];
  if (cell.value.operation == 0) fail("reads what nobody has written");
  if (cell.value.operation != operation + 1) {
    fail(str("reads what operation ", cell.value.operation - 1, " wrote"));
  }
  if (cell.written > now[static_cast<size_t>(cell.writer)]) {
    fail(str("reads what rank ", cell.writer, " may still be writing"));
  }
  reads_[index * static_cast<size_t>(size_) + static_cast<size_t>(rank)] =
      now[static_cast<size_t>(rank)];
  return cell.value;
}

void Memory::write(size_t index, const Value& value, Rank rank, const Clock& now) {
  Cell& cell = cells_[index];
  if (cell.lent > 0) fail("overwrites the source of a put that may be under way");
  if (cell.writer >= 0 && cell.written > now[static_cast<size_t>(cell.writer)]) {
    fail(str("overwrites what rank ", cell.writer, " may still be writing"));
  }
  const Time* reads = &reads_[index * static_cast<size_t>(size_)];
  for (int r = 0; r < size_; ++r) {
    if (reads[r] > now[static_cast<size_t>(r)]) {
      fail(str("overwrites what rank ", r, " may still be reading"));
    }
  }
  cell.value = value;
  cell.changed = true;
  cell.writer = static_cast<int16_t>(rank);
  cell.written = now[static_cast<size_t>(rank)];
}

void Memory::lend(const Range& range) {
  for (size_t i = 0; i < range.count; ++i) ++cells_[range.begin + i].lent;
}

void Memory::give_back(const Range& range, Rank reader, const Clock& now) {
  for (size_t i = 0; i < range.count; ++i) {
    const size_t cell = range.begin + i;
    --cells_[cell].lent;
    reads_[cell * static_cast<size_t>(size_) + static_cast<size_t>(reader)] =
        now[static_cast<size_t>(reader)];
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
  for (size_t i = 0; i < at.output_count; ++i) {
    const Value& value = cells_[at.output + i].value;
    const Origin origin = origin_of(program, rank, i * granule_);
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
      if (cells_[mine].value.order == cells_[first.output + i].value.order) continue;
      fail(str("operation ", operation, ": rank ", r, " adds byte ", i * granule_,
               " in another order than rank 0"));
    }
  }
}

void Memory::check_input(const Program& program, size_t operation, Rank rank) const {
  const User& at = user(operation, rank);
  for (size_t i = 0; i < at.input_count; ++i) {
    const size_t cell = at.input + i;
    if (cell >= at.output && cell < at.output + at.output_count) continue;
    const Value kept{static_cast<uint32_t>(operation + 1), static_cast<uint32_t>(i), one(rank),
                     false, one(rank)};
    if (cells_[cell].value == kept) continue;
    fail(str("operation ", operation, " (", to_string(program.shapes.front().collective),
             "): rank ", rank, "'s input changed"));
  }
}

}  // namespace ringcomm::verify_detail
