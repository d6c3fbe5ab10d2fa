#include "transport/rendezvous.h"

#include <ranges>

#include "transport/assembly.h"
#include "transport/host.h"

namespace ringcomm {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(500);  // at the store, at who is silent
constexpr auto kSlice = std::chrono::milliseconds(1);        // another thread may take what comes

class Meeting {
 public:
  Meeting(Store& store, const RendezvousOptions& options, Neighbours& neighbours,
          const Deadline& deadline)
      : options_(options),
        neighbours_(neighbours),
        deadline_(deadline),
        store_(store),
        assembly_(store, options, deadline),
        sent_(static_cast<size_t>(options.size)) {}

  Neighbourhood run() {
    try {
      assembly_.begin();
      mine_ = neighbours_.card();
      mine_.tcp = options_.tcp;
      if (!options_.host.empty()) mine_.host = options_.host;
      exchange_cards();
      find_hosts();
      map_neighbours();
      if (hosts_in(result_.host_of) == options_.size) {
        assembly_.skip();  // no two share memory
      } else if (set_apart(assembly_.exchange(report_.empty() ? "-" : report_))) {
        find_hosts();
        map_neighbours();
      }
      if (options_.rank == 0) tell_who_is_apart();
      if (across()) meet_across();
    } catch (const std::exception& error) {
      give_up(error);
      throw;
    }
    return std::move(result_);
  }

 private:
  const Card& card(Rank rank) const { return cards_[static_cast<size_t>(rank)]; }
  ShmPeer& peer(Rank rank) { return result_.peers[static_cast<size_t>(rank)]; }
  uint64_t channel() const { return card(0).nonce[0]; }

  void exchange_cards() {
    mine_.algorithm = options_.algorithm();
    const auto texts = assembly_.exchange(mine_.to_text());
    for (Rank rank = 0; rank < options_.size; ++rank) {
      cards_.push_back(Card::from_text(texts[static_cast<size_t>(rank)], rank));
      result_.names.push_back(cards_.back().host);
    }
    result_.word = texts.back();
    result_.algorithm = card(0).algorithm;
    require_agreement(cards_);
  }

  // ---- the hosts of the ranks, the same on all ranks

  // Hosts are numbered in the order of their first rank. On one, each reaches each.
  void find_hosts() {
    std::vector<std::vector<Rank>> hosts;
    result_.host_of.clear();
    for (Rank rank = 0; rank < options_.size; ++rank) {
      const auto fits = [&](const std::vector<Rank>& host) {
        return std::ranges::all_of(host, [&](Rank other) {
          return card(rank).shares_host(card(other)) && !apart_.contains({other, rank});
        });
      };
      auto host = std::ranges::find_if(hosts, fits);
      if (host == hosts.end()) host = hosts.emplace(hosts.end());
      host->push_back(rank);
      result_.host_of.push_back(static_cast<int>(host - hosts.begin()));
    }
  }

  bool is_local(Rank rank) const {
    const auto& hosts = result_.host_of;
    return hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(options_.rank)];
  }
  bool across() const { return hosts_in(result_.host_of) > 1; }

  // Ranks report pairs that live and cannot share memory. Adds them to those that the cards tell.
  // True if there are any.
  bool set_apart(const std::vector<std::string>& reports) {
    for (Rank rank = 0; rank < options_.size; ++rank) {
      TextReader items(reports[static_cast<size_t>(rank)]);
      for (std::string item; std::getline(items, item, '\t');) {
        TextReader in(item);
        Rank other = -1;
        std::string why;
        if (!(in >> other) || other < 0 || other >= options_.size) continue;
        std::getline(in, why);
        apart_.emplace(std::minmax(rank, other));
        if (why_.empty()) why_ = pair_text(rank, other, str("rank ", rank, " says:", why));
      }
    }
    return !apart_.empty();
  }

  static std::string pair_text(Rank one, Rank other, const std::string& why) {
    return str("rank ", one, " and rank ", other,
               " use TCP, as if they were on two hosts, since they cannot share memory: ", why);
  }

  // Logs one line, about the first such pair.
  void tell_who_is_apart() {
    for (Rank rank = 1; rank < options_.size && why_.empty(); ++rank) {
      for (Rank other = 0; other < rank && why_.empty(); ++other) {
        const std::string why = why_apart(cards_, other, rank);
        if (!why.empty()) why_ = pair_text(other, rank, why);
      }
    }
    if (!why_.empty() && neighbours_.first_time(why_)) options_.warn(why_);
  }

