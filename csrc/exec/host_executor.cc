#include "exec/host_executor.h"

#include "base/stream_copy.h"

namespace ringcomm {

constexpr uint64_t kTurnBytes = 1 << 20;     // then other groups get their turn
constexpr uint64_t kBlockBytes = 4 << 10;    // of a sum that goes past the caches
constexpr size_t kMostShared = 128;          // operands of a step that a pool takes
constexpr uint64_t kScaledBytes = 16 << 10;  // of an operand at a time: it stays in the cache

HostExecutor::HostExecutor(Transport& transport, const Help& help, uint64_t lent_bytes)
    : transport_(transport),
      help_(help),
      lent_bytes_(lent_bytes),
      taken_(static_cast<size_t>(transport.size() * kLanes), 0) {
  for (Rank rank = 0; rank < transport.size(); ++rank) {
    for (const int half : {0, 1}) {
      windows_[half].push_back(transport.is_remote(rank) ? nullptr : transport.window(rank, half));
    }
  }
}

void HostExecutor::start(std::shared_ptr<const Plan> plan, uint64_t number,
                         const Reduction& reduction, Manner manner) {
  plan_ = std::move(plan);
  reduction_ = reduction;
  half_ = static_cast<int>(number % 2);
  cursor_ = PlanCursor(*plan_);
  peer_ = -1;
  manner_ = manner;
  if (manner_.timed) watch_.start(Clock::now());
}

HostExecutor::Status HostExecutor::advance() {
  size_t number = 0;  // of the step
  uint64_t moved = 0;
  for (; cursor_; cursor_.next()) {
    const Step& step = *cursor_;
    switch (step.verb) {
      case Verb::kCopy:
        copy(step, cursor_.bytes());
        moved += cursor_.bytes();
        break;
      case Verb::kReduce:
        reduce(step, cursor_.bytes());
        moved += cursor_.bytes();
        break;
      case Verb::kSignal:
        transport_.signal(step.peer, step.lane, half_, stamps_.outgoing(step.peer, step.lane));
        break;
      case Verb::kWait:
        peer_ = step.peer;
        lane_ = step.lane;
        number = static_cast<size_t>(&step - plan_->steps.data());
        if (!ready()) {
          if (manner_.timed) watch_.block(number, Clock::now());
          return Status::kBlocked;
        }
        if (moved >= kTurnBytes) return Status::kBlocked;
        if (manner_.timed) watch_.meet(number, Clock::now());
        if (transport_.stamp(peer_, lane_, half_) != stamps_.incoming(peer_, lane_)) {
          return Status::kMismatch;
        }
        ++taken(peer_, lane_);
        break;
    }
  }
  return Status::kDone;
}

// Where the byte `done` bytes into an operand is, and how many follow without a seam.
Span HostExecutor::locate(const Ref& ref, uint64_t done) const {
  const uint64_t offset = cursor_.offset(ref) + done;
  switch (ref.space) {
    case Space::kInput:
      return locate(ref, input_, theirs_.inputs, offset);
    case Space::kOutput:
      return locate(ref, output_, theirs_.outputs, offset);
    case Space::kWindow:
      return {windows_[half_][static_cast<size_t>(ref.rank)] + offset, UINT64_MAX};
    case Space::kInbox:
      return {transport_.inbox(ref.rank, ref.from, half_) + offset, UINT64_MAX};
    case Space::kLine:
      return {transport_.line(ref.rank, ref.from, half_) + offset, UINT64_MAX};
  }
  return {};
}

// Copies with the pool if that is worth it.
void HostExecutor::copy_local(std::byte* dst, const std::byte* src, uint64_t bytes, bool streams) {
  if (!is_shared(bytes)) return copy_bytes(dst, src, bytes, streams);
  help_.pool->run(help_.threads, bytes, [=](uint64_t begin, uint64_t end) {
    copy_bytes(dst + begin, src + begin, end - begin, streams);
  });
}

void HostExecutor::copy(const Step& step, uint64_t total) {
  const Ref* operand = refs(step);
  const bool streams = manner_.streams && operand[0].space == Space::kOutput;
  for (uint64_t done = 0; done < total;) {
    const Span dst = locate(operand[0], done), src = locate(operand[1], done);
    const uint64_t bytes = std::min({total - done, dst.bytes, src.bytes});
    done += bytes;
    if (scaled(operand[1])) {
      scale(reduction_.dtype, reduction_.factor, dst.data, src.data,
            bytes / size_of(reduction_.dtype));
      if (is_remote(operand[0])) transport_.put(operand[0].rank, dst.data, bytes, nullptr);
      continue;
    }
    if (dst.data == src.data) continue;  // in place
    if (is_remote(operand[0])) {
      // Plans keep the source of a put unchanged until it was read. For payload in lines they may
      // not.
      const bool lent = bytes >= lent_bytes_ && operand[0].space == Space::kInbox &&
                        operand[1].space <= Space::kOutput;
      if (!lent) copy_local(dst.data, src.data, bytes, false);
      transport_.put(operand[0].rank, dst.data, bytes, lent ? src.data : nullptr);
    } else {
      copy_local(dst.data, src.data, bytes, streams);
    }
  }
}

// Puts pieces of the scaled input in the place of the input. Returns the bytes of a piece.
uint64_t HostExecutor::scale_operands(std::span<const Ref> refs, std::byte** at, uint64_t bytes) {
  uint64_t pieces = 0;
  for (const Ref& ref : refs) pieces += scaled(ref) ? 1 : 0;
  if (pieces == 0) return bytes;
  bytes = std::min(bytes, kScaledBytes);
  if (scratch_.size() < pieces * kScaledBytes) scratch_.resize(pieces * kScaledBytes);
  std::byte* to = scratch_.data();
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!scaled(refs[i])) continue;
    scale(reduction_.dtype, reduction_.factor, to, at[i], bytes / size_of(reduction_.dtype));
    at[i] = std::exchange(to, to + kScaledBytes);
  }
  return bytes;
}

