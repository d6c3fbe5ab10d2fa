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

// All that `span` lies in; none where a part of it lies in nothing.
Pieces pieces_of(Api& api, const Span& span) try {
  Pieces pieces;
  for (const std::byte* at = span.data; pieces.empty() || at < span.data + span.bytes;) {
    const Allocation piece = api.allocation_of(at);
    if (piece.bytes == 0) return {};
    pieces.push_back(piece);
    at = piece.base + piece.bytes;
  }
  return pieces;
} catch (const DeviceError&) {
  return {};
}

// As one; its id is another one once any of them was freed.
Allocation joined(std::span<const Allocation> pieces) {
  Allocation range;
  for (const Allocation& piece : pieces) {
    if (range.bytes == 0) {
      range = piece;
      continue;
    }
    range.bytes += piece.bytes;
    range.id = range.id * 0x9e3779b97f4a7c15 + piece.id;
    range.ipc = false;  // several pieces: virtual addresses
  }
  return range;
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
  Entry* const entry = entry_for(span);
  if (entry == nullptr) return 0;
  entry->kept = entry->kept || kept;
  if (entry->secret.empty()) {
    give(*entry, peer);
    if (!entry->secret.empty()) {
      ends_.warn(str("other processes cannot map the memory of some tensors (", entry->secret,
                     "), so these are copied once more: "
                     "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False may help"));
    }
  }
  if (!has_opened(peer, *entry)) return 0;
  const Opened& opened = ends_.area(peer).opened(ends_.transport.rank(), index_of(*entry));
  return opened.address.load(std::memory_order_relaxed) +
         static_cast<uint64_t>(span.data - entry->range.base);
}

void Exports::offer(const Span& span) {
  if (Entry* const entry = entry_for(span)) give_all(*entry);
}

void Exports::give_all(Entry& entry) {
  for (Rank peer = 0; peer < ends_.transport.size(); ++peer) {
    if (peer != ends_.transport.rank() && entry.secret.empty()) give(entry, peer);
  }
}

// The one that has all of the span, or else a new one; null where there is no room for it.
Exports::Entry* Exports::entry_for(const Span& span) {
  Pieces pieces = pieces_of(ends_.api, span);
  if (pieces.empty()) return nullptr;
  for (Entry& entry : entries_) {
    // What cannot be exported whole may be in part.
    const bool usable = entry.secret.empty() || entry.pieces.size() == pieces.size();
    if (!usable || std::ranges::search(entry.pieces, pieces).empty()) continue;
    entry.used = now_;
    return &entry;
  }
  const Allocation range = joined(pieces);
  Entry* const entry = range.bytes > most_bytes_ ? nullptr : find(range);
  if (entry == nullptr || !make_room(*entry, range.bytes)) return nullptr;
  renew(*entry, std::move(pieces));
  return entry;
}

// Finds the allocation's entry, or else one for it: a freed one, or the one unused for longest.
Exports::Entry* Exports::find(const Allocation& range) {
  Entry* free = nullptr;
  for (Entry& entry : entries_) {
    if (entry.range.base == range.base && entry.range.bytes == range.bytes) return &entry;
    if (!entry.stays(now_) && (free == nullptr || entry.used < free->used)) free = &entry;
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
      if (entry.range.bytes > 0 && !entry.stays(now_) && older) oldest = &entry;
    }
    if (oldest == nullptr || !ends_.idle()) return false;
    bytes -= oldest->range.bytes;
    withdraw(*oldest);
  }
  return true;
}

void Exports::withdraw_if_freed(Entry& entry) {
  if (entry.range.bytes == 0) return;
  if (pieces_of(ends_.api, {entry.range.base, entry.range.bytes}) != entry.pieces) withdraw(entry);
}

void Exports::withdraw(Entry& entry) {
  if (entry.range.bytes > 0) renew(entry, {});
  entry.used = 0;
}

// Those that have had what was there before give it back.
void Exports::renew(Entry& entry, Pieces pieces) {
  Export& exported = ends_.own().exported(index_of(entry));
  const Allocation range = joined(pieces);
  entry = {{}, std::move(pieces), range, entry.generation + 1, now_};
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
  if ((exported.wanted.load(std::memory_order_relaxed) & bit) != 0) return;
  try {
    const bool first = exported.wanted.load(std::memory_order_relaxed) == 0;
    if (entry.range.ipc && first) {
      exported.memory.handle = ends_.api.export_memory(entry.range.base);
    }
    if (!entry.range.ipc && !give_chunks(entry, peer)) {
      entry.secret = "it has many pieces, or is of virtual addresses that cannot be exported";
    }
  } catch (const std::exception& error) {
    entry.secret = error.what();
  }
  if (!entry.secret.empty()) return;
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

// ---- what a program registers

// An entry has so many pieces at most: a long range of virtual addresses is several entries.
Registered Exports::enroll(const std::string& name, const std::vector<Span>& memory) {
  dismiss(name);
  Registered result;
  std::vector<Held>& held = names_[name];
  const auto add = [&](const Span& span) {
    const std::string why = enroll_one(span, held);
    result.bytes += why.empty() ? span.bytes : 0;
    if (result.why.empty()) result.why = why;
  };
  for (const Span& span : memory) {
    result.asked += span.bytes;
    const Pieces pieces = pieces_of(ends_.api, span);
    if (pieces.empty() && result.why.empty())
      result.why = "no memory of the device is there: was it freed?";
    for (size_t at = 0; at < pieces.size(); at += kMostChunks) {
      const size_t count = std::min<size_t>(kMostChunks, pieces.size() - at);
      const Allocation run = joined(std::span(pieces).subspan(at, count));
      std::byte* const begin = std::max(run.base, span.data);
      std::byte* const end = std::min(run.base + run.bytes, span.data + span.bytes);
      add({begin, static_cast<uint64_t>(end - begin)});
    }
  }
  return result;
}

// Empty, or why it cannot be.
std::string Exports::enroll_one(const Span& span, std::vector<Held>& held) {
  const auto registered = [](const Entry& entry) { return entry.registered > 0; };
  const auto before = std::ranges::count_if(entries_, registered);
  Entry* const entry = entry_for(span);
  const bool fits = entry != nullptr && (entry->registered > 0 || before < kMostRegistered);
  if (!fits) {
    return str("a rank registers at most ", kMostRegistered, " pieces of memory, and others map ",
               most_bytes_, " bytes of it");
  }
  give_all(*entry);
  if (!entry->secret.empty()) return entry->secret;
  ++entry->registered;
  held.push_back({index_of(*entry), entry->generation});
  return "";
}

void Exports::dismiss(const std::string& name) {
  const auto found = names_.find(name);
  if (found == names_.end()) return;
  for (const auto& [index, generation] : found->second) {
    Entry& entry = entries_[static_cast<size_t>(index)];
    if (entry.generation == generation) --entry.registered;  // else it was freed
  }
  names_.erase(found);
}

std::vector<Rank> Exports::without(const std::string& name) const {
  std::vector<Rank> ranks;
  const auto found = names_.find(name);
  for (Rank peer = 0; peer < ends_.transport.size() && found != names_.end(); ++peer) {
    const auto misses = [&](const Held& held) {
      return !has_opened(peer, entries_[static_cast<size_t>(held.index)]);
    };
    if (peer != ends_.transport.rank() && std::ranges::any_of(found->second, misses))
      ranks.push_back(peer);
  }
  return ranks;
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
