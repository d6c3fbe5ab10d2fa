#include "comm/staged.h"

#include "comm/communicator.h"

namespace ringcomm {
namespace {

// At the head of a buffer: the stream's word and the host's, which count pieces, and the result.
constexpr uint64_t kHead = 128;
constexpr uint32_t kAll = INT32_MAX;
enum Index { kArrived, kOver = 16, kResult };
std::atomic<uint32_t>& word(std::byte* buffer, Index index) {
  return reinterpret_cast<std::atomic<uint32_t>*>(buffer)[index];
}
std::byte* address(std::byte* buffer, Index index) {  // the same for the device
  return reinterpret_cast<std::byte*>(&word(buffer, index));
}

// A piece's input and output. The copies take a fraction of a
// millisecond, and so does a network of 100 Gbit/s: long against what one more piece costs.
constexpr uint64_t kPieceBytes = 4 << 20;
constexpr uint64_t kLeastOfShard = 16 << 10;  // a shorter copy takes no less time
constexpr uint64_t kAligned = 128;

auto report(std::byte* buffer) {
  return [buffer](const std::exception_ptr& error) {
    word(buffer, kResult).store(error ? HostStaging::kBad : HostStaging::kGood);
    word(buffer, kOver).store(kAll);
  };
}

struct Cut {  // of each part
  uint64_t from = 0, to = UINT64_MAX;
  uint64_t of(uint64_t part) const { return std::min(part, to) - std::min(part, from); }
};

// The parts of an operation are cut alike: its shards, or the whole message. All ranks cut alike.
// Of all_to_all only pairs of ranks know what there is to cut.
std::vector<Cut> cuts_of(const Operation& operation) {
  const bool shards = sharded(operation.collective);
  const auto parts = shards ? operation.shards : std::vector{operation.bytes};
  const uint64_t longest = *std::ranges::max_element(parts);
  std::vector<Cut> cuts;
  for (uint64_t from = 0; from < longest; from = cuts.back().to) {
    const auto longer = [&](uint64_t part) { return part > from; };
    const auto sharing = static_cast<uint64_t>(std::ranges::count_if(parts, longer)) + shards;
    const uint64_t most = std::max(kLeastOfShard, kPieceBytes / sharing / kAligned * kAligned);
    const uint64_t left = longest - from, unit = (left + most - 1) / most * kAligned;
    cuts.push_back({from, from + std::min(left, (left + unit - 1) / unit * kAligned)});  // evenly
  }
  if (cuts.size() < 2 || !operation.send.empty()) cuts = {{}};
  return cuts;
}

// An operation, and its pieces in pinned memory. Where CPU tensors have one memory for input and
// output, so have pieces.
struct Pieces {
  Pieces(const Operation& operation, bool uncut)
      : whole(operation), cuts(uncut ? std::vector{Cut()} : cuts_of(operation)) {
    whole.whole = make_descriptor(operation, 0);
    whole.whole_bytes = std::max(bytes_of(whole.input), bytes_of(whole.output));
  }
  bool apart() const { return sharded(whole.collective) || !whole.send.empty(); }
  uint64_t slot_bytes() const {
    if (cuts.size() > 1) return std::max(kPieceBytes, kLeastOfShard * (whole.shards.size() + 1));
    return apart() ? bytes_of(whole.input) + bytes_of(whole.output) : whole.whole_bytes;
  }
  // What the piece has of the input or the output.
  std::vector<Span> within(const std::vector<Span>& side, size_t piece) const {
    const Spans memory(side);
    const auto ranks = static_cast<Rank>(whole.shards.size());
    const bool each = cuts.size() > 1 && memory.bytes() == offset_of(whole.shards, ranks);
    std::vector<Span> found;
    uint64_t begin = 0;
    for (const uint64_t part : each ? whole.shards : std::vector{memory.bytes()}) {
      const uint64_t end = begin + std::min(part, cuts[piece].to);
      for (uint64_t at = begin + std::min(part, cuts[piece].from); at < end;) {
        found.push_back(memory.at(at));
        found.back().bytes = std::min(found.back().bytes, end - at);
        at += found.back().bytes;
      }
      begin += part;
    }
    return found;
  }
  Operation operator[](size_t piece) const {
    Operation part = whole;
    part.bytes = cuts[piece].of(part.bytes);
    for (uint64_t& shard : part.shards) shard = cuts[piece].of(shard);
    std::byte* const slot = slots[piece % slots.size()];
    part.input = {{slot, bytes_of(within(whole.input, piece))}};
    part.output = {
        {slot + (apart() ? part.input[0].bytes : 0), bytes_of(within(whole.output, piece))}};
    return part;
  }