  // ---- shared memory

  void make_segment() {
    result_.mappings.clear();
    result_.peers.clear();
    result_.peers.resize(cards_.size());
    std::map<int, int> ranks;  // of each host
    for (Rank rank = 0; rank < options_.size; ++rank) {
      const int host = result_.host_of[static_cast<size_t>(rank)];
      peer(rank).place = ranks[host]++;
    }
    layout_ = options_.layout;
    if (across()) {
      const int here = ranks[result_.host_of[static_cast<size_t>(options_.rank)]];
      const auto most = std::ranges::max(ranks | std::views::values);
      const auto layouts = options_.across(here, most, result_.distance);
      layout_ = layouts.host;
      pair_layout_ = layouts.pair;
    }
    segment_ = make_sealed_memfd("ringcomm", layout_.bytes());
    adopt(options_.rank, segment_);
    peer(options_.rank).doorbell = neighbours_.bell();
    Header& header = peer(options_.rank).segment.header();
    header.magic = kSegmentMagic;
    header.nonce = mine_.nonce;
  }

  void adopt(Rank rank, const Fd& memory) {
    Mapping mapping(memory, layout_.bytes());
    const auto* header = reinterpret_cast<const Header*>(mapping.data());
    const bool genuine = header->magic == kSegmentMagic && header->nonce == card(rank).nonce;
    if (rank != options_.rank && !genuine) throw_gone(rank);
    peer(rank).segment = Segment(mapping.data(), layout_);
    peer(rank).group = channel();
    result_.mappings.push_back(std::move(mapping));
  }

