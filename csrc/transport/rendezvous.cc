#include "transport/rendezvous.h"

#include <numeric>

#include "net/handshake.h"
#include "transport/assembly.h"
#include "transport/roster.h"

namespace ringcomm {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(500);  // at the store, at who is silent
constexpr const char* kNoMemfd =
    "this process may not call memfd_create, so it shares no memory, and reaches all ranks by TCP: "
    "allow that call in the seccomp profile of its container";
constexpr int32_t kContacts = 1 << 16;                 // a parcel
constexpr auto kSlice = std::chrono::milliseconds(1);  // another thread may take what comes

class Rendezvous {
 public:
  Rendezvous(Store& store, const RendezvousOptions& options, Neighbours& neighbours,
             const Deadline& deadline)
      : options_(options),
        neighbours_(neighbours),
        deadline_(deadline),
        store_(store),
        assembly_(store, options, deadline),
        all_(static_cast<size_t>(options.size)) {
    std::iota(all_.begin(), all_.end(), 0);
  }

  MappedGroup run() {
    try {
      assembly_.begin();
      mine_ = neighbours_.card();
      mine_.before = assembly_.before();
      if (mine_.tcp && !options_.tcp && neighbours_.first_time(kNoMemfd)) options_.warn(kNoMemfd);
      mine_.tcp = mine_.tcp || options_.tcp;
      if (!options_.host.empty()) mine_.host = options_.host;
      mine_.algorithm = options_.algorithm();
      while (!met()) {
      }
      if (options_.rank == 0) log_first_apart();
    } catch (const std::exception& error) {
      give_up(error);
      throw;
    }
    assembly_.end();
    static_cast<Whereabouts&>(result_) = static_cast<const Whereabouts&>(roster_);
    result_.costs_text = roster_.costs_text;
    result_.algorithm = roster_.algorithm;
    return std::move(result_);
  }

 private:
  // False: some cards were of processes that are dead, and their ranks have come meanwhile.
  bool met() {
    try {
      assembly_.gather(
          mine_.to_text(), [this](const auto& words) { return read_cards(words); },
          [this](const std::string& text) { return take_roster(text); });
      if (options_.rank == 0) take_roster(roster_text_);
      map_neighbours();
      if (roster_.hosts() == options_.size) {
        assembly_.skip();  // no two share memory
      } else {
        const auto read = [this](const auto& words) { return read_reports(words); };
        const std::string changed = assembly_.exchange(report_, all_, read);
        if (!changed.empty()) {
          ++lists_;
          take_roster(changed);
          map_neighbours();
        }
      }
      if (across()) meet_across();
      return true;
    } catch (const Assembly::Again&) {
      if (!here_.empty()) neighbours_.end(group_id());
      assembly_.died = nullptr;
      result_.remote_ranks.reset();
      here_.clear();
      cards_.clear();
      apart_.clear();
      report_.clear();
      attempt_ = lists_ = 0;
      return false;
    }
  }

  // ---- rank 0, for all

  std::string read_cards(const Assembly::Words& words) {
    for (const std::string& word : words) {
      cards_.push_back(Card::from_text(word, static_cast<Rank>(cards_.size())));
    }
    require_agreement(cards_);
    group_id_ = random_id()[0];
    roster_text_ = tell_hosts(lists_);
    return roster_text_;
  }

  // The roster for all; and for each host, the cards of its ranks.
  std::string tell_hosts(int lists) {
    Roster roster;
    roster.group_id = group_id_;
    roster.algorithm = cards_[0].algorithm;
    roster.costs_text = options_.costs_text;
    roster.find_hosts(cards_, apart_);
    std::vector<std::string> texts(static_cast<size_t>(roster.hosts()));
    for (size_t rank = 0; rank < cards_.size(); ++rank) {
      texts[static_cast<size_t>(roster.host_of[rank])] += cards_[rank].to_text() + '\n';
    }
    for (size_t host = 0; host < texts.size(); ++host) {
      assembly_.leave(cards_of(static_cast<int>(host), lists), texts[host]);
    }
    return roster.to_text();
  }

