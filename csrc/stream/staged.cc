#include "stream/staged.h"

#include "device/numa.h"

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
uint64_t most_of_each(uint64_t sharing) {
  return std::max(kLeastOfShard, kPieceBytes / sharing / kAligned * kAligned);
}

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
std::vector<Cut> cuts_of(const Operation& operation) {
  const bool shards = sharded(operation.collective);
  const auto parts = shards ? operation.shards : std::vector{operation.bytes};
  const uint64_t longest = *std::ranges::max_element(parts);
  std::vector<Cut> cuts;
  for (uint64_t from = 0; from < longest; from = cuts.back().to) {
    const auto longer = [&](uint64_t part) { return part > from; };
    const auto sharing = static_cast<uint64_t>(std::ranges::count_if(parts, longer)) + shards;
    const uint64_t most = most_of_each(sharing);
    const uint64_t left = longest - from, unit = (left + most - 1) / most * kAligned;
    cuts.push_back({from, from + std::min(left, (left + unit - 1) / unit * kAligned)});  // evenly
  }
  if (cuts.size() < 2) cuts = {{}};
  return cuts;
}

// Only two ranks know what they exchange in all_to_all. So all cut by the same length, which has
// room for as much from and to everybody. A rank may have fewer pieces than others.
std::vector<Cut> cuts_of_exchange(const Operation& operation, size_t self) {
  const size_t ranks = operation.send.size();
  const uint64_t most = most_of_each(std::max<uint64_t>(1, 2 * (ranks - 1)));
  uint64_t longest = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rank == self) continue;
    longest = std::max({longest, operation.send[rank], operation.recv[rank]});
  }
  std::vector<Cut> cuts = {{0, most}};
  while (cuts.back().to < longest) cuts.push_back({cuts.back().to, cuts.back().to + most});
  return cuts;
}

// Goes ahead of what a rank sends another in a piece of all_to_all: how many pieces the sender has.
// All hear of all in the first one, so all know the end. No element is longer.
struct Note {
  uint64_t pieces = 0, unused = 0;
};

constexpr size_t kOwn = SIZE_MAX;  // of all_to_all: stays on the device, and is in no piece

// An operation, and its pieces in pinned memory. Where CPU tensors have one memory for input and
// output, so have pieces.
struct Pieces {
  Pieces(const Operation& operation, bool uncut, Rank rank)
      : whole(operation),
        self(static_cast<size_t>(rank)),
        exchanges(!uncut && !whole.send.empty()),
        cuts(uncut       ? std::vector{Cut()}
             : exchanges ? cuts_of_exchange(whole, self)
                         : cuts_of(whole)),
        notes(whole.send.size(), {cuts.size()}) {
    // A rank with the same call on memory of the host cuts nothing: it must not take part.
    const bool barrier = operation.collective == Collective::kBarrier;
    make_part(whole, operation, barrier ? operation.purpose : Purpose::kStaged);
    whole.whole_bytes = std::max(bytes_of(whole.input), bytes_of(whole.output));
    whole.whole_send = whole.send, whole.whole_recv = whole.recv;
  }
  bool apart() const { return sharded(whole.collective) || !whole.send.empty(); }
  uint64_t slot_bytes() const {
    const uint64_t sharing = std::max(whole.shards.size() + 1, 2 * whole.send.size());
    if (cuts.size() > 1) return std::max(kPieceBytes, kLeastOfShard * sharing);
    return apart() ? bytes_of(within(true, 0)) + bytes_of(within(false, 0)) : whole.whole_bytes;
  }
  Cut cut(size_t piece) const {
    return piece < cuts.size() ? cuts[piece] : Cut{0, piece == kOwn ? UINT64_MAX : 0};
  }
  // How many pieces the rank with the most has, once the first is over.
  uint64_t everywhere() const {
    return notes.empty() ? cuts.size() : std::ranges::max(notes, {}, &Note::pieces).pieces;
  }
  // Returns the piece's parts of the input or the output.
  std::vector<Span> within(bool input, size_t piece) const {
    const Spans memory(input ? whole.input : whole.output);
    const auto ranks = static_cast<Rank>(whole.shards.size());
    const bool by_shard = cuts.size() > 1 && memory.bytes() == offset_of(whole.shards, ranks);
    const auto& splits = input ? whole.send : whole.recv;
    const auto parts = exchanges ? splits : by_shard ? whole.shards : std::vector{memory.bytes()};
    std::vector<Span> spans;
    uint64_t begin = 0;
    for (size_t i = 0; i < parts.size(); begin += parts[i++]) {
      if ((exchanges && i == self) != (piece == kOwn)) continue;
      const uint64_t end = begin + std::min(parts[i], cut(piece).to);
      for (uint64_t at = begin + std::min(parts[i], cut(piece).from); at < end;) {
        spans.push_back(memory.at(at));
        spans.back().bytes = std::min(spans.back().bytes, end - at);
        at += spans.back().bytes;
      }
    }
    return spans;
  }
  // Returns where they are in pinned memory.
  Span pinned(bool input, size_t piece) const {
    const uint64_t before = !input && apart() ? bytes_of(within(true, piece)) : 0;
    return {slots[piece % slots.size()] + before, bytes_of(within(input, piece))};
  }
  Operation operator[](size_t piece) {
    Operation part = whole;
    part.bytes = cut(piece).of(part.bytes);
    for (auto* const parts : {&part.shards, &part.send, &part.recv}) {
      for (uint64_t& bytes : *parts) bytes = cut(piece).of(bytes);
    }
    part.input = {pinned(true, piece)};
    part.output = {pinned(false, piece)};
    if (!exchanges) return part;
    part.send[self] = part.recv[self] = 0;
    add_notes(part.input, part.send, true);
    add_notes(part.output, part.recv, false);
    return part;
  }
  // In all pieces: then none looks as if all ranks sent all others the same, for which they may
  // have an algorithm of the program's.
  void add_notes(std::vector<Span>& side, std::vector<uint64_t>& parts, bool input) {
    std::byte* at = std::exchange(side, {})[0].data;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (rank == self) continue;
      auto* const note = reinterpret_cast<std::byte*>(&notes[input ? self : rank]);
      side.insert(side.end(), {{note, sizeof(Note)}, {at, parts[rank]}});
      at += std::exchange(parts[rank], parts[rank] + sizeof(Note));
    }
  }

  Operation whole;
  const size_t self;
  const bool exchanges;
  const std::vector<Cut> cuts;
  std::vector<Note> notes;  // of each rank, as it arrives
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
  const cuda::OnNode near(api_.facts(api_.current_device()).node);
  std::byte* const memory = api_.allocate_pinned(size);
  std::memset(memory, 0, kHead);
  buffers_.push_back({memory, size - kHead, end});
  return memory;
}

