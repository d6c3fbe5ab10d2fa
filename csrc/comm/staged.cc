#include "comm/staged.h"

#include "comm/communicator.h"

namespace ringcomm {
namespace {

// Two words are at the head of a buffer: the stream's and the host's.
constexpr uint64_t kHead = 128;
enum { kArrived, kOver };
std::atomic<uint32_t>& word(std::byte* buffer, int index) {
  return reinterpret_cast<std::atomic<uint32_t>*>(buffer)[index * 16];
}
std::byte* address(std::byte* buffer, int index) {  // the same for the device
  return reinterpret_cast<std::byte*>(&word(buffer, index));
}

auto report(std::byte* buffer) {
  return [buffer](const std::exception_ptr& error) {
    word(buffer, kOver).store(error ? HostStaging::kBad : HostStaging::kGood);
  };
}

}  // namespace

std::byte* HostStaging::buffer(uint64_t bytes, const Point& end) {
  for (Buffer& buffer : buffers_) {
    if (buffer.bytes < bytes || buffer.bytes > 4 * bytes + 4096) continue;
    if (!passed_(buffer.end)) continue;
    buffer.end = end;
    word(buffer.memory, kArrived).store(0);
    word(buffer.memory, kOver).store(0);
    return buffer.memory;
  }
  // Power-of-two sizes, so that buffers are reused: freeing one waits for running streams.
  const uint64_t size = std::bit_ceil(kHead + bytes);
  std::byte* const memory = api_.allocate_pinned(size);
  std::memset(memory, 0, kHead);
  buffers_.push_back({memory, size - kHead, end});
  return memory;
}

uint64_t HostStaging::sequence() const { return group_.sequence(); }

HostStaging::ResultWord HostStaging::run(const Operation& operation, cuda::Stream stream,
                                         const Point& end) {
  const uint64_t in = bytes_of(operation.input), out = bytes_of(operation.output);
  std::byte* const memory = buffer(in + out, end);
  std::byte* at = memory + kHead;
  for (const Span& span : operation.input) {
    api_.copy(stream, at, span.data, span.bytes);
    at += span.bytes;
  }
  Operation there = operation;
  there.input = {{memory + kHead, in}};
  there.output = {{at, out}};
  if (streams_can_signal) {
    api_.write(stream, address(memory, kArrived), 1);
    group_.submit(std::move(there), report(memory), {}, &word(memory, kArrived));
    api_.wait_until(stream, address(memory, kOver), kGood);
  } else {
    api_.synchronize(stream);
    group_.run(there);
  }
  for (const Span& span : operation.output) {
    api_.copy(stream, span.data, at, span.bytes);
    at += span.bytes;
  }
  if (streams_can_signal) return &word(memory, kOver);
  api_.synchronize(stream);
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
      api_.wait_until(stream, address(memory, kOver), kGood);
      results.push_back(&word(memory, kOver));
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
