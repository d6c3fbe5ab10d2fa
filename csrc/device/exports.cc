#include "device/exports.h"

namespace ringcomm::cuda {
namespace {

constexpr uint64_t kMostMissed = 1000;  // generations whose descriptors are looked for
constexpr uint64_t kMostChunks = std::size(ExportedMemory{}.chunk_bytes);

// Of a chunk's descriptor. An entry's generations come one after the other.
uint32_t number_of(int index, uint64_t generation, size_t chunk) {
  const uint64_t entry = (generation * kExports + static_cast<uint64_t>(index)) * kMostChunks;
  return static_cast<uint32_t>(entry + chunk) & INT32_MAX;
}

// All that `span` lies in, as one; its id is another one once any of them was freed. Empty where
// nothing is.
Allocation range_of(Api& api, const Span& span) try {
  Allocation range = api.allocation_of(span.data);
  while (range.bytes > 0 && range.base + range.bytes < span.data + span.bytes) {
    const Allocation next = api.allocation_of(range.base + range.bytes);
    if (next.bytes == 0) return {};
    range.bytes += next.bytes;
    range.id = range.id * 0x9e3779b97f4a7c15 + next.id;
    range.ipc = false;  // several pieces: virtual addresses
  }
  return range;
} catch (const DeviceError&) {
  return {};
}

}  // namespace

// ---- the process's mappings

ImportCache& ImportCache::of(Api& api) {
  static auto* const cache = new ImportCache(api);  // groups may outlive statics
  return *cache;
}

std::byte* ImportCache::acquire(const ExportedRange& range, bool chunks,
                                const std::function<std::byte*()>& open) {
  const std::lock_guard lock(mutex_);
  if (const auto found = entries_.find(range); found != entries_.end()) {
    ++found->second.users;
    return found->second.address;
  }
  // Pieces of virtual addresses may overlap, allocations may not.
  const auto was_freed = [&](const auto& entry) {
    const ExportedRange& other = entry.first;
    return !chunks && !entry.second.chunks && other.process == range.process &&
           other.base < range.base + range.bytes && range.base < other.base + other.bytes;
  };
  close_if(was_freed);
  return (entries_[range] = {open(), chunks, 1}).address;
}

void ImportCache::release(const ExportedRange& range) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(range);  // absent: it was freed, and closed for what came there
  if (found != entries_.end()) --found->second.users;
  close_if([](const auto& entry) { return entry.second.users == 0; });
}

void ImportCache::close_if(const auto& which) {
  std::erase_if(entries_, [&](const auto& entry) {
    if (!which(entry)) return false;
    const auto [address, chunks, users] = entry.second;
    try {
      chunks ? api_.unmap_chunks(address, entry.first.bytes) : api_.close_memory(address);
    } catch (const std::exception&) {  // of a process that has gone
      return true;
    }
    return true;
  });
}

// ---- the exporter

uint64_t Exports::address_at(Rank peer, const Span& span, bool kept) {
  const Allocation range = range_of(ends_.api, span);
  withdraw_if_freed(entries_[now_++ % kExports]);
  Entry* const entry = range.bytes == 0 || range.bytes > most_bytes_ ? nullptr : find(range);
  if (entry == nullptr) return 0;
  if (entry->range != range) {
    if (!make_room(*entry, range.bytes)) return 0;
    renew(*entry, range);
  }
  entry->used = now_;
  entry->kept = entry->kept || kept;
  give(*entry, peer);
  const Opened& opened = ends_.area(peer).opened(ends_.transport.rank(), index_of(*entry));
  if (opened.generation.load(std::memory_order_acquire) != entry->generation) return 0;
  return opened.address.load(std::memory_order_relaxed) +
         static_cast<uint64_t>(span.data - range.base);
}

// Finds the allocation's entry, or else one for it: a freed one, or the one unused for longest.
Exports::Entry* Exports::find(const Allocation& range) {
  Entry* free = nullptr;
  for (Entry& entry : entries_) {
    if (entry.range.base == range.base && entry.range.bytes == range.bytes) return &entry;
    if (!entry.kept && (free == nullptr || entry.used < free->used)) free = &entry;
  }
  return free;
}

// What is new may have taken the place of what was freed. Beyond that the longest unused goes.
bool Exports::make_room(const Entry& place, uint64_t bytes) {
  for (Entry& entry : entries_) {
    withdraw_if_freed(entry);
    bytes += entry.range.bytes;
  }
  while (place.range.bytes > 0 || bytes > most_bytes_) {
    Entry* oldest = nullptr;
    for (Entry& entry : entries_) {
      const bool older = oldest == nullptr || entry.used < oldest->used;
      if (entry.range.bytes > 0 && !entry.kept && older) oldest = &entry;
    }
    if (oldest == nullptr || !ends_.idle()) return false;
    bytes -= oldest->range.bytes;
    withdraw(*oldest);
  }
  return true;
}

void Exports::withdraw_if_freed(Entry& entry) {
  if (entry.range.bytes == 0) return;
  if (range_of(ends_.api, {entry.range.base, entry.range.bytes}) != entry.range) withdraw(entry);
}

void Exports::withdraw(Entry& entry) {
  if (entry.range.bytes > 0) renew(entry, {});
  entry.used = 0;
}