// Tells the host, behind all in the stream so far, that this many pieces have come.
void HostStaging::signal_host(cuda::Stream stream, std::byte* buffer, uint32_t pieces) {
  if (streams_can_signal) return api_.write(stream, address(buffer, kArrived), pieces);
  api_.synchronize(stream);
  word(buffer, kArrived).store(pieces);
}

void HostStaging::await(cuda::Stream stream, std::byte* buffer, uint32_t pieces) {
  if (streams_can_signal) return api_.wait_until(stream, address(buffer, kOver), pieces);
  progress_.wait_for_streams("an operation on a device",
                             [&] { return word(buffer, kOver).load() >= pieces; });
}

void HostStaging::copy(cuda::Stream stream, const Spans& to, const Spans& from) {
  cuda::copy_each(to, 0, from, 0, to.bytes(),
                  [&](std::byte* into, const std::byte* out, uint64_t bytes) {
                    api_.copy(stream, into, out, bytes);
                  });
}

HostStaging::ResultWord HostStaging::run(const Operation& operation, cuda::Stream stream,
                                         const Point& end, bool uncut) {
  const auto pieces = std::make_shared<Pieces>(operation, uncut, state_.rank());
  const auto count = static_cast<uint32_t>(pieces->cuts.size());
  const auto slots = std::min(count, static_cast<uint32_t>(slots_.size()));
  for (Span& slot : std::span(slots_).first(slots)) {
    const uint64_t bytes = std::bit_ceil(pieces->slot_bytes());
    if (slot.data == nullptr || slot.bytes < bytes) slot = {buffer(bytes, {}) + kHead, bytes};
    pieces->slots.push_back(slot.data);
  }
  std::byte* const memory = buffer(0, end);
  const auto next = [pieces, memory, piece = uint32_t{0}](Operation& part) mutable {
    if (++piece == pieces->everywhere()) return false;
    part = (*pieces)[piece];
    word(memory, kOver).store(piece);
    return true;
  };
  const TaskPtr task = progress_.host().submit((*pieces)[0], report(memory), nullptr,
                                               {&word(memory, kArrived), next});
  // The pieces that only other ranks have may begin with the last one here, and end with the whole.
  const auto up_to = [&](uint32_t piece) { return piece + 1 < count ? piece + 1 : kAll; };
  const auto copy_in = [&](uint32_t piece) {
    copy(stream, Spans({pieces->pinned(true, piece)}), Spans(pieces->within(true, piece)));
    signal_host(stream, memory, up_to(piece));
  };
  for (uint32_t piece = 0; piece < slots; ++piece) copy_in(piece);
  copy(stream, Spans(pieces->within(false, kOwn)), Spans(pieces->within(true, kOwn)));
  for (uint32_t piece = 0; piece < count; ++piece) {
    await(stream, memory, up_to(piece));
    copy(stream, Spans(pieces->within(false, piece)), Spans({pieces->pinned(false, piece)}));
    if (piece + slots < count) copy_in(piece + slots);
  }
  if (streams_can_signal) return &word(memory, kResult);
  api_.synchronize(stream);
  progress_.wait(*task);
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
    const auto message = std::make_shared<Message>(state_.timeout_or(timeout));
    static_cast<MessageKind&>(*message) = kind;
    message->data = {memory + kHead, data.bytes};
    message->on_done = report(memory);
    posted.push_back(message);
    if (kind.sending) api_.copy(stream, memory + kHead, data.data, data.bytes);
    if (!streams_can_signal) {
      api_.synchronize(stream);
      progress_.messages().post(message);
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
      progress_.wait(*posted[i]);
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
  for (const MessagePtr& message : open) progress_.messages().post_late(message);
  return !open.empty();
}

}  // namespace ringcomm
