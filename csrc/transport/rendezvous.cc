#include "transport/rendezvous.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <map>
#include <thread>

#include "transport/host.h"
#include "transport/unix_socket.h"

namespace ringcomm {
namespace {

constexpr auto kProbeEvery = std::chrono::milliseconds(500);
constexpr auto kFirstPause = std::chrono::microseconds(100), kLongestPause = kFirstPause * 256;
constexpr auto kRetryEvery = std::chrono::milliseconds(5);

// The one message of each direction; two descriptors ride along: segment and doorbell.
struct Hello {
  uint64_t magic = kSegmentMagic;
  Rank rank = 0;
  int size = 0;
  Nonce from, to;  // both cards' nonces: proves that the sender read the store
};

class Meeting {
 public:
  Meeting(Store& store, const RendezvousOptions& options, const DoorbellMemory& doorbell,
          const Deadline& deadline)
      : store_(store),
        options_(options),
        doorbell_(doorbell),
        deadline_(deadline),
        sockets_(static_cast<size_t>(options.size)) {}

  Neighbourhood run() {
    mine_ = make_card();
    mine_.tcp = options_.tcp;
    listener_ = listen_unix(mine_.socket, 2 * options_.size + 16);
    try {
      exchange_cards();
      find_hosts();
      make_segment();
      for (Rank rank = 0; rank < options_.rank; ++rank) {
        if (is_local(rank)) connect_to(rank);
      }
      accept_others();
      for (Rank rank = 0; rank < options_.rank; ++rank) {
        if (is_local(rank)) await_reply(rank);
      }
      if (across()) meet_across();
    } catch (const std::exception& error) {
      leave_word(error.what());
      throw;
    }
    return std::move(result_);
  }

 private:
  const Card& card(Rank rank) const { return cards_[static_cast<size_t>(rank)]; }
  Fd& socket(Rank rank) { return sockets_[static_cast<size_t>(rank)]; }

  void make_segment() {
    layout_ = across() ? options_.layout_across : options_.layout;
    const SegmentLayout& layout = layout_;
    segment_ = make_sealed_memfd("ringcomm", layout.bytes());
    result_.peers.resize(sockets_.size());
    adopt(options_.rank, Mapping(segment_, layout.bytes()), doorbell_.bell(), Fd());
    Header& header = result_.peers[static_cast<size_t>(options_.rank)].segment.header();
    header.magic = kSegmentMagic;
    header.nonce = mine_.nonce;
  }

  bool is_local(Rank rank) const {
    const auto& hosts = result_.host_of;
    return hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(options_.rank)];
  }
  bool across() const { return result_.host_of.back() > 0; }

  // Hosts are numbered in the order of their first rank.
  void find_hosts() {
    std::map<std::string, int> hosts;
    for (Rank rank = 0; rank < options_.size; ++rank) {
      const Card& other = card(rank);
      const std::string place = str(other.boot_id, other.network, other.tcp ? str(rank) : "");
      const auto [host, added] = hosts.emplace(place, static_cast<int>(hosts.size()));
      result_.host_of.push_back(host->second);
    }
  }

  // Every rank takes frames of this group from all others before any of them sends one.
  void meet_across() {
    Network& network = options_.network(store_.host());
    refuse_loopback(network.contact().addresses[0], options_.rank, cards_);
    const auto texts = exchange("contact", network.contact().to_text(), "has not finished joining");
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (is_local(rank)) continue;
      const auto contact = Contact::from_text(texts[static_cast<size_t>(rank)]);
      const bool elsewhere = !card(rank).shares_host(mine_);  // else RINGCOMM_TRANSPORT=tcp
      if (elsewhere) refuse_own(contact.addresses, network.contact().addresses, rank);
      add_remote(rank, network.reach(contact));
    }
    exchange("ready", "yes", "has not finished joining");
  }

  void add_remote(Rank rank, Wire& wire) {
    Mapping shadow(layout_.bytes());
    const auto inbox = static_cast<uint64_t>(rank) * options_.first_inbox.bytes;
    ShmPeer& peer = result_.peers[static_cast<size_t>(rank)];
    peer.segment = Segment(shadow.data(), layout_);
    peer.doorbell = doorbell_.bell();
    const RemotePeer::Ends ends{options_.rank,
                                rank,
                                result_.peers[static_cast<size_t>(options_.rank)].segment,
                                peer.segment,
                                {options_.first_inbox.offset + inbox, options_.first_inbox.bytes}};
    peer.remote = std::make_unique<RemotePeer>(wire, card(0).nonce.words[0], ends);
    result_.mappings.push_back(std::move(shadow));
  }

  void adopt(Rank rank, Mapping mapping, Doorbell bell, Fd connection) {
    ShmPeer& peer = result_.peers[static_cast<size_t>(rank)];
    peer.segment = Segment(mapping.data(), layout_);
    peer.doorbell = bell;
    peer.socket = std::move(connection);
    result_.mappings.push_back(std::move(mapping));
  }