// Those that have had what was there before give it back.
void Exports::renew(Entry& entry, const Allocation& range) {
  Export& exported = ends_.own().exported(index_of(entry));
  entry = {range, entry.generation + 1, now_, false};
  exported.generation.exchange(0, std::memory_order_acq_rel);  // before the rest; partner: Imports
  exported.memory.range = {reinterpret_cast<uint64_t>(range.base), range.bytes, range.id};
  exported.memory.kind = range.ipc ? ExportedMemory::kHandle : ExportedMemory::kChunks;
  const uint32_t before = exported.wanted.exchange(0, std::memory_order_relaxed);
  exported.generation.store(entry.generation, std::memory_order_release);  // partner: Imports
  for (Rank peer = 0; peer < ends_.transport.size(); ++peer) {
    if ((before >> peer & 1) != 0) announce(peer);
  }
}

// The first time, a peer gets it.
void Exports::give(Entry& entry, Rank peer) {
  Export& exported = ends_.own().exported(index_of(entry));
  const uint32_t bit = 1u << peer;
  if (entry.secret || (exported.wanted.load(std::memory_order_relaxed) & bit) != 0) return;
  std::string why = "it has many pieces, or is of virtual addresses that cannot be exported";
  try {
    const bool first = exported.wanted.load(std::memory_order_relaxed) == 0;
    if (entry.range.ipc && first) {
      exported.memory.handle = ends_.api.export_memory(entry.range.base);
    }
    entry.secret = !entry.range.ipc && !give_chunks(entry, peer);
  } catch (const std::exception& error) {
    entry.secret = true;
    why = error.what();
  }
  if (entry.secret) {
    return ends_.warn(str("other processes cannot map the memory of some tensors (", why,
                          "), so these are copied once more: "
                          "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False may help"));
  }
  exported.wanted.fetch_or(bit, std::memory_order_release);  // partner: Imports::is_wanted()
  announce(peer);
}

bool Exports::give_chunks(const Entry& entry, Rank peer) {
  ExportedMemory& memory = ends_.own().exported(index_of(entry)).memory;
  const std::vector<Chunk> chunks =
      ends_.api.export_chunks(entry.range.base, entry.range.bytes, kMostChunks);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const uint32_t number = number_of(index_of(entry), entry.generation, i);
    if (!ends_.transport.send(peer, number, chunks[i].descriptor)) return false;
    memory.chunk_bytes[i] = chunks[i].bytes;
  }
  memory.chunks = static_cast<uint32_t>(chunks.size());
  return !chunks.empty();
}

// ---- the importer

void Imports::look() {
  seen_ = news();
  for (int index = 0; index < kExports; ++index) {
    const Export& exported = theirs_.exported(index);
    const Mapped& mapped = mapped_[static_cast<size_t>(index)];
    const uint64_t generation = exported.generation.load(std::memory_order_acquire);
    if (generation != mapped.generation || is_wanted(exported) != mapped.wanted)
      renew(index, generation);
  }
}

// What its owner changes meanwhile is looked at again. What cannot be mapped is not acknowledged.
void Imports::renew(int index, uint64_t generation) {
  Export& exported = theirs_.exported(index);
  const bool wanted = is_wanted(exported);
  const ExportedMemory memory = exported.memory;
  // It changes nothing, and comes after what was read; partner: Exports::renew().
  const uint64_t now = exported.generation.fetch_add(0, std::memory_order_acq_rel);
  if (generation == 0 || now != generation) return;
  Mapped& mapped = mapped_[static_cast<size_t>(index)];
  release(mapped);
  for (uint64_t i = 1; i < kMostMissed && mapped.generation + i < generation; ++i) {
    receive(index, generation - i, {});  // of no use any more
  }
  mapped = {generation, wanted, nullptr, memory.range};
  mapped.range.process = process_;
  if (!wanted) return;
  const std::vector<Chunk> pieces = receive(index, generation, memory);
  try {
    mapped.address = ImportCache::of(ends_.api).acquire(
        mapped.range, memory.kind == ExportedMemory::kChunks, [&] { return open(memory, pieces); });
  } catch (const std::exception& error) {
    return ends_.warn(str("memory of rank ", peer_, " cannot be mapped (", error.what(),
                          "), so its tensors are copied once more"));
  }
  Opened& opened = ends_.own().opened(peer_, index);
  opened.address.store(reinterpret_cast<uint64_t>(mapped.address), std::memory_order_relaxed);
  opened.generation.store(generation, std::memory_order_release);  // partner: address_at()
}

std::byte* Imports::open(const ExportedMemory& memory, const std::vector<Chunk>& chunks) {
  if (memory.kind == ExportedMemory::kHandle) return ends_.api.open_memory(memory.handle);
  if (chunks.size() != memory.chunks) throw DeviceError("its descriptors did not come");
  return ends_.api.map_chunks(chunks);
}

// They were sent before they were named, so none is waited for.
std::vector<Chunk> Imports::receive(int index, uint64_t generation, const ExportedMemory& memory) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < kMostChunks; ++i) {
    Fd descriptor = ends_.transport.take(peer_, number_of(index, generation, i));
    if (!descriptor) break;
    chunks.push_back({std::move(descriptor), memory.chunk_bytes[i]});
  }
  return chunks;
}

}  // namespace ringcomm::cuda
