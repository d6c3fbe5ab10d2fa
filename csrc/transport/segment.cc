#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace ringcomm {
namespace {
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The header may be const.
auto& entry_of(auto& header, Board board, uint64_t sequence) {
  return board == Board::kHost ? header.host_board[sequence % kHostEntries]
                               : header.device_board[sequence % kDeviceEntries];
}

void write_entry(BoardEntry& entry, const Descriptor& descriptor, std::memory_order order) {
  entry.sequence.store(0, std::memory_order_relaxed);
  for (int i = 0; i < Descriptor::kWords; ++i) {
    entry.words[i].store(descriptor.words[i], std::memory_order_release);  // after sequence = 0
  }
  entry.sequence.store(descriptor.sequence, order);  // partner: read_entry()
}

// Returns that of no operation while it is being written.
Descriptor read_entry(const BoardEntry& entry) {
  Descriptor seen;
  seen.sequence = entry.sequence.load(std::memory_order_seq_cst);
  for (int i = 0; i < Descriptor::kWords; ++i) {
    seen.words[i] = entry.words[i].load(std::memory_order_acquire);  // before sequence again
  }
  const uint64_t again = entry.sequence.load(std::memory_order_relaxed);
  return again == seen.sequence ? seen : Descriptor();
}

}  // namespace

void write_board(Header& header, Board board, const Descriptor& descriptor) {
  // Devices need seq_cst: if two ranks write and then look, at least one sees the other.
  const auto order =
      board == Board::kDevice ? std::memory_order_seq_cst : std::memory_order_release;
  write_entry(entry_of(header, board, descriptor.sequence), descriptor, order);
}

std::optional<Descriptor> read_board(const Header& header, Board board, uint64_t sequence) {
  const Descriptor seen = read_entry(entry_of(header, board, sequence));
  return seen.sequence == sequence ? std::optional(seen) : std::nullopt;
}

void write_blame(Header& header, const Blame& blame) {
  if (blame.sequence == 0) return;
  const Descriptor words{blame.sequence, {blame.rank, blame.called, blame.finished}};
  write_entry(header.blame, words, std::memory_order_release);
}

Blame read_blame(const Header& header) {
  const Descriptor seen = read_entry(header.blame);
  return {seen.sequence, seen.words[0], seen.words[1], seen.words[2]};
}

void write_failure(Header& own, const std::string& reason) {
  const size_t length = std::min(reason.size(), kFailureBytes - 1);
  std::memcpy(own.failure, reason.data(), length);
  own.failure[length] = '\0';
  own.failed.store(1, std::memory_order_release);  // partner: Transport::failure()
}

void note_failure(Header& header, Rank by) {
  uint32_t nobody = 0;  // partner: Transport::first_failed()
  header.aborted_by.compare_exchange_strong(nobody, static_cast<uint32_t>(by) + 1,
                                            std::memory_order_seq_cst);
}

bool is_forbidden(int code) { return code == ENOSYS || code == EPERM || code == EACCES; }

Fd make_sealed_memfd(const char* name, uint64_t bytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd && is_forbidden(errno)) {
    throw SystemError("memfd_create, which a seccomp profile may forbid: allow it there");
  }
  if (!fd) throw SystemError("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError(str("reserving ", bytes, " bytes of shared memory"));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw SystemError("sealing shared memory");
  return fd;
}

uint64_t bytes_of_memfd(const Fd& fd) {
  struct stat status{};
  const bool known = ::fstat(fd.get(), &status) == 0 && status.st_size >= 0;
  return known ? static_cast<uint64_t>(status.st_size) : 0;
}

void check_sealed_memfd(const Fd& fd, uint64_t bytes, Rank owner) {
  const uint64_t has = bytes_of_memfd(fd);
  if (has != bytes || (::fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals) {
    throw PeerError(owner,
                    str("rank ", owner, " passed shared memory of ", has, " bytes where ", bytes,
                        " sealed bytes were expected: do all ranks "
                        "run the same version of ringcomm?"));
  }
}

}  // namespace ringcomm
