#include "verify/memory.h"

#include <algorithm>

namespace ringcomm::verify_detail {
namespace {

[[noreturn]] void fail(const std::string& what, uint32_t other = kNoEvent) {
  throw Violation(what, other);
}

// The ranks whose contributions must be in a rank's output, where, and from where in their inputs.
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

  // Where another part begins, in rank order.
  const std::vector<uint64_t>& edges() const { return begins_; }

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

}  // namespace

void Cell::note(const Read& next) {
  const auto known = std::ranges::find(reads, next.rank, &Read::rank);
  known == reads.end() ? reads.push_back(next) : void(*known = next);
}

void Cell::check_reads(const Clock& now) const {
  for (const Read& read : reads) {
    if (read.time <= now[static_cast<size_t>(read.rank)]) continue;
    fail(str("overwrites what rank ", read.rank, " may still be reading"), read.event);
  }
}

size_t Region::cut(uint64_t at) {
  const auto cell = std::ranges::upper_bound(cells_, at, {}, &Cell::begin) - 1;
  const auto index = static_cast<size_t>(cell - cells_.begin());
  if (cell->begin == at) return index;
  if (cell->end <= at) return index + 1;
  Cell rest = *cell;
  rest.value = rest.value.after(at - rest.begin);
  rest.begin = cell->end = at;
  cells_.insert(cell + 1, std::move(rest));
  return index + 1;
}

std::pair<size_t, size_t> Region::cells(uint64_t begin, uint64_t end) {
  const size_t first = cut(begin);
  return {first, begin == end ? first : cut(end)};
}

void Region::replace(size_t first, size_t last, const std::vector<Cell>& by) {
  const size_t common = std::min(last - first, by.size());
  const auto at = [&](size_t index) { return cells_.begin() + static_cast<ptrdiff_t>(index); };
  std::copy_n(by.begin(), common, at(first));
  if (by.size() > common)
    cells_.insert(at(first + common), by.begin() + static_cast<ptrdiff_t>(common), by.end());
  else
    cells_.erase(at(first + common), at(last));
}

Memory::Memory(const std::vector<Program>& sequence) {
  const Shape& first = sequence.front().shapes.front();
  size_ = first.size;
  geometry_ = first.geometry;
  for (const Program& program : sequence) {
    elements_.push_back(program.shapes.front().element);
    readable_.push_back(program.shapes.front().readable);
  }
  users_.reserve(sequence.size() * static_cast<size_t>(size_));
  for (size_t k = 0; k < sequence.size(); ++k) {
    for (Rank r = 0; r < size_; ++r) add_user(sequence[k], k, r);
  }
}

void Memory::add_user(const Program& program, size_t operation, Rank rank) {
  const Shape& shape = program.shapes[static_cast<size_t>(rank)];
  const auto [inputs, outputs] = shape.sides(rank);
  User& user = users_.emplace_back();
  user.input_bytes = inputs;
  user.output = inputs;
  user.output_bytes = outputs;
  if (program.in_place && inputs > 0 && outputs > 0) {
    const bool smaller_input = inputs < outputs, smaller_output = outputs < inputs;
    const uint64_t shard = smaller_input || smaller_output ? shape.shard_offset(rank) : 0;
    user.input = smaller_input ? shard : 0;
    user.output = smaller_output ? shard : 0;
  }
  user.region = Region(std::max(user.input + inputs, user.output + outputs));
  if (inputs == 0) return;
  const auto [begin, end] = user.region.cells(user.input, user.input + inputs);
  Cell& mine = user.region[begin];
  mine.value = {static_cast<uint32_t>(operation + 1), 0, mark(rank), false, mark(rank)};
  mine.writer = static_cast<int16_t>(rank);
}

// The whole of the memory that the operand is in.
Range Memory::bounds(const Ref& ref, size_t operation) {
  const auto shared = [&](uint64_t bytes) -> Range {
    const uint64_t key = (static_cast<uint64_t>(ref.space) << 1 | operation % 2) << 32 |
                         static_cast<uint64_t>(ref.rank) << 16 | static_cast<uint64_t>(ref.from);
    return {&shared_.try_emplace(key, bytes).first->second, 0, bytes};
  };
  switch (ref.space) {
    case Space::kInput: {
      User& mine = user(operation, ref.rank);
      return {&mine.region, mine.input, mine.input_bytes};
    }
    case Space::kOutput: {
      User& mine = user(operation, ref.rank);
      return {&mine.region, mine.output, mine.output_bytes};
    }
    case Space::kWindow:
      return shared(geometry_.window_room());
    case Space::kInbox:
      return shared(geometry_.inbox_bytes);
    case Space::kLine:
      return shared(geometry_.line_bytes);
  }
  fail("unknown space");
}

void Memory::check_rights(const Ref& ref, size_t operation, Rank rank, bool write) const {
  if (ref.rank < 0 || ref.rank >= size_ || ref.from < 0 || ref.from >= size_) fail("no such rank");
  const bool mine = ref.rank == rank;
  switch (ref.space) {
    case Space::kInput:
      if (write) fail("writes its input");
      if (!mine && !readable_[operation]) fail("uses another rank's input");
      return;
    case Space::kOutput:
      if (!mine && (write || !readable_[operation])) fail("uses another rank's output");
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

Range Memory::locate(const Ref& ref, uint64_t bytes, size_t operation, Rank rank, bool write) {
  check_rights(ref, operation, rank, write);
  const uint64_t element = elements_[operation];
  if (ref.offset % element != 0 || bytes % element != 0) fail("cuts an element");
  const Range whole = bounds(ref, operation);
  if (ref.space <= Space::kOutput && user(operation, ref.rank).left) {
    fail(str("uses memory of rank ", ref.rank, ", which may have ended the operation"));
  }
  if (ref.offset + bytes > whole.bytes) fail("an operand leaves its memory");
  return {whole.region, whole.begin + ref.offset, bytes};
}

ValueRuns Memory::read(const Range& range, size_t operation, Rank rank, const Clock& now) {
  ValueRuns runs;
  const auto [first, last] = range.region->cells(range.begin, range.end());
  for (size_t i = first; i < last; ++i) {
    Cell& cell = (*range.region)[i];
    if (cell.value.operation == 0) fail("reads what nobody has written");
    if (cell.value.operation != operation + 1) {
      fail(str("reads what operation ", cell.value.operation - 1, " wrote"), cell.event);
    }
    if (cell.written > now[static_cast<size_t>(cell.writer)]) {
      fail(str("reads what rank ", cell.writer, " may still be writing"), cell.event);
    }
    cell.note({rank, now[static_cast<size_t>(rank)], event});
    const uint64_t bytes = cell.end - cell.begin;
    if (!runs.empty() && runs.back().value.after(runs.back().bytes) == cell.value)
      runs.back().bytes += bytes;
    else
      runs.push_back({bytes, cell.value});
  }
  return runs;
}

void Memory::write(const Range& range, const ValueRuns& runs, Rank rank, const Clock& now) {
  const auto [first, last] = range.region->cells(range.begin, range.end());
  for (size_t i = first; i < last; ++i) {
    const Cell& cell = (*range.region)[i];
    if (cell.lent > 0) fail("overwrites the source of a put that may be under way", cell.event);
    if (cell.writer >= 0 && cell.written > now[static_cast<size_t>(cell.writer)]) {
      fail(str("overwrites what rank ", cell.writer, " may still be writing"), cell.event);
    }
    cell.check_reads(now);
  }
  std::vector<Cell> written;
  uint64_t at = range.begin;
  for (const ValueRun& run : runs) {
    Cell& cell = written.emplace_back(at, at + run.bytes, run.value);
    cell.changed = true;
    cell.writer = static_cast<int16_t>(rank);
    cell.written = now[static_cast<size_t>(rank)];
    cell.event = event;
    at += run.bytes;
  }
  range.region->replace(first, last, written);
}

bool Memory::is_changed(const Range& range) const {
  const auto [first, last] = range.region->cells(range.begin, range.end());
  for (size_t i = first; i < last; ++i) {
    if ((*range.region)[i].changed) return true;
  }
  return false;
}

void Memory::lend(const Range& range) {
  const auto [first, last] = range.region->cells(range.begin, range.end());
  for (size_t i = first; i < last; ++i) ++(*range.region)[i].lent;
}

void Memory::give_back(const Range& range, Rank reader, const Clock& now) {
  const auto [first, last] = range.region->cells(range.begin, range.end());
  for (size_t i = first; i < last; ++i) {
    Cell& source = (*range.region)[i];
    --source.lent;
    source.note({reader, now[static_cast<size_t>(reader)], event});
  }
}

void Memory::leave(size_t operation, Rank rank, const Clock& now) {
  if (!readable_[operation]) return;
  User& mine = user(operation, rank);
  mine.left = true;
  const auto [first, last] = mine.region.cells(0, mine.region.bytes());
  for (size_t i = first; i < last; ++i) {
    for (const Read& read : mine.region[i].reads) {
      if (read.time <= now[static_cast<size_t>(read.rank)]) continue;
      fail(str("may end while rank ", read.rank, " still reads its memory"), read.event);
    }
  }
}

void Memory::check_results(const std::vector<Program>& sequence) {
  for (size_t k = 0; k < sequence.size(); ++k) {
    for (Rank r = 0; r < size_; ++r) {
      check_output(sequence[k], k, r);
      check_input(sequence[k], k, r);
    }
    check_equal(sequence[k], k);
  }
}

void Memory::check_output(const Program& program, size_t operation, Rank rank) {
  User& at = user(operation, rank);
  const bool final = size_ > 1 && reduces(program.shapes.front().collective);
  const Origins origins(program, rank);
  const auto check = [&](uint64_t begin, uint64_t bytes) {
    const Origins::Origin origin = origins.at(begin);
    Value wanted{static_cast<uint32_t>(operation + 1), origin.offset, origin.ranks, final, 0};
    const auto [first, last] = at.region.cells(at.output + begin, at.output + begin + bytes);
    for (size_t i = first; i < last; ++i) {
      const Cell& cell = at.region[i];
      const Value& value = cell.value;
      wanted.order = value.order;
      if (value != wanted) {
        fail(str("operation ", operation, ": rank ", rank, "'s output at byte ",
                 cell.begin - at.output, value.operation == 0 ? " was never written" : " is wrong",
                 ": contributions of ranks ", value.ranks, ", byte ", value.index, ", final ",
                 value.final, ", where it should be ", wanted.ranks, ", ", wanted.index, ", ",
                 final),
             cell.event);
      }
      wanted = wanted.after(cell.end - cell.begin);
    }
  };
  between(0, at.output_bytes, origins.edges(), check);
}

// All have added in the same order, so that they have bitwise equal results.
void Memory::check_equal(const Program& program, size_t operation) {
  if (program.shapes.front().collective != Collective::kAllReduce) return;
  User& first = user(operation, 0);
  for (Rank r = 1; r < size_; ++r) {
    User& other = user(operation, r);
    for (uint64_t done = 0; done < first.output_bytes;) {
      const auto cell_of = [&](User& owner) {
        return owner.region[owner.region.cells(owner.output + done, owner.output + done).first];
      };
      const Cell mine = cell_of(other), theirs = cell_of(first);
      if (mine.value.order != theirs.value.order) {
        fail(str("operation ", operation, ": rank ", r, " adds byte ", done,
                 " in another order than rank 0"),
             mine.event);
      }
      done = std::min(mine.end - other.output, theirs.end - first.output);
    }
  }
}

void Memory::check_input(const Program& program, size_t operation, Rank rank) {
  User& at = user(operation, rank);
  const uint64_t end = at.input + at.input_bytes;
  const auto check = [&](uint64_t begin, uint64_t bytes) {
    if (begin >= at.output && begin < at.output + at.output_bytes) return;
    Value kept{static_cast<uint32_t>(operation + 1), begin - at.input, mark(rank), false,
               mark(rank)};
    const auto [first, last] = at.region.cells(begin, begin + bytes);
    for (size_t i = first; i < last; ++i) {
      const Cell& cell = at.region[i];
      if (cell.value != kept) {
        fail(str("operation ", operation, " (", to_string(program.shapes.front().collective),
                 "): rank ", rank, "'s input changed"),
             cell.event);
      }
      kept = kept.after(cell.end - cell.begin);
    }
  };
  between(at.input, end, {at.output, at.output + at.output_bytes}, check);
}

}  // namespace ringcomm::verify_detail
