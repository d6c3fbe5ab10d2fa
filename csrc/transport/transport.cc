#include "transport/transport.h"

#include "base/stream_copy.h"
#include "transport/host.h"

namespace ringcomm {

constexpr int32_t kForDevices = INT32_MIN;  // parcels; those of a meeting have other numbers

Transport::Transport(Rank rank, std::vector<ShmPeer> peers)
    : rank_(rank),
      peers_(std::move(peers)),
      own_(peer(rank).segment),
      sent_(peers_.size() * kLineLanes, 0) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].place < 0) peers_[i].place = static_cast<int>(i);
    if (peers_[i].remote) remotes_.push_back(peers_[i].remote.get());
  }
}

size_t Transport::stream_space(Rank to) {
  RemotePeer* const remote = peer(to).remote.get();
  if (remote != nullptr && remote->shadow().find() == nullptr) return 1;  // or more
  const auto [segment, place] = part(to, rank_);
  const MailboxCursors& cursors = segment.mailbox(place);
  const uint64_t read = cursors.read.load(std::memory_order_seq_cst);  // partner: stream_read
  const uint64_t used = cursors.written.load(std::memory_order_relaxed) - read;  // mine
  const uint64_t most = segment.mailbox_bytes();
  return used <= most ? most - used : 0;  // the peer writes `read`: never trust it
}

size_t Transport::stream_available(Rank from) {
  RemotePeer* const remote = peer(from).remote.get();
  if (remote != nullptr && remote->received().find() == nullptr) return 0;
  const auto [segment, place] = part(rank_, from);
  const MailboxCursors& cursors = segment.mailbox(place);
  const uint64_t written =
      cursors.written.load(std::memory_order_seq_cst);  // partner: stream_write
  const uint64_t waiting = written - cursors.read.load(std::memory_order_relaxed);  // mine
  return waiting <= segment.mailbox_bytes() ? waiting : 0;
}

size_t Transport::stream_write(Rank to, const std::byte* data, size_t bytes) {
  const auto [segment, place] = part(to, rank_);
  MailboxCursors& cursors = segment.mailbox(place);
  const size_t count = std::min(bytes, stream_space(to));
  if (count == 0) return 0;
  const uint64_t at = cursors.written.load(std::memory_order_relaxed);
  const size_t start = at % segment.mailbox_bytes();
  const size_t first = std::min<size_t>(count, segment.mailbox_bytes() - start);
  std::memcpy(segment.mailbox_data(place) + start, data, first);
  std::memcpy(segment.mailbox_data(place), data + first, count - first);
  cursors.written.store(at + count, std::memory_order_seq_cst);  // partner: stream_available
  if (RemotePeer* remote = peer(to).remote.get()) {
    remote->stream_written(at, at + count);
  } else {
    peer(to).doorbell.notify(kMessageNews);
  }
  return count;
}

size_t Transport::stream_read(Rank from, std::byte* data, size_t bytes, bool past_caches) {
  const size_t count = std::min(bytes, stream_available(from));
  if (count == 0) return 0;
  const auto [segment, place] = part(rank_, from);
  MailboxCursors& cursors = segment.mailbox(place);
  const uint64_t at = cursors.read.load(std::memory_order_relaxed);
  const size_t start = at % segment.mailbox_bytes();
  const size_t first = std::min<size_t>(count, segment.mailbox_bytes() - start);
  copy_bytes(data, segment.mailbox_data(place) + start, first, past_caches);
  copy_bytes(data + first, segment.mailbox_data(place), count - first, past_caches);
  cursors.read.store(at + count, std::memory_order_seq_cst);  // partner: stream_space
  if (RemotePeer* remote = peer(from).remote.get()) {
    remote->stream_read(at + count);
  } else {
    peer(from).doorbell.notify(kMessageNews);
  }
  return count;
}

void Transport::announce(Board board, const Descriptor& descriptor) {
  Header& header = own_.header();
  write_board(header, board, descriptor);
  header.of(board).called.store(descriptor.sequence,
                                std::memory_order_release);  // partner: state()
}

PeerState Transport::state(Rank rank, Board board) {
  const Header* header = header_of(rank);
  if (header == nullptr) return {};
  PeerState state;  // in this order: a rank finishes, and then leaves
  state.left = header->left.load(std::memory_order_acquire) != 0;
  state.failed = header->failed.load(std::memory_order_acquire) != 0;
  state.called = header->of(board).called.load(std::memory_order_acquire);
  state.finished = header->of(board).finished.load(std::memory_order_acquire);
  return state;
}

std::string Transport::failure(Rank rank) {
  const Header* header = header_of(rank);
  if (header == nullptr || header->failed.load(std::memory_order_acquire) == 0) return {};
  return std::string(header->failure, ::strnlen(header->failure, kFailureBytes));
}

