#include "exec/host_executor.h"

#include <array>
#include <cstring>

#include "exec/stream_copy.h"

namespace ringcomm {
namespace {

// Operands of one reduce step; more ranks than this reduce in groups (planners see to it).
constexpr size_t kMostOperands = 256;

}  // namespace

HostExecutor::HostExecutor(Transport& transport, const Geometry& geometry, uint64_t lent_bytes)
    : transport_(transport),
      geometry_(geometry),
      lent_bytes_(lent_bytes),
      stream_from_(cache_bytes() / 2 / static_cast<uint64_t>(transport.size())),
      taken_(static_cast<size_t>(transport.size() * kLanes), 0) {
  for (Rank rank = 0; rank < transport.size(); ++rank) remote_.push_back(transport.is_remote(rank));
  for (int half = 0; half < 2; ++half) {
    for (Rank rank = 0; rank < transport.size(); ++rank) {
      memory_[half].push_back(transport.memory(rank, half));
    }
  }
}

void HostExecutor::start(std::shared_ptr<const Plan> plan, uint64_t sequence,
                         const Reduction& reduction) {
  plan_ = std::move(plan);
  reduction_ = reduction;
  half_ = static_cast<int>(sequence % 2);
  block_ = 0;
  repetition_ = 0;
  shift_ = 0;
  peer_ = -1;
  // Sums are mostly made in place, where the line is in the cache already.
  streams_ = !reduces(plan_->collective) && output_.bytes() >= stream_from_;
  step_ = plan_->blocks.empty() ? 0 : plan_->blocks[0].first_step;
}

// Moves on to the step to execute; false at the end of the plan.
bool HostExecutor::next_step() {
  while (block_ < plan_->blocks.size()) {
    const Block& block = plan_->blocks[block_];
    const bool inside = step_ < block.first_step + block.step_count;
    if (inside && repetition_ < block.repetitions) return true;
    if (++repetition_ < block.repetitions) {
      shift_ += block.stride;
      step_ = block.first_step;
      continue;
    }
    repetition_ = 0;
    shift_ = 0;
    if (++block_ < plan_->blocks.size()) step_ = plan_->blocks[block_].first_step;
  }
  return false;
}

HostExecutor::Status HostExecutor::advance() {
  for (; next_step(); ++step_) {
    const Step& step = plan_->steps[step_];
    switch (step.verb) {
      case Verb::kCopy:
        copy(step);
        break;
      case Verb::kReduce:
        reduce(step);
        break;
      case Verb::kSignal:
        transport_.signal(step.peer, step.lane, half_, stamps_.outgoing(step.peer, step.lane));
        break;
      case Verb::kWait:
        peer_ = step.peer;
        lane_ = step.lane;
        if (!ready()) return Status::kBlocked;
        if (transport_.stamp(peer_, lane_, half_) != stamps_.incoming(peer_, lane_)) {
          return Status::kMismatch;
        }
        ++taken(peer_, lane_);
        break;
    }
  }
  return Status::kDone;
}

bool HostExecutor::ready() {
  return peer_ < 0 || transport_.arrived(peer_, lane_, half_) > taken(peer_, lane_);
}

// Where the byte `done` bytes into an operand is, and how many follow without a seam.
Span HostExecutor::locate(const Ref& ref, uint64_t done) const {
  const uint64_t offset = ref.offset + done;
  switch (ref.space) {
    case Space::kInput:
      return input_.at(offset + shift_);
    case Space::kOutput:
      return output_.at(offset + shift_);
    case Space::kWindow:
      return {memory_[half_][static_cast<size_t>(ref.rank)] + offset, UINT64_MAX};
    case Space::kInbox:
      return {
          memory_[half_][static_cast<size_t>(ref.rank)] + geometry_.inbox_offset(ref.from) + offset,
          UINT64_MAX};
    case Space::kLine:
      return {transport_.line(ref.rank, ref.from, half_) + offset, UINT64_MAX};
  }
  return {};
}

void HostExecutor::copy(const Step& step) {
  const Ref* operand = refs(step);
  const bool streams = streams_ && operand[0].space == Space::kOutput;
  for (uint64_t done = 0; done < step.bytes;) {
    const Span dst = locate(operand[0], done), src = locate(operand[1], done);
    const uint64_t bytes = std::min({step.bytes - done, dst.bytes, src.bytes});
    done += bytes;
    if (dst.data == src.data) continue;  // in place
    if (is_remote(operand[0])) {
      // Plans keep the source of a put as it is until it was read, but not what rides in a line.
      const bool lent = bytes >= lent_bytes_ && operand[0].space == Space::kInbox &&
                        operand[1].space <= Space::kOutput;
      if (!lent) std::memcpy(dst.data, src.data, bytes);
      transport_.put(operand[0].rank, dst.data, bytes, lent ? src.data : nullptr);
    } else if (streams) {
      stream_copy(dst.data, src.data, bytes);
    } else {
      std::memcpy(dst.data, src.data, bytes);
    }
  }
}

void HostExecutor::reduce(const Step& step) {
  const size_t operands = static_cast<size_t>(step.dst_count) + step.src_count;
  std::array<std::byte*, kMostOperands> at;
  const uint64_t element = size_of(reduction_.dtype);
  for (uint64_t done = 0; done < step.bytes;) {
    uint64_t bytes = step.bytes - done;
    for (size_t i = 0; i < operands; ++i) {
      const Span span = locate(refs(step)[i], done);
      at[i] = span.data;
      bytes = std::min(bytes, span.bytes);
    }
    const std::span<std::byte* const> all(at.data(), operands);
    const auto sources = all.subspan(step.dst_count);
    ringcomm::reduce(reduction_, step.final, all.first(step.dst_count),
                     {const_cast<const std::byte* const*>(sources.data()), sources.size()},
                     bytes / element);
    for (size_t i = 0; i < step.dst_count; ++i) {
      if (is_remote(refs(step)[i])) transport_.put(refs(step)[i].rank, at[i], bytes, nullptr);
    }
    done += bytes;
  }
}

}  // namespace ringcomm
