#include "device/exports.h"

#include <thread>

namespace ringcomm::cuda {
namespace {

constexpr const char* kNotMapped = "other processes cannot map the memory of some tensors (";
constexpr uint64_t kLately = 128;                   // operations
constexpr int kLooks = 16;                          // at entries that begin() passes over
constexpr auto kSending = std::chrono::seconds(1);  // until a peer takes a descriptor
constexpr auto kPause = std::chrono::microseconds(50);

// All that `span` lies in, or the first `most` of them; none where a part of it lies in nothing.
Allocations allocations_of(Api& api, const Span& span, size_t most = SIZE_MAX) try {
  Allocations pieces;
  for (const std::byte* at = span.data; pieces.empty() || at < span.data + span.bytes;) {
    if (pieces.size() == most) break;
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

// Is the span in all of them?
bool covers(const Allocations& pieces, const Span& span) {
  const Allocation& last = pieces.back();
  return span.data < pieces[0].base + pieces[0].bytes && last.base < span.data + span.bytes;
}

}  // namespace

// A socket takes few at a time.
void ExportContext::send(Rank peer, uint32_t number, const Fd& descriptor) const {
  const Deadline deadline(kSending);
  while (!transport.send(peer, number, descriptor)) {
    if (deadline.passed()) throw DeviceError("another process takes no descriptors");
    std::this_thread::sleep_for(kPause);
  }
}

// ---- the exporter

uint64_t Exports::address_at(Rank peer, const Span& span, bool kept) {
  Entry* const entry = entry_for(span);
  if (entry == nullptr) return 0;
  entry->kept = entry->kept || kept;
  if (entry->refusal.empty()) give(*entry, peer);
  if (!entry->refusal.empty()) {
    context_.warn(str(kNotMapped, entry->refusal, "), so these are copied once more: ",
                      "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False may help"));
  }
  if (!has_opened(peer, *entry)) return 0;
  const Opened& opened = context_.area(peer).opened(context_.transport.rank(), index_of(*entry));
  return opened.address.load(std::memory_order_relaxed) +
         static_cast<uint64_t>(span.data - entry->range.base);
}

void Exports::offer(const Span& span) {
  begin();
  if (Entry* const entry = entry_for(span)) give_all(*entry);
}

void Exports::give_all(Entry& entry) {
  for (Rank peer = 0; peer < context_.transport.size(); ++peer) {
    if (peer != context_.transport.rank() && entry.refusal.empty()) give(entry, peer);
  }
}

void Exports::begin() {
  ++now_;
  refused_.clear();
  for (int attempt = 0; attempt < kLooks; ++attempt) {
    Entry& entry = entries_[next_entry_];
    const bool rests = entry.used + kLately < now_;
    if (rests && next_piece_ < entry.pieces.size()) {
      if (!is_there(entry, next_piece_++)) renew(entry, {});
      return;
    }
    next_entry_ = (next_entry_ + 1) % entries_.size();
    next_piece_ = 0;
  }
}

// Returns the entry that has all of the span, or else a new one; null where there is no room.
Exports::Entry* Exports::entry_for(const Span& span) {
  const auto same = [&](const Span& other) {
    return other.data == span.data && other.bytes == span.bytes;
  };
  if (std::ranges::any_of(refused_, same)) return nullptr;
  Entry* entry = known(span);
  if (entry == nullptr) {
    Allocations pieces = allocations_of(context_.api, span, kMostChunks + 1);
    if (pieces.empty()) return refuse(span, "the driver does not know what allocation it is in");
    if (pieces.size() > kMostChunks) return refuse(span, "it has more than 256 pieces");
    const Allocation range = joined(pieces);
    if (range.bytes > most_bytes_) return refuse(span, "it is larger than half of the device");
    entry = make_room(range.bytes);
    if (entry == nullptr) {
      return refuse(span, str("others map at most ", kExports, " allocations, and half of the ",
                              "device, and the rest is in use"));
    }
    renew(*entry, std::move(pieces));
  }
  entry->used = now_;
  return entry;
}

// The reason is one of few, so that each is said once.
Exports::Entry* Exports::refuse(const Span& span, const std::string& why) {
  refused_.push_back(span);
  context_.warn(str(kNotMapped, why, "), so these are copied once more"));
  return nullptr;
}

// Memory that was freed meanwhile is withdrawn.
Exports::Entry* Exports::known(const Span& span) {
  std::vector<Entry*> freed;
  Entry* usable = nullptr;
  for (auto at = by_base_.upper_bound(span.data); at != by_base_.begin() && usable == nullptr;) {
    Entry& entry = entries_[static_cast<size_t>((--at)->second)];
    if (entry.range.base + entry.range.bytes < span.data + span.bytes) continue;
    if (!is_there(entry, span)) {
      freed.push_back(&entry);
    } else if (entry.refusal.empty() || covers(entry.pieces, span)) {
      usable = &entry;  // a part may be exportable where the whole is not
    }
  }
  for (Entry* const entry : freed) renew(*entry, {});
  return usable;
}

bool Exports::is_there(Entry& entry, size_t piece) {
  uint64_t& last = entry.looked_at[piece];
  if (last == now_) return true;
  const Allocation& known = entry.pieces[piece];
  try {
    if (context_.api.id_of(known.base) != known.id) return false;
  } catch (const DeviceError&) {
    return false;
  }
  last = now_;
  return true;
}

// All pieces that the span has a part of.
bool Exports::is_there(Entry& entry, const Span& span) {
  for (size_t i = 0; i < entry.pieces.size(); ++i) {
    const Allocation& piece = entry.pieces[i];
    const bool concerned =
        piece.base < span.data + span.bytes && span.data < piece.base + piece.bytes;
    if (concerned && !is_there(entry, i)) return false;
  }
  return true;
}

// A free entry. Where there is none, or too much is exported, the longest unused goes.
Exports::Entry* Exports::make_room(uint64_t bytes) {
  while (true) {
    Entry *free = nullptr, *oldest = nullptr;
    for (Entry& entry : entries_) {
      const bool empty = entry.range.bytes == 0;
      if (empty && free == nullptr) free = &entry;
      if (empty || entry.stays(now_)) continue;
      if (oldest == nullptr || entry.used < oldest->used) oldest = &entry;
    }
    if (free != nullptr && bytes_ + bytes <= most_bytes_) return free;
    if (oldest == nullptr || !context_.idle()) return nullptr;
    renew(*oldest, {});
  }
}

void Exports::withdraw_if_freed(Entry& entry) {
  if (!is_there(entry, {entry.range.base, entry.range.bytes})) renew(entry, {});
}

// Those that have had what was there before give it back.
void Exports::renew(Entry& entry, Allocations pieces) {
  Export& exported = context_.own().exported(index_of(entry));
  const Allocation range = joined(pieces);
  if (entry.range.bytes > 0) {
    const auto [first, last] = by_base_.equal_range(entry.range.base);
    by_base_.erase(std::find_if(
        first, last, [&](const auto& known) { return known.second == index_of(entry); }));
    bytes_ -= entry.range.bytes;
  }
  if (range.bytes > 0) by_base_.emplace(range.base, index_of(entry));
  bytes_ += range.bytes;
  std::vector<uint64_t> looked_at(pieces.size(), now_);
  entry = {{}, std::move(pieces), std::move(looked_at), range, entry.generation + 1, 0};
  exported.generation.exchange(0, std::memory_order_acq_rel);  // before the rest; partner: Imports
  exported.memory.range = {reinterpret_cast<uint64_t>(range.base), range.bytes, range.id};
  exported.memory.kind = range.ipc ? ExportedMemory::kHandle : ExportedMemory::kChunks;
  const uint32_t before = exported.wanted.exchange(0, std::memory_order_relaxed);
  exported.generation.store(entry.generation, std::memory_order_release);  // partner: Imports
  for (Rank peer = 0; peer < context_.transport.size(); ++peer) {
    if ((before >> peer & 1) != 0) announce(peer);
  }
}

// The first time, a peer gets it.
void Exports::give(Entry& entry, Rank peer) {
  Export& exported = context_.own().exported(index_of(entry));
  const uint32_t bit = 1u << peer;
  if ((exported.wanted.load(std::memory_order_relaxed) & bit) != 0) return;
  try {
    const bool first = exported.wanted.load(std::memory_order_relaxed) == 0;
    if (entry.range.ipc && first) {
      exported.memory.handle = context_.api.export_memory(entry.range.base);
    }
    if (!entry.range.ipc) give_chunks(entry, peer);
  } catch (const std::exception& error) {
    entry.refusal = error.what();
  }
  if (!entry.refusal.empty()) return;
  exported.wanted.fetch_or(bit, std::memory_order_release);  // partner: Imports::is_wanted()
  announce(peer);
}

// Throws where it cannot be.
void Exports::give_chunks(const Entry& entry, Rank peer) {
  if (!context_.api.ids_change())
    throw DeviceError("this driver does not tell when virtual addresses get other memory");
  ExportedMemory& memory = context_.own().exported(index_of(entry)).memory;
  const uint64_t length = entry.pieces[0].bytes;
  if (!std::ranges::all_of(entry.pieces, [&](const auto& piece) { return piece.bytes == length; }))
    throw DeviceError("its pieces differ in length");
  const std::vector<Chunk> chunks =
      context_.api.export_chunks(entry.range.base, entry.range.bytes, kMostChunks);
  if (chunks.empty()) throw DeviceError("it is of virtual addresses that cannot be exported");
  for (size_t i = 0; i < chunks.size(); ++i) {
    context_.send(peer, chunk_number(index_of(entry), entry.generation, i), chunks[i].descriptor);
  }
  memory.chunks = static_cast<uint32_t>(chunks.size());
}

// ---- memory that a program registers

// An entry has so many pieces at most: a long range of virtual addresses is several entries.
Registered Exports::enroll(const std::string& name, const std::vector<Span>& memory) {
  dismiss(name);
  begin();
  for (Entry& entry : entries_) withdraw_if_freed(entry);  // makes room
  Registered result;
  std::vector<Held>& held = names_[name];
  const auto add = [&](const Span& span) {
    const std::string why = enroll_one(span, held);
    result.bytes += why.empty() ? span.bytes : 0;
    if (result.why.empty()) result.why = why;
  };
  for (const Span& span : memory) {
    result.asked += span.bytes;
    const Allocations pieces = allocations_of(context_.api, span);
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
  if (!entry->refusal.empty()) return entry->refusal;
  ++entry->registered;
  held.push_back({index_of(*entry), entry->generation});
  return "";
}

void Exports::dismiss(const std::string& name) {
  const auto named = names_.find(name);
  if (named == names_.end()) return;
  for (const auto& [index, generation] : named->second) {
    Entry& entry = entries_[static_cast<size_t>(index)];
    if (entry.generation == generation) --entry.registered;  // else it was freed
  }
  names_.erase(named);
}

std::vector<Rank> Exports::without(const std::string& name) const {
  std::vector<Rank> ranks;
  const auto named = names_.find(name);
  for (Rank peer = 0; peer < context_.transport.size() && named != names_.end(); ++peer) {
    const auto misses = [&](const Held& held) {
      return !has_opened(peer, entries_[static_cast<size_t>(held.index)]);
    };
    if (peer != context_.transport.rank() && std::ranges::any_of(named->second, misses))
      ranks.push_back(peer);
  }
  return ranks;
}

}  // namespace ringcomm::cuda
