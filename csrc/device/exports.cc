#include "device/exports.h"

#include <algorithm>

#include "transport/unix_socket.h"

namespace ringcomm::cuda {
namespace {

constexpr uint64_t kMostChunks = std::size(Export{}.chunk_bytes);
static_assert(kMostChunks <= kMostFds);

// All that `span` lies in, as one; its id is another one once any of them was freed.
Allocation range_of(Api& api, const Span& span) {
  Allocation range = api.allocation_of(span.data);
  while (range.bytes > 0 && range.base + range.bytes < span.data + span.bytes) {
    const Allocation next = api.allocation_of(range.base + range.bytes);
    if (next.bytes == 0) return {};
    range.bytes += next.bytes;
    range.id = range.id * 0x9e3779b97f4a7c15 + next.id;
    range.ipc = false;  // several pieces: virtual addresses
  }
  return range;
}

}  // namespace

// ---- the exporter

uint64_t Exports::at_leader(const Span& span, uint64_t sequence) {
  Allocation range;
  try {
    range = range_of(api_, span);
  } catch (const DeviceError&) {
    return 0;
  }
  if (range.bytes == 0) return 0;
  const int index = find(range);
  Entry& entry = entries_[static_cast<size_t>(index)];
  if (entry.range != range) {
    entry.range = range;
    own_.exported(index).since = sequence;
    publish(index, span);
  }
  entry.used = sequence;
  const Opened& opened = leader_.opened(self_, index);
  if (opened.generation.load(std::memory_order_acquire) != entry.generation) return 0;
  const uint64_t base = opened.address.load(std::memory_order_relaxed);
  return base == 0 ? 0 : base + static_cast<uint64_t>(span.data - range.base);
}

// Finds the allocation's entry, or else one for it: a freed one, or the one unused for longest.
int Exports::find(const Allocation& range) const {
  int free = 0;
  for (int index = 0; index < kExports; ++index) {
    const Entry& entry = entries_[static_cast<size_t>(index)];
    if (entry.range.base == range.base && entry.range.bytes == range.bytes) return index;
    if (entry.used < entries_[static_cast<size_t>(free)].used) free = index;
  }
  return free;
}

void Exports::publish(int index, const Span& span) {
  Entry& entry = entries_[static_cast<size_t>(index)];
  Export& exported = own_.exported(index);
  exported.kind = Export::kNothing;
  entry.generation = exported.generation.load(std::memory_order_relaxed) + 1;
  try {
    if (entry.range.ipc) {
      exported.handle = api_.export_memory(entry.range.base);
      exported.kind = Export::kHandle;
    } else {
      export_as_chunks(index, span);
    }
  } catch (const std::exception&) {
    exported.kind = Export::kNothing;
  }
  exported.generation.store(entry.generation, std::memory_order_release);  // partner: renew()
  own_.exports().fetch_add(1, std::memory_order_release);                  // partner: look()
}

void Exports::export_as_chunks(int index, const Span& span) {
  Export& exported = own_.exported(index);
  const std::vector<Chunk> chunks = api_.export_chunks(span.data, span.bytes, kMostChunks);
  const Fd* const socket = chunks.empty() ? nullptr : socket_();
  if (socket == nullptr) return;
  std::vector<int> descriptors;
  for (size_t i = 0; i < chunks.size(); ++i) {
    descriptors.push_back(chunks[i].descriptor.get());
    exported.chunk_bytes[i] = chunks[i].bytes;
  }
  const uint64_t name[2] = {static_cast<uint64_t>(index),
                            entries_[static_cast<size_t>(index)].generation};
  send_message(*socket, std::as_bytes(std::span(name)), descriptors);
  exported.chunks = static_cast<uint32_t>(chunks.size());
  exported.kind = Export::kChunks;
}

// ---- the leader

void Imports::look(uint64_t done) {
  while (!retired_.empty() && retired_.front().last <= done) {
    close(retired_.front().mapped);
    retired_.pop_front();
  }
  const uint32_t changes = peer_.exports().load(std::memory_order_acquire);
  if (changes == seen_) return;
  seen_ = changes;
  for (int index = 0; index < kExports; ++index) {
    const uint64_t generation = peer_.exported(index).generation.load(std::memory_order_acquire);
    if (generation != mapped_[static_cast<size_t>(index)].generation) renew(index, generation);
  }
}

// If the owner changes the entry while this reads it, the owner does not trust the result. Its own
// generation is another one by then, and the leader looks again.
void Imports::renew(int index, uint64_t generation) {
  Mapped& mapped = mapped_[static_cast<size_t>(index)];
  const Export& exported = peer_.exported(index);
  if (mapped.address != nullptr) retired_.push_back({mapped, exported.since});
  mapped = {generation, nullptr, exported.kind == Export::kChunks};
  try {
    mapped.address = open(index, generation);
  } catch (const std::exception&) {  // its owner sees a 0, and goes on through its window
    mapped.address = nullptr;
  }
  Opened& opened = own_.opened(of_, index);
  opened.address.store(reinterpret_cast<uint64_t>(mapped.address), std::memory_order_relaxed);
  opened.generation.store(generation, std::memory_order_release);  // partner: at_leader()
}

std::byte* Imports::open(int index, uint64_t generation) {
  const Export& exported = peer_.exported(index);
  if (exported.kind == Export::kHandle) return api_.open_memory(exported.handle);
  if (exported.kind != Export::kChunks) return nullptr;
  std::vector<Fd> descriptors = receive(index, generation);
  if (descriptors.empty() || descriptors.size() != exported.chunks) return nullptr;
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < descriptors.size(); ++i) {
    chunks.push_back({std::move(descriptors[i]), exported.chunk_bytes[i]});
  }
  return api_.map_chunks(chunks);
}

// They come in the order in which they were sent, which need not be that of the entries. They were
// sent before they were named, so none is waited for.
std::vector<Fd> Imports::receive(int index, uint64_t generation) {
  const Fd* const socket = socket_();
  if (socket == nullptr) return {};
  const auto wanted = [&](const Sent& sent) {
    return sent.index == static_cast<uint64_t>(index) && sent.generation == generation;
  };
  while (std::ranges::none_of(sent_, wanted)) {
    uint64_t name[2];
    std::vector<Fd> descriptors;
    const auto bytes = std::as_writable_bytes(std::span(name));
    if (try_receive(*socket, bytes, descriptors) != Received::kMessage) return {};
    sent_.push_back({name[0], name[1], std::move(descriptors)});
  }
  const auto found = std::ranges::find_if(sent_, wanted);
  std::vector<Fd> descriptors = std::move(found->descriptors);
  std::erase_if(sent_, [&](const Sent& sent) {  // older ones are wanted no more
    return sent.index == static_cast<uint64_t>(index) && sent.generation <= generation;
  });
  return descriptors;
}

void Imports::close(const Mapped& mapped) {
  try {
    mapped.chunks ? api_.unmap_chunks(mapped.address) : api_.close_memory(mapped.address);
  } catch (const std::exception&) {  // of a process that has gone
    return;
  }
}

void Imports::close_all() {
  for (const Retired& retired : retired_) close(retired.mapped);
  retired_.clear();
  for (Mapped& mapped : mapped_) {
    if (mapped.address != nullptr) close(mapped);
    mapped = {};
  }
}

}  // namespace ringcomm::cuda