  // Re-initialisation on a store that survived counts on: every life has its own generation.
  void exchange_cards() {
    const int64_t arrivals = store_.add(str("ringcomm/", options_.scope, "/arrivals"), 1);
    const int64_t generation = (arrivals - 1) / options_.size;
    prefix_ = str("ringcomm/", options_.scope, "/", generation, "/");
    const auto texts = exchange("card", mine_.to_text(), "has not joined");
    for (Rank rank = 0; rank < options_.size; ++rank) {
      cards_.push_back(Card::from_text(texts[static_cast<size_t>(rank)], rank));
    }
    result_.word = texts.back();
  }

  // What every rank says, and last rank 0's word for all. Rank 0 reads the others' and writes them
  // down in one place: a store that serves hundreds of ranks is asked n times, not n * n.
  std::vector<std::string> exchange(const char* what, const std::string& mine,
                                    const char* if_late) {
    const auto key = [&](Rank rank) { return str(prefix_, what, "/", rank); };
    const std::string list = str(prefix_, what, "/all");
    store_.set(key(options_.rank), mine);
    if (options_.rank != 0) {
      if (appears(list, 0)) return lines_of(store_.get(list));
      throw late(without(key, 0), if_late);  // or it has not written the list
    }
    std::string text;
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (!appears(key(rank), rank)) throw late(without(key, rank), if_late);
      text += store_.get(key(rank)) + '\n';
    }
    store_.set(list, text + options_.word);
    return lines_of(text + options_.word);
  }

  std::vector<std::string> lines_of(const std::string& text) const {
    std::vector<std::string> lines(static_cast<size_t>(options_.size) + 1);
    std::istringstream in(text);
    for (std::string& line : lines) std::getline(in, line);
    return lines;
  }

  // The ranks that have not written theirs; `otherwise` if all have by now.
  template <typename Key>
  std::vector<Rank> without(const Key& key, Rank otherwise) {
    std::vector<Rank> missing;
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (!store_.has(key(rank))) missing.push_back(rank);
    }
    return missing.empty() ? std::vector{otherwise} : missing;
  }

  // Does the store get this key in time? Throws when `by`, which would make it, has given up. A
  // wait of the store's own could not be interrupted, and torch's stores warn when one is in vain.
  bool appears(const std::string& key, Rank by) {
    Clock::duration pause = kFirstPause;
    Deadline look(kProbeEvery);
    while (!store_.has(key)) {
      if (deadline_.passed()) return false;
      if (look.passed()) {
        check_word_of(by);
        look = Deadline(kProbeEvery);
      }
      options_.interrupt();
      std::this_thread::sleep_for(std::min(pause, deadline_.left()));
      pause = std::min<Clock::duration>(2 * pause, kLongestPause);
    }
    return true;
  }

  TimeoutError late(const std::vector<Rank>& ranks, const char* what) const {
    return TimeoutError(str("Timed out after ", to_seconds(deadline_.elapsed()), " s waiting for ",
                            list_of(ranks), " of ", options_.size, ", which ", what,
                            " the group: was every rank started, with the same world size?"));
  }

  // How long to wait before looking around.
  Deadline slice() const {
    return Deadline(std::min<Clock::duration>(kProbeEvery, deadline_.left()));
  }
  // Waiting goes on: throws when it may not.
  void look_around(const std::vector<Rank>& awaited) const {
    if (deadline_.passed()) throw late(awaited, "has not finished joining");
    options_.interrupt();
  }

  void introduce(const Fd& connection, Rank rank) {
    const Hello hello{kSegmentMagic, options_.rank, options_.size, mine_.nonce, card(rank).nonce};
    const int fds[] = {segment_.get(), doorbell_.fd().get()};
    send_message(connection, std::as_bytes(std::span(&hello, 1)), fds);
  }
  // From a connection that is readable. False when the other end has closed.
  static bool hear(const Fd& connection, Hello& hello, std::vector<Fd>& fds) {
    const auto bytes = std::as_writable_bytes(std::span(&hello, 1));
    return receive_message(connection, bytes, fds, Deadline(kProbeEvery));
  }

  // Before this rank's sockets close: the others take that for its death otherwise.
  void leave_word(const std::string& text) {
    if (prefix_.empty()) return;
    try {
      store_.set(str(prefix_, options_.rank, "/failed"), text);
    } catch (const std::exception&) {
      return;  // the store may be what failed
    }
  }

  // What a rank said when it gave up, if it did.
  std::string word_of(Rank rank) const {
    const std::string key = str(prefix_, rank, "/failed");
    try {
      return store_.has(key) ? store_.get(key) : "";
    } catch (const std::exception&) {
      return "";
    }
  }

  void check_word_of(Rank rank) const {
    if (!word_of(rank).empty()) throw died(rank);
  }

  // Its socket is closed: because its process ended, or because it gave up.
  PeerError died(Rank rank) const {
    const std::string word = word_of(rank);
    if (!word.empty()) return PeerError(rank, str("rank ", rank, " failed: ", word));
    return PeerError(rank, str("rank ", rank, " (process ", card(rank).pid,
                               ") died while the group was being made: see its own output"));
  }

  void connect_to(Rank rank) {
    while (true) {
      try {
        socket(rank) = connect_unix(card(rank).socket);
        return introduce(socket(rank), rank);
      } catch (const SystemError& error) {
        if (error.code() == EPERM) throw PeerError(rank, str("rank ", rank, ": ", error.what()));
        if (error.code() != EAGAIN) throw died(rank);
      }
      look_around({rank});
      std::this_thread::sleep_for(kRetryEvery);  // its queue is full: others connect as well
    }
  }

  void await_reply(Rank rank) {
    while (!wait_readable(socket(rank), slice())) look_around({rank});
    Hello hello;
    std::vector<Fd> fds;
    if (!hear(socket(rank), hello, fds)) throw died(rank);
    if (!valid(hello, fds) || hello.rank != rank) throw died(rank);
    map_peer(hello.rank, fds, std::move(socket(rank)));
  }

  bool valid(const Hello& hello, const std::vector<Fd>& fds) const {
    return hello.magic == kSegmentMagic && hello.size == options_.size && hello.rank >= 0 &&
           hello.rank < options_.size && hello.rank != options_.rank && is_local(hello.rank) &&
           fds.size() == 2 && hello.from == card(hello.rank).nonce && hello.to == mine_.nonce;
  }

  void accept_others() {
    std::vector<Rank> missing;
    for (Rank rank = options_.rank + 1; rank < options_.size; ++rank) {
      if (is_local(rank)) missing.push_back(rank);
    }
    while (!missing.empty()) {
      if (Fd connection = accept_unix(listener_, slice())) {
        std::erase(missing, welcome(std::move(connection)));
        continue;
      }
      look_around(missing);
      for (const Rank rank : missing) probe(rank);
    }
  }

  // A rank whose card is there but whose listener is gone, and that has not connected, is dead.
  void probe(Rank rank) const {
    try {
      connect_unix(card(rank).socket);
    } catch (const SystemError& error) {
      if (error.code() == ECONNREFUSED) throw died(rank);
    }
  }

  // The rank that introduced itself, or -1 when this was somebody else (a probe, a stranger).
  Rank welcome(Fd connection) {
    Hello hello;
    std::vector<Fd> fds;
    const Deadline patience(std::min<Clock::duration>(std::chrono::seconds(5), deadline_.left()));
    if (!wait_readable(connection, patience) || !hear(connection, hello, fds)) return -1;
    if (!valid(hello, fds) || hello.rank < options_.rank) return -1;
    if (result_.peers[static_cast<size_t>(hello.rank)].socket) return -1;
    try {
      introduce(connection, hello.rank);
    } catch (const SystemError&) {
      throw died(hello.rank);
    }
    map_peer(hello.rank, fds, std::move(connection));
    return hello.rank;
  }

  void map_peer(Rank rank, std::vector<Fd>& fds, Fd connection) {
    const uint64_t bytes = layout_.bytes();
    check_sealed_memfd(fds[0], bytes, rank);
    check_sealed_memfd(fds[1], SegmentLayout::kPage, rank);
    Mapping segment(fds[0], bytes);
    const auto* header = reinterpret_cast<const Header*>(segment.data());
    if (header->magic != kSegmentMagic || !(header->nonce == card(rank).nonce)) throw died(rank);
    Mapping page(fds[1], SegmentLayout::kPage);
    const Doorbell bell(reinterpret_cast<DoorbellPage*>(page.data()));
    adopt(rank, std::move(segment), bell, std::move(connection));
    result_.mappings.push_back(std::move(page));
  }

  Store& store_;
  const RendezvousOptions& options_;
  const DoorbellMemory& doorbell_;
  const Deadline& deadline_;
  Card mine_;
  SegmentLayout layout_;
  std::string prefix_;  // of this life's keys
  Fd segment_, listener_;
  std::vector<Card> cards_;
  std::vector<Fd> sockets_;  // on their way; in result_.peers once mapped
  Neighbourhood result_;
};

}  // namespace

DoorbellMemory::DoorbellMemory()
    : fd_(make_sealed_memfd("ringcomm-bell", SegmentLayout::kPage)),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      mapping_(fd_, SegmentLayout::kPage) {
  if (!event_) throw SystemError("eventfd");
}

Doorbell DoorbellMemory::bell() const {
  return Doorbell(reinterpret_cast<DoorbellPage*>(mapping_.data()), event_.get());
}

Neighbourhood meet(Store& store, const RendezvousOptions& options, const DoorbellMemory& doorbell,
                   const Deadline& deadline) {
  return Meeting(store, options, doorbell, deadline).run();
}

}  // namespace ringcomm
