#include <linux/tcp.h>

#include "net/peers.h"

namespace ringcomm {

constexpr Clock::duration kLongestPause = std::chrono::milliseconds(700);
constexpr Clock::duration kNext = std::chrono::milliseconds(100);
constexpr auto kPaceEvery = std::chrono::microseconds(200);
constexpr auto kNewsEvery = std::chrono::milliseconds(200);
constexpr int kFewPeers = 16;
constexpr auto kIdle = std::chrono::milliseconds(100);  // longer than a rank that waits says need()
constexpr auto kDone = std::chrono::seconds(2);         // of no group: one may be made again soon
constexpr auto kAskEvery = std::chrono::seconds(1);
constexpr Clock::duration kRefusedFor = std::chrono::milliseconds(700);  // its process has ended
constexpr auto kQuietFor = std::chrono::milliseconds(2500);  // then people are told of it

namespace {
tcp_info info_of(const Fd& socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size);  // a connection always answers
  return info;
}
}  // namespace

Network::Peer::Peer(Network& network, const Contact& contact, const Key& key,
                    const SessionNumbers& numbers)
    // A peer is looked for before it is given up.
    : session(*this, most_flows(network.options_.flows),
              {.silence =
                   std::min(SessionRules().silence, Clock::duration(network.options_.resume) / 2)},
              numbers),
      links(static_cast<size_t>(session.flows())),
      contact(contact),
      network_(network),
      key_(key),
      attempts_(static_cast<size_t>(session.flows())) {
  if (flows() == 0) session.use(count_.count());
}

// ---- Wire

void Network::Peer::open(uint64_t channel, Receiver* receiver) {
  const std::lock_guard lock(mutex);
  take_from(channel, receiver);
}

void Network::Peer::take_from(uint64_t channel, Receiver* receiver) {
  channels_[channel] = receiver;
  wake();
  if (lost_.exchange(false)) wanted_since_ = {};  // a new group is a new beginning
  died_ = false;
  refused_since_ = {};
}

void Network::Peer::close(uint64_t channel) {
  const std::lock_guard lock(mutex);
  channels_.erase(channel);
  wake();
  needed_ = needed_ && !channels_.empty();
  session.release(channel);
}

uint64_t Network::Peer::undelivered() {
  const std::lock_guard lock(mutex);
  const uint64_t frames = session.posted() - session.acknowledged();
  // A peer that was given up, and is tried again, is not waited for before it answers.
  const bool silent = gave_up_at_ != Clock::time_point{} && session.last_heard() <= gave_up_at_;
  if (frames == 0 || silent) return 0;
  session.ask_for_ack();
  write_all();
  return frames;
}

std::string Network::Peer::condition() {
  const std::lock_guard lock(mutex);
  if (lost_.load(std::memory_order_relaxed)) return why_lost_;
  const bool up = std::ranges::any_of(links, std::identity());
  if (const auto limit = network_.lacking(); !up && !limit.empty()) return limit;
  const auto heard = Clock::now() - session.last_heard();
  if (session.last_heard() == Clock::time_point{}) return str("not reached yet at ", where());
  if (heard < kQuietFor) return "alive";
  if (session.parked()) return "not needed now";
  return str("not heard of for ", to_seconds(heard), " s at ", where());
}

std::string Network::Peer::where() const {
  return joined(contact.addresses, [](const Address& address) { return address.to_text(); });
}

// ---- Party and Receiver

Cursor Network::Peer::fence(int flow) {
  if (Connection* old = links[static_cast<size_t>(flow)]) network_.drop(*old);
  session.down(flow);
  return session.cursor();
}

// A channel that is not open yet may be a group's whose directory knows the receiver.
Receiver* Network::Peer::receiver_of(uint64_t channel) {
  if (const auto known = channels_.find(channel); known != channels_.end()) return known->second;
  Receiver* const receiver = network_.peers_->receiver(channel, *this);
  if (receiver != nullptr) take_from(channel, receiver);
  return receiver;
}