  Operation whole;
  std::vector<Cut> cuts;
  std::vector<std::byte*> slots;
};

}  // namespace

std::byte* HostStaging::buffer(uint64_t bytes, const std::optional<Point>& end) {
  for (Buffer& buffer : buffers_) {
    if (buffer.bytes < bytes || buffer.bytes > 4 * bytes + 4096) continue;
    if (!buffer.end || !passed_(*buffer.end)) continue;
    buffer.end = end;
    for (const Index index : {kArrived, kOver, kResult}) word(buffer.memory, index).store(0);
    return buffer.memory;
  }
  // Power-of-two sizes, so that buffers are reused: freeing one waits for running streams.
  const uint64_t size = kHead + std::bit_ceil(bytes);
  std::byte* const memory = api_.allocate_pinned(size);
  std::memset(memory, 0, kHead);
  buffers_.push_back({memory, size - kHead, end});
  return memory;
}

uint64_t HostStaging::sequence() const { return group_.sequence(); }

// What is in the stream by now brings that many pieces to the host.
void HostStaging::tell(cuda::Stream stream, std::byte* buffer, uint32_t pieces) {
  if (streams_can_signal) return api_.write(stream, address(buffer, kArrived), pieces);
  api_.synchronize(stream);
  word(buffer, kArrived).store(pieces);
}

void HostStaging::await(cuda::Stream stream, std::byte* buffer, uint32_t pieces) {
  if (streams_can_signal) return api_.wait_until(stream, address(buffer, kOver), pieces);
  group_.progress().wait_for_streams("an operation on a device",
                                     [&] { return word(buffer, kOver).load() >= pieces; });
}

HostStaging::ResultWord HostStaging::run(const Operation& operation, cuda::Stream stream,
                                         const Point& end, bool uncut) {
  const auto pieces = std::make_shared<Pieces>(operation, uncut);
  const auto count = static_cast<uint32_t>(pieces->cuts.size());
  const auto slots = std::min(count, static_cast<uint32_t>(slots_.size()));
  for (Span& slot : std::span(slots_).first(slots)) {
    const uint64_t bytes = std::bit_ceil(pieces->slot_bytes());
    if (slot.data == nullptr || slot.bytes < bytes) slot = {buffer(bytes, {}) + kHead, bytes};
    pieces->slots.push_back(slot.data);
  }
  std::byte* const memory = buffer(0, end);
  const auto next = [pieces, memory, piece = uint32_t{0}](Operation& part) mutable {
    part = (*pieces)[++piece];
    word(memory, kOver).store(piece);
    return true;
  };
  const TaskPtr task =
      group_.submit((*pieces)[0], report(memory), {next, 0, count - 1}, &word(memory, kArrived));
  const auto copy_in = [&](uint32_t piece) {
    std::byte* at = (*pieces)[piece].input[0].data;
    for (const Span& span : pieces->within(operation.input, piece)) {
      api_.copy(stream, std::exchange(at, at + span.bytes), span.data, span.bytes);
    }
    tell(stream, memory, piece + 1);
  };
  for (uint32_t piece = 0; piece < slots; ++piece) copy_in(piece);
  for (uint32_t piece = 0; piece < count; ++piece) {
    await(stream, memory, piece + 1);
    std::byte* at = (*pieces)[piece].output[0].data;
    for (const Span& span : pieces->within(operation.output, piece)) {
      api_.copy(stream, span.data, std::exchange(at, at + span.bytes), span.bytes);
    }
    if (piece + slots < count) copy_in(piece + slots);
  }
  if (streams_can_signal) return &word(memory, kResult);
  api_.synchronize(stream);
  group_.wait(*task);
  if (task->error) std::rethrow_exception(task->error);
  return nullptr;
}

// ---- messages

std::vector<HostStaging::ResultWord> HostStaging::post(const std::vector<DeviceMessage>& messages,
                                                       const std::vector<Point>& ends,
                                                       cuda::Stream stream) {
  std::vector<MessagePtr> posted;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& [kind, data, timeout] = messages[i];
    std::byte* const memory = buffer(data.bytes, ends[i]);
    const auto message = std::make_shared<Message>(group_.state().timeout_or(timeout));
    static_cast<MessageKind&>(*message) = kind;
    message->data = {memory + kHead, data.bytes};
    message->on_done = report(memory);
    posted.push_back(message);
    if (kind.sending) api_.copy(stream, memory + kHead, data.data, data.bytes);
    if (!streams_can_signal) {
      api_.synchronize(stream);
      group_.post(message);
      continue;
    }
    api_.write(stream, address(memory, kArrived), 1);
    const Lock lock(mutex_);
    gates_.push_back({&word(memory, kArrived), message});
  }
  std::vector<ResultWord> results;
  for (size_t i = 0; i < messages.size(); ++i) {
    std::byte* const memory = posted[i]->data.data - kHead;
    if (streams_can_signal) {
      api_.wait_until(stream, address(memory, kOver), 1);
      results.push_back(&word(memory, kResult));
    } else {
      group_.wait(*posted[i]);
      if (posted[i]->error) std::rethrow_exception(posted[i]->error);
    }
    if (messages[i].kind.sending) continue;
    api_.copy(stream, messages[i].data.data, memory + kHead, messages[i].data.bytes);
    if (!streams_can_signal) api_.synchronize(stream);
  }
  return results;
}

bool HostStaging::open_gates() {
  std::vector<MessagePtr> open;
  {
    const Lock lock(mutex_);
    std::erase_if(gates_, [&](const Gate& gate) {
      if (gate.open->load(std::memory_order_seq_cst) == 0) return false;
      open.push_back(gate.message);
      return true;
    });
  }
  for (const MessagePtr& message : open) group_.messages().post_late(message);
  return !open.empty();
}

}  // namespace ringcomm
