#include "transport/transport.h"

#include <sched.h>

#include "base/stream_copy.h"
#include "transport/host.h"

namespace ringcomm {

constexpr int32_t kForDevices = INT32_MIN;  // parcels; those of a meeting have other numbers

Transport::Transport(Rank rank, std::vector<ShmPeer> here,
                     std::unique_ptr<RemoteRanks> remote_ranks)
    : rank_(rank),
      here_(std::move(here)),
      peers_(remote_ranks ? remote_ranks->size() : here_.size()),
      remote_ranks_(std::move(remote_ranks)) {
  for (size_t i = 0; i < here_.size(); ++i) {
    if (!remote_ranks_) here_[i].rank = static_cast<Rank>(i);
    if (here_[i].place < 0) here_[i].place = here_[i].rank;
    peers_[static_cast<size_t>(here_[i].rank)] = &here_[i];
  }
  own_ = peer(rank).segment;
}

size_t Transport::stream_space(Rank to) {
  if (is_remote(to) && (remote(to) == nullptr || remote(to)->shadow().find() == nullptr)) {
    return 1;  // or more
  }
  const auto [segment, place] = part(to, rank_);
  const MailboxCursors& cursors = segment.mailbox(place);
  const uint64_t read = cursors.read.load(std::memory_order_seq_cst);  // partner: stream_read
  const uint64_t used = cursors.written.load(std::memory_order_relaxed) - read;  // mine
  const uint64_t most = segment.mailbox_bytes();
  return used <= most ? most - used : 0;  // the peer writes `read`: never trust it
}

size_t Transport::stream_available(Rank from) {
  if (is_remote(from) && (remote(from) == nullptr || remote(from)->received().find() == nullptr)) {
    return 0;
  }
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
  if (is_remote(to)) {
    remote(to)->stream_written(at, at + count);
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
  if (is_remote(from)) {
    remote(from)->stream_read(at + count);
  } else {
    peer(from).doorbell.notify(kMessageNews);
  }
  return count;
}

// Written only when it changes, because others read it while they wait.
static int note_core(Header& own) {
  const int core = ::sched_getcpu();
  if (own.core.load(std::memory_order_relaxed) != core) {
    own.core.store(core, std::memory_order_relaxed);
  }
  return core;
}

void Transport::announce(Board board, const Descriptor& descriptor) {
  Header& header = own_.header();
  if (board == Board::kHost) note_core(header);
  write_board(header, board, descriptor);
  header.of(board).called.store(descriptor.sequence,
                                std::memory_order_release);  // partner: state()
}

bool Transport::shares_core(Rank rank) {
  const int core = note_core(own_.header());
  if (rank < 0 || rank == rank_ || is_remote(rank)) return false;
  return core >= 0 && here(rank)->segment.header().core.load(std::memory_order_relaxed) == core;
}

PeerState Transport::state(Rank rank, Board board) {
  PeerState state;
  // In this order: a rank finishes, and then leaves.
  if (const Header* header = header_of(rank)) {
    state.left = header->left.load(std::memory_order_acquire) != 0;
    state.failed = header->failed.load(std::memory_order_acquire) != 0;
    state.called = header->of(board).called.load(std::memory_order_acquire);
    state.finished = header->of(board).finished.load(std::memory_order_acquire);
  }
  if (!is_remote(rank) || board != Board::kHost) return state;
  const auto heard = [&](uint64_t called, uint64_t finished) {
    state.called = std::max(state.called, called);
    state.finished = std::max(state.finished, finished);
  };
  if (const RankState* told = remote_ranks_->told_of(rank)) {
    RemotePeer* const direct = remote(rank);
    const bool tells = direct != nullptr && direct->wire().reached() && !direct->wire().parked();
    state.hearsay = tells && !state.failed;  // see tell_remotes()
    state.failed = true;
    heard(told->called, told->finished);
  }
  const Blame blame = blame_of(rank_);
  if (blame.sequence != 0 && blame.rank == static_cast<uint64_t>(rank)) {
    heard(blame.called, blame.finished);
  }
  return state;
}

std::string Transport::failure(Rank rank) {
  const char* text = nullptr;
  const Header* header = header_of(rank);
  if (header != nullptr && header->failed.load(std::memory_order_acquire) != 0) {
    text = header->failure;
  } else if (const RankState* told = remote_ranks_ ? remote_ranks_->told_of(rank) : nullptr) {
    text = told->failure;
  }
  return text == nullptr ? std::string() : std::string(text, ::strnlen(text, kFailureBytes));
}

// From here on the caller may write its tensors, and peers that still read them must learn that.
void Transport::mark_failed(const std::string& reason) {
  Header& header = own_.header();
  if (header.failed.load(std::memory_order_acquire) != 0) return;
  write_failure(header, reason);
  for (ShmPeer& peer : here_) note_failure(peer.segment.header(), rank_);
}

void Transport::tell_failure() {
  for (ShmPeer& peer : here_) peer.doorbell.ring(kAllNews);
  tell_remotes([](RemotePeer& peer) { peer.send_state_now(); });
}

// Those with which this process talks, and those at distances of 1, 2, 4 and so on: they tell
// others, and after log2(n) steps all n ranks know.
void Transport::tell_remotes(const std::function<void(RemotePeer&)>& tell) {
  if (!remote_ranks_) return;
  std::set<Rank> told;
  const auto tell_one = [&](RemotePeer& peer) {
    if (told.insert(peer.rank()).second) tell(peer);
  };
  each_remote([&](RemotePeer& peer) {
    if (peer.wire().reached() && !peer.wire().parked()) tell_one(peer);
  });
  for (int step = 1; step < size(); step *= 2) {
    for (const Rank rank : {(rank_ + step) % size(), (rank_ + size() - step) % size()}) {
      if (is_remote(rank)) tell_one(remote_ranks_->get(rank));
    }
  }
}

void Transport::pass_on() {
  times_asked();
  const auto first = first_failed();
  if (!first || !is_remote(*first) || passed_on_.exchange(true)) return;
  const PeerState state = this->state(*first, Board::kHost);
  RankState words;
  words.called = state.called;
  words.finished = state.finished;
  words.failed = 1;
  failure(*first).copy(words.failure, kFailureBytes - 1);
  tell_remotes([&](RemotePeer& peer) {
    if (peer.rank() != *first) peer.send_failure_of(*first, words);
  });
}

Blame Transport::blame_of(Rank rank) const {
  const Header* header = header_of(rank);
  return header == nullptr ? Blame() : read_blame(*header);
}

// Those that wait for this rank are among those with which it talks: they hear of it by news().
void Transport::blame(const Blame& blame) {
  if (blame != blame_of(rank_)) write_blame(own_.header(), blame);
}

void Transport::ask_for_records() {
  own_.header().asked.store(static_cast<uint32_t>(times_asked()) + 1, std::memory_order_release);
  tell_remotes([](RemotePeer& peer) { peer.send_state_now(); });
}

uint64_t Transport::times_asked() {
  uint32_t times = 0;
  for (Rank rank = 0; rank < size(); ++rank) {
    const Header* header = header_of(rank);
    if (header != nullptr) times = std::max(times, header->asked.load(std::memory_order_acquire));
  }
  // Another thread may ask meanwhile: the count never falls.
  uint32_t own = own_.header().asked.load(std::memory_order_acquire);
  while (own < times && !own_.header().asked.compare_exchange_weak(own, times)) {
  }
  if (own < times) {
    tell_remotes([](RemotePeer& peer) { peer.send_state_now(); });
  }
  return times;
}

// Adding nothing is a write to the word that note_failure() exchanges, so the two have an order
// for all that their threads do: if this comes first, so do the reads before it.
std::optional<Rank> Transport::first_failed(bool have_read) {
  std::atomic<uint32_t>& word = own_.header().aborted_by;  // partner: note_failure()
  const uint32_t by = have_read ? word.fetch_add(0, std::memory_order_acq_rel)
                                : word.load(std::memory_order_seq_cst);
  if (by == 0 || by > static_cast<uint32_t>(size())) return std::nullopt;
  return static_cast<Rank>(by) - 1;
}

bool Transport::connection_lost(Rank rank) {
  if (is_remote(rank)) return remote(rank) != nullptr && remote(rank)->wire().lost();
  const ShmPeer& other = peer(rank);
  if (!other.process) return false;
  return other.process->lost() ||
         other.segment.header().left.load(std::memory_order_acquire) != 0;  // partner: leave()
}

std::string Transport::condition(Rank rank) {
  if (is_remote(rank)) {
    if (remote(rank) == nullptr) return "as its peers say";
    Wire& wire = remote(rank)->wire();
    return wire.lost() ? "dead or out of reach" : wire.condition();
  }
  if (connection_lost(rank)) return "dead";
  const Neighbour* const process = peer(rank).process.get();
  return process != nullptr && is_stopped(process->process())
             ? "stopped by a signal (kill -CONT lets it go on)"
             : "alive";
}

std::string Transport::loss(Rank rank) {
  return is_remote(rank) ? remote_ranks_->get(rank).wire().condition() : "its process died";
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
  each_remote([&](RemotePeer& remote) {
    // A rank that has left wants nothing more. It may end without acknowledging its frames.
    if (!remote.wire().lost() && !remote.left()) frames += remote.wire().undelivered();
  });
  return frames;
}

void Transport::leave() {
  own_.header().left.store(1, std::memory_order_seq_cst);  // partner: state()
  for (ShmPeer& other : here_) other.doorbell.notify(kAllNews);
  each_remote([](RemotePeer& remote) {  // others learn of it when they look for us
    if (remote.wire().reached()) remote.send_state_now();
  });
}

void Transport::forget() {
  for (ShmPeer& other : here_) {
    if (other.process) other.process->forget();
  }
  if (remote_ranks_) remote_ranks_->forget();
}

bool Transport::send(Rank to, uint32_t number, const Fd& descriptor) {
  const auto what = kForDevices | static_cast<int32_t>(number);
  const auto receiver = process(to);
  return receiver && receiver->send({group_id(), rank_, to, what}, descriptor);
}

Fd Transport::take(Rank from, uint32_t number) {
  const auto what = kForDevices | static_cast<int32_t>(number);
  const auto sender = process(from);
  return sender ? sender->take({group_id(), from, rank_, what}) : Fd();
}

const char* Transport::name() const {
  if (!remote_ranks_) return "shared memory";
  return here_.size() > 1 ? "shared memory and TCP" : "TCP";
}

}  // namespace ringcomm