std::byte* Network::Peer::place(const Frame& frame) {
  used_at_ = session.last_heard();  // now
  Receiver* const receiver = receiver_of(frame.channel);
  return receiver == nullptr ? nullptr : receiver->place(frame);
}

void Network::Peer::deliver(const Frame& frame, std::span<const std::byte> payload) {
  if (frame.type != FrameType::kState) used_at_ = session.last_heard();
  try {
    if (Receiver* const receiver = receiver_of(frame.channel)) receiver->deliver(frame, payload);
  } catch (const FlowError&) {
    throw;
  } catch (const std::exception& error) {  // it counts as delivered, and will not come again
    if (lost_) return;
    give_up(str("this process could not take what came from ", where(), ": ", error.what()));
  }
}

// ---- connections

bool Network::Peer::wanted() const {
  return session.acknowledged() != session.posted() ||
         (!session.parked() &&
          (needed_ || (!channels_.empty() && session.last_heard() != Clock::time_point{})));
}

void Network::Peer::wake() {
  if (life_ != Life::kAsleep) return;
  life_ = Life::kAwake;
  network_.peers_->wake(shared_from_this());
  network_.rouse();
}

// The words that a rank says of itself now and then are no use.
bool Network::Peer::idle() { return Clock::now() - used_at_ > kIdle; }

bool Network::Peer::was_asked(Clock::time_point now) const { return now - asked_at_ < kAskEvery; }

bool Network::Peer::may_be_asked(Clock::time_point now) {
  const bool up = std::ranges::any_of(links, std::identity());
  return up && !was_asked(now) && session.at_rest() && idle();
}

bool Network::Peer::is_done(Clock::time_point now) const {
  return channels_.empty() && now - used_at_ > kDone;
}

void Network::Peer::ask_to_park(Clock::time_point now) {
  asked_at_ = now;
  session.ask_to_park();
  write_all();
}

// A connection is being made, or flows are compared. Else heartbeats are all there is to do.
bool Network::Peer::restless() const {
  const auto up = std::ssize(links) - std::ranges::count(links, nullptr);
  const bool compared = flows() == 0 && session.posted() != session.acknowledged();
  return (up == 0 && !lost_ && wanted()) || std::ssize(sockets) > up || session.used() > 1 ||
         compared;
}

void Network::Peer::write_all() {
  bool up = false;
  for (Connection*& link : links) {
    if (link == nullptr) continue;
    up = true;
    if (!link->watched_for_writing) network_.write_to(*link);
  }
  if (!up && !lost_) tick(Clock::now(), {});
}

// With several flows, tells the session how fast each one is and how much it has to do.
void Network::Peer::update_paces(Clock::time_point now) {
  if (session.used() == 1 || now - told_paces_ < kPaceEvery) return;
  told_paces_ = now;
  for (Connection* link : links) {
    if (link == nullptr) continue;
    const tcp_info info = info_of(link->socket);
    link->meter.sample(now, info.tcpi_bytes_acked, link->watched_for_writing);
    const uint64_t under_way = uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss;
    session.pace(link->flow, {link->meter.bytes_per_second(), under_way + info.tcpi_notsent_bytes});
  }
}

// Uses as many flows as bring more than fewer would: one, before the first is connected.
void Network::Peer::count_flows(Clock::time_point now) {
  if (flows() != 0) return;
  uint64_t arrived = 0;
  bool full = false;
  std::chrono::microseconds round_trip = std::chrono::minutes(1);
  const bool idle = session.posted() == session.acknowledged();  // most peers are, mostly
  for (Connection* link : links) {
    if (link == nullptr || idle) continue;
    const tcp_info info = info_of(link->socket);
    arrived += info.tcpi_bytes_acked - std::exchange(link->arrived, info.tcpi_bytes_acked);
    full = full || link->watched_for_writing || info.tcpi_notsent_bytes > 0;
    round_trip = std::min(round_trip, std::chrono::microseconds(info.tcpi_min_rtt));
  }
  count_.sample(now, arrived, full, round_trip);
  if (count_.count() == session.used()) return;
  session.use(count_.count());
  for (Connection* link : links) {
    if (link != nullptr) set_most_unsent(link->socket, session.used() > 1 ? kMostUnsent : 0);
  }
}