// Past the caches, a sum must not be where one of its sources is: that line is in a cache already.
bool HostExecutor::sums_stream(const Step& step) const {
  if (!manner_.streams || step.dst_count > 1 || refs(step)[0].space != Space::kOutput) return false;
  return std::find(operands_.begin() + 1, operands_.end(), operands_[0]) == operands_.end();
}

void HostExecutor::reduce_all(const Step& step, std::span<std::byte* const> all,
                              uint64_t bytes) const {
  const auto sources = all.subspan(step.dst_count);
  ringcomm::reduce(reduction_, step.final, all.first(step.dst_count),
                   {const_cast<const std::byte* const*>(sources.data()), sources.size()},
                   bytes / size_of(reduction_.dtype));
}

// Reduces so many bytes of the operands, with the pool if that is worth it.
void HostExecutor::reduce_local(const Step& step, uint64_t bytes) {
  const bool streams = sums_stream(step);
  if (operands_.size() > kMostShared || (!streams && !is_shared(bytes))) {
    return reduce_all(step, operands_, bytes);
  }
  const auto part = [&](uint64_t begin, uint64_t end) {
    std::array<std::byte*, kMostShared> at;
    alignas(64) std::array<std::byte, kBlockBytes> block;
    const uint64_t most = streams ? kBlockBytes : end - begin;
    for (uint64_t length = 0; begin < end; begin += length) {
      length = std::min(most, end - begin);
      std::ranges::transform(operands_, at.begin(), [=](std::byte* all) { return all + begin; });
      std::byte* const sum = at[0];
      if (streams) at[0] = block.data();
      reduce_all(step, {at.data(), operands_.size()}, length);
      if (streams) stream_copy(sum, block.data(), length);
    }
  };
  is_shared(bytes) ? help_.pool->run(help_.threads, bytes, part) : part(0, bytes);
}

void HostExecutor::reduce(const Step& step, uint64_t total) {
  const size_t operands = static_cast<size_t>(step.dst_count) + step.src_count;
  operands_.resize(operands);
  std::byte** const at = operands_.data();
  for (uint64_t done = 0; done < total;) {
    uint64_t bytes = total - done;
    for (size_t i = 0; i < operands; ++i) {
      const Span span = locate(refs(step)[i], done);
      at[i] = span.data;
      bytes = std::min(bytes, span.bytes);
    }
    if (reduction_.op == ReduceOp::kPremulSum) {
      bytes = scale_operands({refs(step), operands}, at, bytes);
    }
    reduce_local(step, bytes);
    for (size_t i = 0; i < step.dst_count; ++i) {
      if (is_remote(refs(step)[i])) transport_.put(refs(step)[i].rank, at[i], bytes, nullptr);
    }
    done += bytes;
  }
}

}  // namespace ringcomm