void Transport::fail(const std::string& reason) {
  Header& header = own_.header();
  if (header.failed.load(std::memory_order_acquire) != 0) return;
  write_failure(header, reason);
  for (Rank rank = 0; rank < size(); ++rank) {
    if (is_remote(rank)) continue;
    note_failure(peer(rank).segment.header(), rank_);
    peer(rank).doorbell.ring(kAllNews);
  }
  tell_remotes();
}

// Those with which this process talks, and those at distances of 1, 2, 4 and so on: they tell
// others, and after log2(n) steps all n ranks know.
void Transport::tell_remotes() {
  std::set<Rank> told;
  for (int step = 1; step < size(); step *= 2) {
    told.insert({(rank_ + step) % size(), (rank_ + size() - step) % size()});
  }
  for (Rank rank = 0; rank < size(); ++rank) {
    RemotePeer* const remote = peer(rank).remote.get();
    if (remote && (told.contains(rank) || remote->wire().reached())) remote->tell_now();
  }
}

void Transport::ask_for_records() {
  own_.header().asked.store(static_cast<uint32_t>(times_asked()) + 1, std::memory_order_release);
  tell_remotes();
}

uint64_t Transport::times_asked() {
  uint32_t times = 0;
  for (Rank rank = 0; rank < size(); ++rank) {
    const Header* header = header_of(rank);
    if (header != nullptr) times = std::max(times, header->asked.load(std::memory_order_acquire));
  }
  if (own_.header().asked.exchange(times, std::memory_order_acq_rel) < times) tell_remotes();
  return times;
}

std::optional<Rank> Transport::first_failed() {
  const uint32_t by = own_.header().aborted_by.load(std::memory_order_seq_cst);
  if (by == 0 || by > static_cast<uint32_t>(size())) return std::nullopt;
  return static_cast<Rank>(by) - 1;
}

bool Transport::connection_lost(Rank rank) {
  const ShmPeer& other = peer(rank);
  if (other.remote) return other.remote->wire().lost();
  if (!other.process) return false;
  return other.process->lost() ||
         other.segment.header().left.load(std::memory_order_acquire) != 0;  // partner: leave()
}

std::string Transport::condition(Rank rank) {
  if (const RemotePeer* remote = peer(rank).remote.get()) {
    return remote->wire().lost() ? "dead or out of reach" : remote->wire().condition();
  }
  if (connection_lost(rank)) return "dead";
  const Neighbour* const process = peer(rank).process.get();
  return process != nullptr && is_stopped(process->process())
             ? "stopped by a signal (kill -CONT lets it go on)"
             : "alive";
}

std::string Transport::loss(Rank rank) {
  const RemotePeer* remote = peer(rank).remote.get();
  return remote ? remote->wire().condition() : "its process died";
}

Traffic Transport::traffic() const {
  Traffic traffic;
  for (const RemotePeer* remote : used_) {
    traffic.sent += remote->sent();
    traffic.resent += remote->wire().resent();
    traffic.broken += remote->wire().broken();
  }
  return traffic;
}

uint64_t Transport::undelivered() {
  uint64_t frames = 0;
  for (RemotePeer* remote : remotes_) {
    // A rank that has left wants nothing more. It may end without acknowledging its frames.
    if (!remote->wire().lost() && !remote->left()) frames += remote->wire().undelivered();
  }
  return frames;
}

void Transport::leave() {
  own_.header().left.store(1, std::memory_order_seq_cst);  // partner: state()
  for (ShmPeer& other : peers_) {
    if (other.remote) {  // others learn of it when they look for us
      if (other.remote->wire().reached()) other.remote->tell_now();
      continue;
    }
    other.doorbell.notify(kAllNews);
  }
}

void Transport::forget() {
  for (ShmPeer& other : peers_) {
    if (other.process) other.process->forget();
    if (other.remote) other.remote->forget();
  }
  remotes_.clear();
}

bool Transport::send(Rank to, uint32_t number, const Fd& descriptor) {
  const auto& [process, group] = std::tie(peer(to).process, peer(to).group);
  const auto what = kForDevices | static_cast<int32_t>(number);
  return process && process->send({group, rank_, to, what}, descriptor);
}

Fd Transport::take(Rank from, uint32_t number) {
  const auto& [process, group] = std::tie(peer(from).process, peer(from).group);
  const auto what = kForDevices | static_cast<int32_t>(number);
  return process ? process->take({group, from, rank_, what}) : Fd();
}

const char* Transport::name() const {
  if (remotes_.empty()) return "shared memory";
  return remotes_.size() + 1 < peers_.size() ? "shared memory and TCP" : "TCP";
}

}  // namespace ringcomm