// Nothing is lost, but people should know.
void Network::Peer::log_changed_bytes() {
  if (std::exchange(told_changed_, true)) return;
  Logger(network_.options_.log, "")
      .warning("bytes from ", where(),
               " arrived changed, as their checksum shows, and are sent again: a network card, a "
               "cable or a switch between is broken (said once)");
}

bool Network::Peer::handshaking(int flow) const {
  return std::ranges::any_of(sockets, [&](const Connection* link) {
    return link->flow == flow && link->handshake && !link->handshake->accepting();
  });
}

void Network::Peer::tick(Clock::time_point now, Clock::duration stalled) {
  // On a slow network, a piece may take longer to wake us than silence may last. So read now.
  bool arrived = false;
  for (Connection*& link : links) {
    if (link != nullptr && link->low_water > 1) arrived = network_.read_from(*link) || arrived;
  }
  if (arrived) network_.options_.bell.notify(kAllNews);
  needed_ = needed_ && !session.parked();
  session.tick(now, stalled);
  for (const int flow : session.take_closed()) {
    if (Connection* closed = links[static_cast<size_t>(flow)]) network_.drop(*closed);
  }
  for (Connection*& link : links) {
    if (link != nullptr && link->is_worn()) network_.drop(*link);
  }
  const bool up = std::ranges::any_of(links, [](auto* link) { return link; });
  if (up) send_news(now);
  count_flows(now);
  update_paces(now);
  for (Connection*& link : links) {
    if (link != nullptr && !link->watched_for_writing && session.has_output(link->flow)) {
      network_.write_to(*link);
    }
  }
  if (lost_ || up || !wanted()) {
    wanted_since_ = {};
    if (!wanted()) refused_since_ = {};
    if (lost_ || !wanted()) return;
  } else if (wanted_since_ == Clock::time_point{}) {
    const bool ever = session.last_heard() != Clock::time_point{};
    wanted_since_ = ever ? std::max(session.last_heard(), now - session.silence()) : now;
  } else {
    wanted_since_ = std::min(wanted_since_ + stalled, now);
  }
  for (int flow = 0; flow < session.flows(); ++flow) {
    Attempts& attempts = attempts_[static_cast<size_t>(flow)];
    if (attempts.under_way > 0 || now < attempts.next) continue;
    if (links[static_cast<size_t>(flow)] ? is_away(flow) : session.needs(flow)) connect(flow, now);
  }
  if (up) return;
  if (died_) {
    return give_up(str("its process died: nobody listens any more at ", where()));
  }
  if (now - wanted_since_ <= network_.options_.resume) return;
  if (const auto limit = network_.lacking(); !limit.empty()) {
    give_up(str(limit, ", and has tried for ", to_seconds(now - wanted_since_), " s"));
  } else {
    give_up(str("no answer from ", where(), " to ", way_to(contact.addresses[0]), " for ",
                to_seconds(now - wanted_since_), " s", trouble.empty() ? "" : " (" + trouble + ")",
                ": see whether that host runs, has a route to this one, and lets these ports "
                "through (RINGCOMM_IFNAME and RINGCOMM_PORTS choose others)"));
  }
}

// Sends our state, so that a rank that waits for us can say what we do.
void Network::Peer::send_news(Clock::time_point now) {
  // Few of many peers wait for us: all together are not told more often than a few would be.
  if (now - told_news_ < kNewsEvery * (1 + network_.crowd_ / kFewPeers)) return;
  told_news_ = now;
  for (auto& [channel, receiver] : channels_) {
    auto news = receiver->news();
    if (news.empty()) continue;
    session.post({.type = FrameType::kState, .channel = channel}, Payload(std::move(news)));
  }
}

