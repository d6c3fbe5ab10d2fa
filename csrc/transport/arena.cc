#include "transport/arena.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

namespace ringcomm {

bool Arena::fits(uint64_t file_bytes) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= file_bytes + kBytes;
}

void Arena::map(const Fd& file, uint64_t offset) {
  try {
    mapping_ = Mapping::inherited(file, kBytes, offset);
  } catch (const SystemError&) {  // a limit of addresses: tensors are the process's own then
    return;
  }
  ::madvise(mapping_.data(), kBytes, MADV_DONTDUMP);
  file_ = file.get();
  begins_ = offset;
  owner_ = ::getpid();
}

// The first gap that is long enough: so what is freed is used again before new pages are.
uint64_t Arena::gap_for(uint64_t bytes) const {
  uint64_t at = 0;
  for (const auto& [begin, end] : used_) {
    if (begin - at >= bytes) break;
    at = end;
  }
  return at;
}

// Makes pages at once: at a page that cannot be made later, a store would end the process.
bool Arena::back(uint64_t begin, uint64_t end) {
  const uint64_t from = has_holes_ ? begin : std::max(begin, std::min(backed_, end));
  if (from < end && ::fallocate(file_, 0, static_cast<off_t>(begins_ + from),
                                static_cast<off_t>(end - from)) != 0) {
    return false;
  }
  backed_ = std::max(backed_, end);
  return true;
}

std::byte* Arena::allocate(uint64_t bytes, uint64_t most) {
  if (bytes == 0 || bytes > kBytes || file_ < 0) return nullptr;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  const Lock lock(mutex_);
  const uint64_t at = gap_for(bytes);
  if (kBytes - at < bytes || most < in_use_ || most - in_use_ < bytes) return nullptr;
  if (!back(at, at + bytes)) return nullptr;
  used_[at] = at + bytes;
  in_use_ += bytes;
  return mapping_.data() + at;
}

void Arena::free(std::byte* data) {
  if (::getpid() != owner_) return;
  const Lock lock(mutex_);
  const auto entry = used_.find(offset_of(data));
  in_use_ -= entry->second - entry->first;
  used_.erase(entry);
  if (!keeps_) trim();
}

void Arena::keep(bool on) {
  const Lock lock(mutex_);
  keeps_ = on;
  if (!on) trim();
}

void Arena::trim() {
  uint64_t at = 0;
  const auto give_back = [&](uint64_t end) {
    if (at < end) ::madvise(mapping_.data() + at, end - at, MADV_REMOVE);
  };
  for (const auto& [begin, end] : used_) {
    give_back(begin);
    has_holes_ = has_holes_ || at < begin;
    at = end;
  }
  give_back(std::max(at, backed_));
  backed_ = at;
  if (used_.empty()) has_holes_ = false;
}

void Arena::forked() {
  if (file_ < 0) return;
  // The child sees what is there, and its stores are its own. Better none than its parent's.
  if (::mmap(mapping_.data(), kBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file_,
             static_cast<off_t>(begins_)) == MAP_FAILED) {
    ::munmap(mapping_.data(), kBytes);
  }
}

}  // namespace ringcomm