  // Ranks report pairs that live and cannot share memory. Nothing, or the roster without them.
  std::string read_reports(const Assembly::Words& words) {
    for (Rank rank = 0; rank < options_.size; ++rank) {
      TextReader items(words[static_cast<size_t>(rank)]);
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
    return apart_.empty() ? "" : tell_hosts(lists_ + 1);
  }

  static std::string pair_text(Rank first, Rank second, const std::string& why) {
    return str("rank ", first, " and rank ", second,
               " use TCP, as if they were on two hosts, since they cannot share memory: ", why);
  }

  // Logs one line, about the first such pair. The ranks of a host are alike.
  void log_first_apart() {
    const auto firsts = roster_.first_ranks();
    for (size_t i = 1; i < firsts.size() && why_.empty(); ++i) {
      for (size_t j = 0; j < i && why_.empty(); ++j) {
        const std::string why = why_apart(cards_, firsts[j], firsts[i]);
        if (!why.empty()) why_ = pair_text(firsts[j], firsts[i], why);
      }
    }
    if (!why_.empty() && neighbours_.first_time(why_)) options_.warn(why_);
  }

  // ---- the words of rank 0

  static std::string cards_of(int host, int lists) { return str("host", host, '/', lists); }
  int own_host() const { return roster_.host(options_.rank); }
  bool across() const { return roster_.hosts() > 1; }
  uint64_t group_id() const { return roster_.group_id; }
  const Card& card(Rank rank) const { return here_.at(rank); }

  // False: it was made of an older card of this rank's.
  bool take_roster(const std::string& text) {
    roster_ = Roster::from_text(text, options_.size);
    here_ = read_host(own_host());
    return card(options_.rank).nonce == mine_.nonce;
  }

  std::map<Rank, Card> read_host(int host) {
    TextReader lines(assembly_.read(cards_of(host, lists_)));
    std::map<Rank, Card> cards;
    for (const Rank rank : roster_.ranks_of(host)) {
      std::string line;
      std::getline(lines, line);
      cards.emplace(rank, Card::from_text(line, rank));
    }
    return cards;
  }

  // ---- shared memory

  ShmPeer& peer(Rank rank) { return *std::ranges::find(result_.peers, rank, &ShmPeer::rank); }
  ShmPeer& self() { return peer(options_.rank); }

  void make_segment() {
    result_.mappings.clear();
    result_.peers.clear();
    for (const auto& [rank, card] : here_) {
      ShmPeer& peer = result_.peers.emplace_back();
      peer.rank = rank;
      peer.place = static_cast<int>(result_.peers.size()) - 1;
      peer.group_id = group_id();
    }
    layout_ = options_.layout;
    if (across()) {
      const int here = static_cast<int>(here_.size());
      const auto layouts = options_.across(here, roster_.most_ranks(), result_.distance);
      layout_ = layouts.host;
      pair_layout_ = layouts.pair;
    }
    if (here_.size() > 1) segment_ = make_sealed_memfd("ringcomm", layout_.bytes());
    adopt(options_.rank, segment_);
    self().doorbell = neighbours_.bell();
    self().arena = neighbours_.arena().all();
    Header& header = self().segment.header();
    header.magic = kSegmentMagic;
    header.nonce = mine_.nonce;
    header.cores = options_.cores;
  }

  void adopt(Rank rank, const Fd& memory) {
    Mapping mapping = memory ? Mapping(memory, layout_.bytes()) : Mapping(layout_.bytes());
    const auto* header = reinterpret_cast<const Header*>(mapping.data());
    const bool genuine = header->magic == kSegmentMagic && header->nonce == card(rank).nonce;
    if (rank != options_.rank && !genuine) throw_gone(rank);
    peer(rank).segment = Segment(mapping.data(), layout_);
    result_.mappings.push_back(std::move(mapping));
  }

  // For each rank of this host: reaches its process, sends it our memory, and maps its memory.
  void map_neighbours() {
    make_segment();
    sent_.clear();
    ++attempt_;
    await(mates(), [this](Rank rank) { return resolved(rank); });
    segment_.reset();
    assembly_.died = [this](Rank rank) { return died(rank); };
  }

  std::vector<Rank> mates() const {  // the other ranks of this host
    std::vector<Rank> mates;
    for (const auto& [rank, card] : here_) {
      if (rank != options_.rank) mates.push_back(rank);
    }
    return mates;
  }

  // Until each of them is resolved.
  void await(std::vector<Rank> missing, const std::function<bool(Rank)>& resolved) {
    Deadline next_check(kLookEvery);
    while (true) {
      const uint64_t seen = neighbours_.news();  // looking at one may take what comes for another
      std::erase_if(missing, resolved);
      if (missing.empty()) return;
      neighbours_.wait(std::min<Clock::duration>(kSlice, deadline_.left()), seen);
      options_.interrupt();
      if (!next_check.passed() && !deadline_.passed()) continue;
      check(missing);
      next_check = Deadline(kLookEvery);
    }
  }

  // Its memory is mapped, or it is known that it cannot be.
  bool resolved(Rank rank) {
    if (!peer(rank).process) {
      auto reached = neighbours_.reach(card(rank).socket);
      if (reached.gone && was_here(rank)) throw_gone(rank);
      if (!reached.apart.empty()) return set_apart(rank, reached.apart);
      peer(rank).process = std::move(reached.neighbour);
    }
    const auto process = peer(rank).process;
    if (!process) return false;
    bool& sent = sent_[rank];
    if (!sent) sent = process->send({group_id(), options_.rank, rank, attempt_}, segment_);
    if (!peer(rank).segment) {
      if (const Fd memory = neighbours_.take({group_id(), rank, options_.rank, attempt_})) {
        check_sealed_memfd(memory, layout_.bytes(), rank);
        adopt(rank, memory);
      }
    }
    peer(rank).doorbell = process->bell();  // it goes with the connection
    peer(rank).arena = process->arena();
    if (peer(rank).segment && sent) return true;
    if (process->lost()) {
      if (neighbours_.is_gone(card(rank).socket)) throw_gone(rank);
      peer(rank).process.reset();  // it lives, and could not keep the connection: once more
      sent = false;
    }
    return false;
  }

  // Was its process alive in this meeting? Else its card may be of an earlier one, and a later card
  // may come: the check looks for it.
  bool was_here(Rank rank) const { return card(rank).before >= assembly_.before(); }

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
      if (peer(rank).process && !peer(rank).process->lost()) continue;
      const bool knew = was_here(rank) || peer(rank).process;
      if (neighbours_.is_gone(card(rank).socket) && knew) throw_gone(rank);
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
    if (here_.contains(rank)) {
      const auto& process = peer(rank).process;
      if (process && process->lost()) return gone(rank);
    }
    return store_.died(rank);
  }