// Flows are spread over the peer's addresses. Is this one up at another than its own?
bool Network::Peer::is_away(int flow) const {
  const Connection* link = links[static_cast<size_t>(flow)];
  return session.used() > 1 && link != nullptr && link->address >= 0 &&
         link->address != flow % static_cast<int>(contact.addresses.size());
}

// Connects to all addresses at once, and takes the first to answer. If there are several flows,
// each goes to its own address first, and goes back there when it can.
void Network::Peer::connect(int flow, Clock::time_point now) {
  network_.restless_ = true;
  Attempts& attempts = attempts_[static_cast<size_t>(flow)];
  const int count = static_cast<int>(contact.addresses.size());
  const bool homeward = is_away(flow),
             only_own = homeward || (session.used() > 1 && attempts.tries % 2 == 0);
  ++attempts.tries;
  attempts.refused = 0;
  attempts.next = now + attempts.pause;
  const bool refused = refused_since_ != Clock::time_point{};  // soon it will be clear
  attempts.pause = std::min<Clock::duration>(2 * attempts.pause, refused ? kNext : kLongestPause);
  attempts.asked = attempts.under_way = only_own ? 1 : count;
  const auto& own = network_.contact_.addresses;
  for (int i = 0; i < (only_own ? 1 : count); ++i) {
    const int index = (flow + i) % count;
    const Address& address = contact.addresses[static_cast<size_t>(index)];
    if (std::ranges::find(own, address) != own.end()) {  // docker0's, say: this is us
      attempt_ended(flow, true);
      continue;
    }
    try {
      const auto link = std::make_shared<Connection>();
      link->socket = connect_tcp(address);
      set_congestion(link->socket, network_.options_.congestion);
      link->flow = flow;
      link->address = index;
      link->homeward = homeward;
      link->patience = 1 << std::min(attempts.tries - 1, 3);
      link->connecting = true;
      network_.add(link, shared_from_this());
      network_.watch(*link, true);
      network_.lacking_ = 0;
    } catch (const SystemError& error) {
      if (is_own_limit(error.code())) network_.lacks(error.code());
      attempt_ended(flow, error.code() == ECONNREFUSED);
    }
  }
}

// One attempt has ended. If a connection is up, all attempts have.
void Network::Peer::attempt_ended(int flow, bool refused) {
  Attempts& attempts = attempts_[static_cast<size_t>(flow)];
  if (links[static_cast<size_t>(flow)] != nullptr) {
    attempts = {};
    attempts.next = Clock::now() + kLongestPause;  // the next try to go home
    refused_since_ = {};
    died_ = false;
    return;
  }
  attempts.refused += refused ? 1 : 0;
  if (attempts.under_way > 0) --attempts.under_way;
  if (attempts.under_way > 0) return;
  const bool all = attempts.asked == static_cast<int>(contact.addresses.size());
  if (!all && attempts.refused > 0) return;  // ask the others
  if (attempts.refused < attempts.asked) {
    refused_since_ = {};
  } else if (refused_since_ == Clock::time_point{}) {
    refused_since_ = Clock::now();
  } else if (Clock::now() - refused_since_ > kRefusedFor) {
    died_ = true;
  }
}

void Network::Peer::give_up(const std::string& why) {
  why_lost_ = why;
  gave_up_at_ = Clock::now();
  Lock lock(network_.mutex_);
  const auto [from, to] = network_.stood_still_;  // then the peers may have given up this process
  lock.unlock();
  if (to - from > kQuietFor && Clock::now() - to < network_.options_.resume) {
    why_lost_ +=
        str("; this process itself was stopped or starved for ", to_seconds(to - from), " s");
  }
  lost_.store(true, std::memory_order_release);
  network_.options_.bell.ring(kAllNews);
}

}  // namespace ringcomm
