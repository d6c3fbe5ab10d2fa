// Owners of resources of the kernel: descriptors and memory maps.
#pragma once

#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#include "base/error.h"

namespace ringcomm {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// Has `epoll` tell from now on, by `number`, that `fd` is readable.
inline void add_to_epoll(const Fd& epoll, const Fd& fd, uint64_t number) {
  epoll_event event{EPOLLIN, {.u64 = number}};
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) {
    throw SystemError("epoll_ctl");
  }
}

// A shared mapping of a file, or of a part of it. A forked child does not inherit it: it must not
// touch what its parent's peers rely on.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Fd& fd, size_t bytes, size_t offset = 0)
      : Mapping(bytes, MAP_SHARED, fd.get(), " of shared memory", offset) {
    ::madvise(data_, bytes, MADV_DONTFORK);
  }
  // Makes one that a forked child has as well.
  static Mapping inherited(const Fd& fd, size_t bytes, size_t offset = 0) {
    return {bytes, MAP_SHARED, fd.get(), " of a file", offset};
  }
  // Makes memory of this process only, zero until it is touched.
  explicit Mapping(size_t bytes)
      : Mapping(bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, "") {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  // Lets go of it in a forked child, which has other things at this address.
  void forget() { data_ = nullptr; }

  std::byte* data() const { return data_; }

 private:
  Mapping(size_t bytes, int flags, int fd, const char* what, size_t offset = 0) : bytes_(bytes) {
    void* at =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
    if (at == MAP_FAILED) throw SystemError(str("mmap of ", bytes, " bytes", what));
    data_ = static_cast<std::byte*>(at);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ringcomm