  // The header tells it to the ranks that have this rank's memory already.
  void give_up(const std::exception& error) {
    assembly_.give_up(error);
    if (here_.empty()) return;
    neighbours_.end(group_id());
    if (result_.mappings.empty()) return;
    write_failure(self().segment.header(), error.what());
    for (ShmPeer& other : result_.peers) {
      if (other.rank == options_.rank || !other.segment) continue;
      note_failure(other.segment.header(), options_.rank);
      if (other.process) other.doorbell.ring(kAllNews);
    }
  }

  // ---- other hosts

  // Every rank takes frames of this group from all others before any of them sends one.
  void meet_across() {
    Network& network = options_.network(store_.host());
    const std::string bytes =
        assembly_.exchange(network.contact().to_text(), all_, [this](auto& words) {
          std::string text;
          for (const std::string& word : words) text += word + '\n';
          assembly_.leave("contacts", text);
          return str(text.size());
        });
    Contacts contacts = take_contacts(std::stoull(bytes));
    const auto there = read_host((own_host() + 1) % roster_.hosts());
    const auto& [next, card] = *there.begin();
    if (!card.may_share_network(mine_)) {
      refuse_own(contacts.of(next).addresses, network.contact().addresses, next);
    }
    measure(contacts.of(next));
    if (result_.distance > 0) map_neighbours();  // once more, with room for what is under way
    result_.remote_ranks = std::make_unique<RemoteRanks>(options_.size);
    const RemotePeer::Ends ends{next, &self().segment.header(), pair_layout_};
    result_.remote_ranks->open(network, group_id(), std::move(contacts), ends);
    assembly_.exchange("yes", all_, [](auto&) { return std::string("all"); });
  }

