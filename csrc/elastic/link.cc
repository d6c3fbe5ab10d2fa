#include "elastic/link.h"

#include "net/handshake.h"

namespace ringcomm {

constexpr double kToAnswer = 0.1, kToCome = 1.0;  // seconds
constexpr int kRepeatEvery = 5;  // calls of the wire for news, of which there are five in a second

// ---- in shared memory

void SlipPage::write(const std::vector<std::byte>& slip) {
  const uint32_t next = version.load(std::memory_order_relaxed) + 1;
  Slot& slot = slots[next % 2];
  // A reader that is late may still read here. These are releases, and its loads acquires: if it
  // sees one of them, it sees the version that came before them, too.
  slot.bytes.store(slip.size(), std::memory_order_release);
  for (size_t at = 0; at < slip.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, slip.data() + at, std::min<size_t>(8, slip.size() - at));
    slot.words[at / 8].store(word, std::memory_order_release);
  }
  version.store(next, std::memory_order_seq_cst);  // partner: has_news(), before it sleeps
}

std::optional<std::vector<std::byte>> SlipPage::read(uint32_t& seen) const {
  const uint32_t before = version.load(std::memory_order_acquire);
  if (before == seen) return std::nullopt;
  const Slot& slot = slots[before % 2];
  const size_t size = std::min<size_t>(slot.bytes.load(std::memory_order_acquire), kSlipBytes);
  std::vector<std::byte> slip(size);
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = slot.words[at / 8].load(std::memory_order_acquire);
    std::memcpy(slip.data() + at, &word, std::min<size_t>(8, size - at));
  }
  if (version.load(std::memory_order_relaxed) != before) return std::nullopt;
  seen = before;
  return slip;
}

// ---- as frames

RemoteLink::RemoteLink(Wire& wire, uint64_t channel) : wire_(wire), channel_(channel) {
  wire_.open(channel_, this);
}

void RemoteLink::show(const std::vector<std::byte>& slip) {
  {
    const std::lock_guard lock(mutex_);
    shown_ = slip;
  }
  wire_.post({.type = FrameType::kState, .channel = channel_}, Payload(std::vector(slip)));
  wire_.flush();
  wire_.need();
}

std::vector<std::byte> RemoteLink::news() {
  const std::lock_guard lock(mutex_);
  return ++repeats_ % kRepeatEvery == 0 ? shown_ : std::vector<std::byte>();
}

void RemoteLink::deliver(const Frame&, std::span<const std::byte> payload) {
  const std::lock_guard lock(mutex_);
  heard_.assign(payload.begin(), payload.end());
  news_.store(true, std::memory_order_seq_cst);
}

std::optional<Slip> RemoteLink::read() {
  if (!news_.exchange(false, std::memory_order_seq_cst)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return slip_from(heard_);
}

Link::Fate RemoteLink::fate() {
  if (wire_.lost()) {
    suspected_ = true;
    wire_.open(channel_, this);  // a new beginning for the wire
    wire_.need();
  }
  return suspected_ ? Fate::kSuspected : Fate::kAlive;
}

bool RemoteLink::answers() {
  answered_ = answered_ || wire_.undelivered() == 0;  // it has the slip
  return answered_;
}

// ---- to all ranks

Links::Links(Neighbours& neighbours, const std::string& run)
    : neighbours_(neighbours),
      channel_(channel_of({"ringcomm-elastic", run})),
      page_(*reinterpret_cast<SlipPage*>(neighbours.notice())),
      bell_(neighbours.bell()) {}

void Links::adopt(const Transport& transport, const Decree& decree) {
  links_.clear();  // a wire has one of them at a time
  links_.resize(static_cast<size_t>(transport.size()));
  for (Rank rank = 0; rank < transport.size(); ++rank) {
    auto& link = links_[static_cast<size_t>(rank)];
    if (Wire* const wire = transport.wire(rank)) {
      link = std::make_unique<RemoteLink>(*wire, channel_);
    } else if (rank != transport.rank()) {
      link = std::make_unique<LocalLink>(transport.process(rank));
    }
  }
  shown_.clear();
  show(decree);
}

void Links::keep(const std::vector<Rank>& ranks, size_t guests, const Decree& decree) {
  show(decree);
  auto others = std::exchange(links_, {});
  links_.resize(ranks.size() + guests);
  for (size_t i = 0; i < ranks.size(); ++i) {
    links_[i] = std::move(others[static_cast<size_t>(ranks[i])]);
    if (links_[i]) links_[i]->begin();
  }
}

void Links::show(const Decree& decree) {
  auto bytes = to_bytes(decree.slip());
  if (bytes == shown_) return;
  shown_ = std::move(bytes);
  epoch_ = decree.slip().epoch;
  page_.write(shown_);
  for (const auto& link : links_) {
    if (link) link->show(shown_);
  }
}

void Links::hear(Decree& decree) {
  const auto now = Clock::now();
  Members dead, suspected;
  for (size_t rank = 0; rank < static_cast<size_t>(decree.size()); ++rank) {
    if (!links_[rank]) continue;
    // A slip shown before a process's end still counts: so look at its fate first.
    const Link::Fate fate = links_[rank]->fate();
    if (const auto slip = links_[rank]->read()) decree.hear(static_cast<int>(rank), *slip, now);
    if (fate == Link::Fate::kDead) dead.set(rank);
    if (fate == Link::Fate::kSuspected) suspected.set(rank);
  }
  decree.suspect(suspected, now);
  decree.bury(dead, now);
}

void Links::give_up(const Decree& decree, bool all, double waited) {
  Members others_did;
  for (int rank = 0; rank < decree.size(); ++rank) {
    const Slip& slip = decree.heard(rank);
    if (slip.state == Slip::State::kMeeting) others_did |= slip.gone;
  }
  const Members awaited = decree.awaited();
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    if (!awaited.test(rank) || !links_[rank]) continue;
    Link& link = *links_[rank];
    const bool follows =
        others_did.test(rank) && (waited >= kToCome || (waited >= kToAnswer && !link.answers()));
    if (all || follows) link.give_up();
  }
}

void Links::sleep(Clock::duration most) const {
  const auto news = [this] {
    return std::ranges::any_of(links_, [](const auto& link) { return link && link->has_news(); });
  };
  bell_.sleep(kAllNews, news, most);
}

std::string Links::condition(Rank rank) const {
  const auto& link = links_[static_cast<size_t>(rank)];
  return link ? link->condition() : "not connected";
}

std::unique_ptr<Store> Links::store(Rank self) const {
  std::vector<Way> ways;
  for (const auto& link : links_) ways.push_back(link ? link->way() : Way{});
  const uint64_t channel = channel_of({"epoch", str(channel_), str(epoch_)});
  return std::make_unique<SocketStore>(neighbours_, self, ways, channel);
}

}  // namespace ringcomm