  // For each rank of this host: reaches its process, sends it our memory, and maps its memory.
  void map_neighbours() {
    make_segment();
    std::fill(sent_.begin(), sent_.end(), false);
    ++attempt_;
    std::vector<Rank> missing;
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (rank != options_.rank && is_local(rank)) missing.push_back(rank);
    }
    Deadline look(kLookEvery);
    while (true) {
      const uint64_t seen = neighbours_.news();  // looking at one may take what comes for another
      std::erase_if(missing, [&](Rank rank) { return resolved(rank); });
      if (missing.empty()) break;
      neighbours_.wait(std::min<Clock::duration>(kSlice, deadline_.left()), seen);
      options_.interrupt();
      if (!look.passed() && !deadline_.passed()) continue;
      check(missing);
      look = Deadline(kLookEvery);
    }
    segment_.reset();
    assembly_.died = [this](Rank rank) { return died(rank); };
  }

  // Its memory is mapped, or it is known that it cannot be.
  bool resolved(Rank rank) {
    if (!peer(rank).process) {
      auto reached = neighbours_.reach(card(rank).socket);
      if (reached.gone) throw_gone(rank);
      if (!reached.apart.empty()) return set_apart(rank, reached.apart);
      peer(rank).process = std::move(reached.neighbour);
    }
    const auto process = peer(rank).process;
    if (!process) return false;
    auto sent = sent_.begin() + rank;
    if (!*sent) *sent = process->send({channel(), options_.rank, rank, attempt_}, segment_);
    if (!peer(rank).segment) {
      if (const Fd memory = neighbours_.take({channel(), rank, options_.rank, attempt_})) {
        check_sealed_memfd(memory, layout_.bytes(), rank);
        adopt(rank, memory);
      }
    }
    peer(rank).doorbell = process->bell();  // it goes with the connection
    if (peer(rank).segment && *sent) return true;
    if (process->lost()) {
      if (neighbours_.is_gone(card(rank).socket)) throw_gone(rank);
      peer(rank).process.reset();  // it lives, and could not keep the connection: once more
      *sent = false;
    }
    return false;
  }

  // The peer may wait for this rank to connect: it is told.
  bool set_apart(Rank rank, const std::string& why) {
    if (attempt_ > 1) throw PeerError(rank, str("rank ", rank, ": ", why));
    assembly_.set_apart(rank, why);
    report_ += str(report_.empty() ? "" : "\t", rank, ' ', why);
    return true;
  }

  void check(const std::vector<Rank>& missing) {
    assembly_.check(missing);
    if (const int code = neighbours_.deaf()) throw SystemError("accepting connections", code);
    const bool told = assembly_.some_are_apart();
    for (const Rank rank : missing) {
      if (peer(rank).process) continue;
      if (neighbours_.is_gone(card(rank).socket)) throw_gone(rank);
      const std::string why = told ? assembly_.apart_from(rank) : "";
      if (!why.empty()) neighbours_.set_apart(card(rank).socket, why);
    }
  }

  [[noreturn]] void throw_gone(Rank rank) {
    assembly_.check_last_words();
    throw PeerError(gone(rank));
  }
  PeerError gone(Rank rank) const {
    return PeerError(rank, str("rank ", rank, " (process ", card(rank).pid,
                               ") died while the group was being made: see its own output"));
  }

  std::optional<PeerError> died(Rank rank) {
    const auto& process = peer(rank).process;
    if (process && process->lost()) return gone(rank);
    return store_.died(rank);
  }

  // The header tells it to the ranks that have this rank's memory already.
  void give_up(const std::exception& error) {
    assembly_.give_up(error);
    if (cards_.empty()) return;
    neighbours_.end(channel());
    if (result_.mappings.empty()) return;
    write_failure(peer(options_.rank).segment.header(), error.what());
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (rank == options_.rank || peer(rank).remote || !peer(rank).segment) continue;
      note_failure(peer(rank).segment.header(), options_.rank);
      if (peer(rank).process) peer(rank).doorbell.ring(kAllNews);
    }
  }

  // ---- other hosts

  // Every rank takes frames of this group from all others before any of them sends one.
  void meet_across() {
    Network& network = options_.network(store_.host());
    const auto texts = assembly_.exchange(network.contact().to_text());
    const auto contact_of = [&](Rank rank) {
      return Contact::from_text(texts[static_cast<size_t>(rank)]);
    };
    Rank next = options_.rank;
    while (is_local(next)) next = (next + 1) % options_.size;
    std::vector<std::string> addresses;
    for (const Address& one : contact_of(next).addresses) addresses.push_back(one.to_text());
    const auto told = assembly_.exchange(str(options_.distance(addresses)));
    // The longest counts for all. The last line is rank 0's word.
    const std::string longest = *std::max_element(told.begin(), told.end() - 1);
    result_.distance = longest == "2" ? 2 : longest == "1" ? 1 : 0;
    if (result_.distance > 0) map_neighbours();  // once more, with room for what is under way
    for (Rank rank = 0; rank < options_.size; ++rank) {
      if (is_local(rank)) continue;
      const auto contact = contact_of(rank);
      const bool elsewhere = !card(rank).may_share_network(mine_);
      if (elsewhere) refuse_own(contact.addresses, network.contact().addresses, rank);
      add_remote(rank, network.reach(contact));
    }
    assembly_.exchange("yes");
  }

  void add_remote(Rank rank, Wire& wire) {
    ShmPeer& there = peer(rank);
    there.process.reset();
    there.doorbell = peer(options_.rank).doorbell;
    const RemotePeer::Ends ends{rank, &peer(options_.rank).segment.header(), pair_layout_};
    there.remote = std::make_unique<RemotePeer>(wire, channel(), ends);
  }

  const RendezvousOptions& options_;
  Neighbours& neighbours_;
  const Deadline& deadline_;
  Store& store_;
  Assembly assembly_;
  Card mine_;
  SegmentLayout layout_, pair_layout_;
  Fd segment_;
  std::vector<Card> cards_;
  std::vector<bool> sent_;
  int attempt_ = 0;
  std::string report_;                     // of the ranks that this one cannot share memory with
  std::set<std::pair<Rank, Rank>> apart_;  // the lower one first
  std::string why_;                        // two ranks that look like one host's are not
  Neighbourhood result_;
};

}  // namespace

Neighbourhood::~Neighbourhood() {
  if (mappings.empty() || mappings[0].data() == nullptr) return;
  auto* const header = reinterpret_cast<Header*>(mappings[0].data());
  header->left.store(1, std::memory_order_seq_cst);  // partner: Transport::state()
}

int hosts_in(const std::vector<int>& host_of) {
  return host_of.empty() ? 1 : 1 + *std::ranges::max_element(host_of);
}

Neighbourhood meet(Store& store, const RendezvousOptions& options, Neighbours& neighbours,
                   const Deadline& deadline) {
  return Meeting(store, options, neighbours, deadline).run();
}

}  // namespace ringcomm
