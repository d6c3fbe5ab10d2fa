// Groups that are made without a store: of other ranks in place, and of some of a group's ranks.

#include "net/handshake.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/store_adapter.h"

namespace ringcomm {

constexpr const char* kBar = " | ";  // in a handle: a card, and a contact
constexpr int kShrinkAbort = 1;

// `meeting`: words that all ranks that meet have, and no others. `aborts`: as many have been.
std::shared_ptr<Communicator> Backend::gather(CommunicatorOptions wanted,
                                              const std::vector<Way>& ways,
                                              const std::vector<std::string>& meeting, int aborts,
                                              const Check& check) const {
  wanted.interrupt_meeting = [this, aborts, check] {
    run_signal_handlers();
    if (aborts_ != aborts) throw PeerError(rank(), "abort() was called");
    if (check) check();
  };
  SocketStore store(Process::get().neighbours(), wanted.rank, ways, channel_of(meeting));
  return Communicator::create(store, wanted);
}

// ---- reconfigure

Network& Backend::network() const { return Groups::get().network(StoreAdapter(store_).host()); }

std::string Backend::reconfigure_handle() const {
  return with_torch_errors([&] {
    Card card = card_;
    card.tcp = Process::get().config().transport == "tcp";
    return str(card.to_text(), kBar, network().contact().to_text());
  });
}

static std::vector<Card> cards_of(const std::vector<std::string>& handles) {
  std::vector<Card> cards;
  for (const std::string& handle : handles) {
    cards.push_back(Card::from_text(handle, static_cast<Rank>(cards.size())));
  }
  return cards;
}

// How this process reaches those of the handles.
std::vector<Way> Backend::ways_to(const std::vector<std::string>& handles, Rank self) const {
  const std::vector<Card> cards = cards_of(handles);
  require_agreement(cards);
  std::vector<Way> ways(handles.size());
  const auto own = static_cast<size_t>(self);
  for (size_t rank = 0; rank < ways.size(); ++rank) {
    if (rank == own) continue;
    if (cards[rank].shares_host(cards[own])) {
      ways[rank].socket = cards[rank].socket;
    } else {
      const std::string contact = handles[rank].substr(handles[rank].find(kBar) + 3);
      ways[rank].wire = &network().reach(Contact::from_text(contact));
    }
  }
  return ways;
}

void Backend::reconfigure_to(int64_t uuid, const std::vector<std::string>& handles,
                             std::optional<std::chrono::milliseconds> timeout, const Check& check) {
  const Lock lock(reconfigure_mutex_);
  const int aborts = aborts_;
  const auto last = group();
  GroupState& before = last->state();
  with_torch_errors([&] {
    // A handle of any of its groups: they are all of this process.
    const auto cards = cards_of(handles);
    const auto self = std::ranges::find(cards, card_.socket, &Card::socket) - cards.begin();
    const auto size = std::ssize(handles);
    RINGCOMM_CHECK(!uuids_.contains(uuid), "reconfigure: uuid ", uuid,
                   " was already used by this group: give each change one of its own");
    RINGCOMM_CHECK(self < size, "reconfigure: this rank's own handle is not among the ", size,
                   ": a rank that is left out must not call it");
    RINGCOMM_CHECK(std::set(handles.begin(), handles.end()).size() == handles.size(),
                   "reconfigure: a handle is given twice: give each rank's once");
    CommunicatorOptions wanted =
        wanted_of(*options_, {static_cast<Rank>(self), static_cast<int>(size)});
    // The name, and the ranks so far, may not be the same on all that meet here.
    wanted.meeting = "reconfigure";
    wanted.global_ranks.clear();
    wanted.timeout = checked_timeout(timeout.value_or(before.timeout()));
    const auto ways = ways_to(handles, wanted.rank);
    uuids_.insert(uuid);
    if (!before.failed()) life()->meant = true;
    if (last->progress().busy()) last->abort("reconfigure() was called");
    last->shutdown({}, false);
    std::vector<std::string> meeting = handles;
    meeting.push_back(str(uuid));
    try {
      begin_life(gather(wanted, ways, meeting, aborts, check));
    } catch (const std::exception& error) {
      revoked_ = false;
      before.fail(str("the last reconfigure() has failed: ", error.what()));
      throw;
    }
  });
  group()->state().set_timeout(before.timeout());
  revoked_ = false;
  options_->global_ranks_in_group.clear();
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  rank_ = rank();
  size_ = size();
#endif
  if (aborts_ != aborts) abort();  // it came when the ranks had met
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
// Ranks without an order stand in that of their handles' texts.
Backend::WorkPtr Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  std::vector<std::string> handles;
  std::visit([&](const auto& all) { handles.assign(all.begin(), all.end()); }, options.handles);
  if (!std::holds_alternative<std::vector<std::string>>(options.handles))
    std::ranges::sort(handles);
  without_gil([&] { reconfigure_to(options.uuid, handles, options.timeout); });
  return c10::make_intrusive<Works>(std::vector<WorkPtr>());
}
#endif

// ---- shrink

BackendPtr Backend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                           const OptionsPtr& opts) {
  const int aborts = aborts_;
  std::vector<int> ranks;
  for (Rank old = 0; old < size(); ++old) {
    if (std::ranges::count(ranks_to_exclude, old) == 0) ranks.push_back(old);
  }
  const auto self = std::ranges::find(ranks, rank()) - ranks.begin();
  const RankAndSize there{static_cast<Rank>(self), static_cast<int>(ranks.size())};
  TORCH_CHECK_VALUE(there.rank < there.size, "ringcomm::shrink: rank ", rank(),
                    " is to be left out, and must not call it");
  const auto options = options_of(ranks, opts ? opts : getBackendOptions());
  const auto larger = group();
  options->group_name = str(larger->state().name(), "-shrunk");
  const Transport& transport = larger->state().transport();
  std::vector<Way> ways;
  std::vector<std::string> meeting{str("shrink ", transport.group_id()), str(++shrinks_)};
  for (const Rank old : ranks) {
    const auto& process = transport.process(old);  // null: this rank, or on another host
    ways.push_back({process ? process->name() : "", transport.wire(old)});
    meeting.push_back(str(old));
  }
  if ((shrink_flags & kShrinkAbort) != 0) {
    if (!larger->state().failed()) life()->meant = true;
    larger->abort("it shrinks, and ends what is pending");
  }
  BackendPtr shrunk;
  without_gil([&] {
    with_torch_errors([&] {
      auto group = gather(wanted_of(*options, there), ways, meeting, aborts);
      shrunk = c10::make_intrusive<Backend>(std::move(group), there, options, store_);
    });
  });
  return shrunk;
}

}  // namespace ringcomm
