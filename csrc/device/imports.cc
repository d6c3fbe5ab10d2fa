#include "device/imports.h"

namespace ringcomm::cuda {

constexpr uint64_t kMostMissed = 1000;  // generations whose descriptors are looked for

// ---- the process's mappings

ImportCache& ImportCache::of(Api& api) {
  static auto* const cache = new ImportCache(api);  // groups may outlive statics
  return *cache;
}

std::byte* ImportCache::acquire(const ExportedRange& range, bool chunks,
                                const std::function<std::byte*()>& open) {
  const std::lock_guard lock(mutex_);
  if (const auto entry = entries_.find(range); entry != entries_.end()) {
    ++entry->second.users;
    return entry->second.address;
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
  const auto entry = entries_.find(range);  // absent: it was freed, and closed for what came there
  if (entry != entries_.end()) --entry->second.users;
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

// ---- the importer

void Imports::refresh() {
  seen_ = news();
  for (int index = 0; index < kExports; ++index) {
    const Export& exported = theirs_.exported(index);
    const Mapped& mapped = mapped_[static_cast<size_t>(index)];
    const uint64_t generation = exported.generation.load(std::memory_order_acquire);
    if (generation != mapped.generation || is_wanted(exported) != mapped.wanted)
      renew(index, generation);
  }
}

// An entry that its owner changes meanwhile is looked at again. Memory that cannot be mapped is not
// acknowledged.
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
  try {
    const std::vector<Chunk> pieces = receive(index, generation, memory);
    mapped.address = ImportCache::of(context_.api)
                         .acquire(mapped.range, memory.kind == ExportedMemory::kChunks,
                                  [&] { return open(memory, pieces); });
  } catch (const std::exception& error) {
    return context_.warn(str("memory of rank ", peer_, " cannot be mapped (", error.what(),
                             "), so its tensors are copied once more"));
  }
  Opened& opened = context_.own().opened(peer_, index);
  opened.address.store(reinterpret_cast<uint64_t>(mapped.address), std::memory_order_relaxed);
  opened.generation.store(generation, std::memory_order_release);  // partner: address_at()
}

std::byte* Imports::open(const ExportedMemory& memory, const std::vector<Chunk>& chunks) {
  if (memory.kind == ExportedMemory::kHandle) return context_.api.open_memory(memory.handle);
  if (chunks.size() != memory.chunks) throw DeviceError("its descriptors did not come");
  return context_.api.map_chunks(chunks);
}

// Descriptors are sent before their entry is published, so all have arrived.
std::vector<Chunk> Imports::receive(int index, uint64_t generation, const ExportedMemory& memory) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < kMostChunks; ++i) {
    Fd descriptor = context_.transport.take(peer_, chunk_number(index, generation, i));
    if (!descriptor) break;
    chunks.push_back({std::move(descriptor), memory.range.bytes / std::max(1u, memory.chunks)});
  }
  return chunks;
}

}  // namespace ringcomm::cuda
