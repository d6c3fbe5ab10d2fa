// The shared memory of one rank in one group, as every rank of its host maps it. Its *writers* are
// the ranks of the host, and each has a place of its own.
//
//   | header | lines[place][lane][half] | mailbox[place] ... | device area | half 0 | half 1 |
//
//   half = | window | inbox[place] ... |
//
// Written by its owner: header (except aborted_by), windows. Written by a peer: its lines,
// its mailbox (except the read cursor), its inboxes. Nothing here is trusted beyond that: whatever
// is used as a length or an index is checked by the reader.
//
// A pair of ranks on two hosts has such memory of its own, with one writer (transport/remote.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/cores.h"
#include "base/fd.h"

namespace ringcomm {

inline constexpr uint64_t kSegmentMagic = 0x72636f6d6d303031;  // "rcomm001"
inline constexpr size_t kFailureBytes = 1024;
inline constexpr size_t kChoices = 96;  // a rank's choices for all (exec/tuner.h)
inline constexpr size_t kLinePayload = 112;
inline constexpr int kLineLanes = 2;

// The operation a rank is in, as its peers see it: written by its owner at the start of each
// operation, read by peers that wait too long or found another stamp than theirs.
struct Descriptor {
  static constexpr int kWords = 6;
  uint64_t sequence = 0;
  uint64_t words[kWords] = {};  // the meaning is report/operation.h's
  bool operator==(const Descriptor&) const = default;
};

// Operations on memory of the host and on that of devices are counted apart: the host runs ahead of
// its devices, so many operations on devices are begun at once.
enum class Board : uint8_t { kHost, kDevice };
inline constexpr int kBoards = 2;
inline constexpr uint64_t kHostEntries = 2, kDeviceEntries = 64;  // operations that stand on each

using Nonce = std::array<uint64_t, 2>;

// One signal counter, its stamp and its payload. The writer stores stamp and payload, then count.
struct alignas(128) Line {
  std::atomic<uint64_t> count;  // partner: arrived() loads it
  std::atomic<uint64_t> stamp;
  std::byte payload[kLinePayload];
};
static_assert(sizeof(Line) == 128);

struct BoardEntry {
  std::atomic<uint64_t> sequence;  // 0 while the words are being written
  std::atomic<uint64_t> words[Descriptor::kWords];
};

// The rank that keeps an operation up, as a waiting rank sees it: the one from which it has to hear
// next, or the one for which that one waits in turn. So a rank learns of one with which it never
// talks.
struct Blame {
  uint64_t sequence = 0;                        // of the operation; 0: nobody is to blame
  uint64_t rank = 0, called = 0, finished = 0;  // how far that one is
  bool operator==(const Blame&) const = default;
};

struct Header {
  uint64_t magic;
  Nonce nonce;  // proves that the mapped memory is the one its owner made
  struct alignas(128) Progress {
    std::atomic<uint64_t> called;    // partner: state()
    std::atomic<uint64_t> finished;  // partner: state()
  } progress[kBoards];
  Progress& of(Board board) { return progress[static_cast<int>(board)]; }
  const Progress& of(Board board) const { return progress[static_cast<int>(board)]; }
  BoardEntry host_board[kHostEntries];  // of operation k: entry k mod 2
  BoardEntry device_board[kDeviceEntries];
  alignas(128) std::atomic<uint32_t> left;
  // How often the others were asked to write their flight records; partner: times_asked().
  std::atomic<uint32_t> asked;
  std::atomic<uint32_t> failed;  // set after `failure` was written; partner: failure()
  char failure[kFailureBytes];
  BoardEntry blame;                               // partner: read_blame()
  std::atomic<uint8_t> choices[kChoices];         // partner: readers of choices()
  alignas(128) std::atomic<uint32_t> aborted_by;  // rank + 1 of the first peer that failed
  alignas(128) Cores cores;                       // of the owner, before others map it
  std::atomic<int> core;  // where the thread that drives was last seen; partner: shares_core()
};

// The SPSC byte ring of send/recv from one peer. Cursors only grow; bytes stand at cursor mod size.
struct MailboxCursors {
  alignas(128) std::atomic<uint64_t> written;  // partner: the reader
  alignas(128) std::atomic<uint64_t> read;     // partner: the writer
};

struct SegmentLayout {
  int writers = 1;
  uint64_t window_bytes = 0;
  uint64_t inbox_bytes = 0;    // of each writer
  uint64_t mailbox_bytes = 0;  // of each writer's ring, a power of two
  uint64_t device_bytes = 0;   // whole pages