  Rank first() const { return here_.begin()->first; }
  bool is_first() const { return first() == options_.rank; }

  // How far hosts are, which the first rank of each looks at. The longest way counts for all.
  void measure(const Contact& next) {
    std::vector<std::string> addresses;
    for (const Address& address : next.addresses) addresses.push_back(address.to_text());
    const std::string mine = is_first() ? str(options_.distance(addresses)) : "";
    const std::string longest = assembly_.exchange(
        mine, roster_.first_ranks(), [](auto& words) { return *std::ranges::max_element(words); });
    result_.distance = longest == "2" ? 2 : longest == "1" ? 1 : 0;
  }

  // How each rank is reached. The first rank of a host reads it, and hands it to the others.
  Contacts take_contacts(uint64_t bytes) {
    Fd memory;
    const auto parcel = [&](Rank to) { return Parcel{group_id(), first(), to, kContacts}; };
    if (is_first()) {
      const std::string text = assembly_.read("contacts");
      if (here_.size() == 1) {
        Mapping own(bytes);
        std::memcpy(own.data(), text.data(), std::min(bytes, text.size()));
        return Contacts(std::move(own), bytes, options_.size);
      }
      memory = make_sealed_memfd("ringcomm-contacts", bytes);
      std::memcpy(Mapping(memory, bytes).data(), text.data(), std::min(bytes, text.size()));
      await(mates(), [&](Rank rank) { return peer(rank).process->send(parcel(rank), memory); });
    } else {
      await({first()}, [&](Rank) {
        memory = neighbours_.take(parcel(options_.rank));
        return static_cast<bool>(memory);
      });
      check_sealed_memfd(memory, bytes, first());
    }
    return Contacts(Mapping::inherited(memory, bytes), bytes, options_.size);
  }

  const RendezvousOptions& options_;
  Neighbours& neighbours_;
  const Deadline& deadline_;
  Store& store_;
  Assembly assembly_;
  Card mine_;
  SegmentLayout layout_, pair_layout_;
  Fd segment_;
  std::vector<Rank> all_;
  Roster roster_;
  std::map<Rank, Card> here_;  // of the ranks of this host
  std::map<Rank, bool> sent_;  // this rank's memory
  int attempt_ = 0;            // to share memory
  int lists_ = 0;              // of ranks by host: new ones where hosts were not what they seemed
  std::string report_;         // of the ranks that this one cannot share memory with
  std::vector<Card> cards_;    // of all ranks: rank 0 has them
  uint64_t group_id_ = 0;      // that rank 0 gives the group
  std::string roster_text_;    // that rank 0 has made
  Roster::Apart apart_;        // the same
  std::string why_;            // two ranks that look like one host's are not
  MappedGroup result_;
};

}  // namespace

MappedGroup::~MappedGroup() {
  if (mappings.empty() || mappings[0].data() == nullptr) return;
  auto* const header = reinterpret_cast<Header*>(mappings[0].data());
  header->left.store(1, std::memory_order_seq_cst);  // partner: Transport::state()
}

MappedGroup meet(Store& store, const RendezvousOptions& options, Neighbours& neighbours,
                 const Deadline& deadline) {
  return Rendezvous(store, options, neighbours, deadline).run();
}

}  // namespace ringcomm