  static constexpr uint64_t kPage = 4096;
  static constexpr uint64_t page_up(uint64_t n) { return (n + kPage - 1) / kPage * kPage; }

  uint64_t lines_offset() const { return page_up(sizeof(Header)); }
  uint64_t mailbox_stride() const { return sizeof(MailboxCursors) + mailbox_bytes; }
  uint64_t mailboxes_offset() const {
    const auto lines = static_cast<uint64_t>(writers * kLineLanes * 2);
    return lines_offset() + page_up(lines * sizeof(Line));
  }
  uint64_t device_offset() const {
    return mailboxes_offset() + page_up(static_cast<uint64_t>(writers) * mailbox_stride());
  }
  uint64_t halves_offset() const { return device_offset() + device_bytes; }
  uint64_t half_stride() const {
    return page_up(window_bytes + static_cast<uint64_t>(writers) * inbox_bytes);
  }
  uint64_t bytes() const { return halves_offset() + 2 * half_stride(); }
};

// A rank's segment as mapped here. Copyable view; the mapping lives elsewhere.
class Segment {
 public:
  Segment() = default;
  Segment(std::byte* base, const SegmentLayout& layout) : base_(base), layout_(layout) {}
  explicit operator bool() const { return base_ != nullptr; }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  std::byte* at(uint64_t offset) const { return base_ + offset; }
  uint64_t offset_of(const std::byte* data) const { return static_cast<uint64_t>(data - base_); }
  Line& line(int place, int lane, int half) const {
    const auto index = static_cast<uint64_t>((place * kLineLanes + lane) * 2 + half);
    return reinterpret_cast<Line*>(base_ + layout_.lines_offset())[index];
  }
  std::byte* half(int half) const {
    return base_ + layout_.halves_offset() + static_cast<uint64_t>(half) * layout_.half_stride();
  }
  std::byte* inbox(int place, int half_of_it) const {
    const uint64_t before = static_cast<uint64_t>(place) * layout_.inbox_bytes;
    return half(half_of_it) + layout_.window_bytes + before;
  }
  uint64_t inbox_bytes() const { return layout_.inbox_bytes; }
  MailboxCursors& mailbox(int place) const {
    const uint64_t before = static_cast<uint64_t>(place) * layout_.mailbox_stride();
    return *reinterpret_cast<MailboxCursors*>(at(layout_.mailboxes_offset() + before));
  }
  std::byte* mailbox_data(int place) const {
    return reinterpret_cast<std::byte*>(&mailbox(place)) + sizeof(MailboxCursors);
  }
  uint64_t mailbox_bytes() const { return layout_.mailbox_bytes; }
  std::byte* device_area() const { return base_ + layout_.device_offset(); }

 private:
  std::byte* base_ = nullptr;
  SegmentLayout layout_;
};

// Write and read the board: its owner writes it, and any rank reads it.
void write_board(Header& header, Board board, const Descriptor& descriptor);
std::optional<Descriptor> read_board(const Header& header, Board board, uint64_t sequence);

// Write and read the blame. Only the header's owner writes. Words that change while they are read
// are no blame.
void write_blame(Header& header, const Blame& blame);
Blame read_blame(const Header& header);

// write_failure() writes into a rank's own header that it has failed, and why. note_failure()
// writes into another rank's header that `by` has failed.
void write_failure(Header& own, const std::string& reason);
void note_failure(Header& header, Rank by);

// Makes a memfd of exactly `bytes`, sealed against growing and shrinking, so that no peer can turn
// a load into SIGBUS. Nothing appears in /dev/shm or anywhere else, and nothing is left behind.
Fd make_sealed_memfd(const char* name, uint64_t bytes);
// Tells whether that errno means that the call is not allowed.
bool is_forbidden(int code);
uint64_t bytes_of_memfd(const Fd& fd);  // 0: it is no file
// Throws PeerError unless `fd` is such a memfd of `bytes`.
void check_sealed_memfd(const Fd& fd, uint64_t bytes, Rank owner);

}  // namespace ringcomm
