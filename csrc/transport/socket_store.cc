#include "transport/socket_store.h"

namespace ringcomm {

constexpr char kMore = '+', kLast = '.';  // a piece begins with one of them
constexpr size_t kPiece = Neighbours::kMostWords - 1;
constexpr Clock::duration kSlice = std::chrono::milliseconds(1);  // frames may come meanwhile
constexpr auto kLookEvery = std::chrono::milliseconds(250);       // is there a process?
constexpr auto kMostWait = std::chrono::seconds(1);               // for room in a socket

SocketStore::SocketStore(Neighbours& neighbours, Rank self, const std::vector<Way>& ways,
                         uint64_t channel)
    : neighbours_(neighbours),
      channel_(channel),
      here_(neighbours.reach(neighbours.card().socket).neighbour),
      self_(self),
      next_check_(kLookEvery) {
  for (const Way& way : ways) {
    const auto rank = static_cast<Rank>(ends_.size());
    End& end = ends_.emplace_back();
    end.rank = rank;
    end.way = way;
    if (way.wire == nullptr) continue;
    way.wire->open(channel_, this);
    way.wire->need();
  }
}

SocketStore::~SocketStore() {
  for (const End& end : ends_) {
    if (end.way.wire != nullptr) end.way.wire->close(channel_);
  }
}

// The others may need it when this rank asks no more: so it waits for room.
void SocketStore::set(const std::string& key, const std::string& value) {
  values_.emplace(key, value);
  const std::string text = str(key, '\n', value);
  for (size_t from = 0; from < text.size(); from += kPiece) {
    pieces_.push_back((from + kPiece < text.size() ? kMore : kLast) + text.substr(from, kPiece));
  }
  const Deadline deadline(kMostWait);
  while (!say() && !deadline.passed()) neighbours_.wait(kSlice, neighbours_.news());
}

bool SocketStore::has(const std::string& key) {
  wait({});
  return values_.contains(key);
}

int64_t SocketStore::said(const std::string& list) {
  wait({});
  const auto in_list = [&](const auto& value) { return value.first.starts_with(list); };
  return std::ranges::count_if(values_, in_list);
}

bool SocketStore::wait(Clock::duration most) {
  // A short pause is a slice as well, for it must sleep: a message ends it.
  neighbours_.wait(most > most.zero() ? kSlice : most, neighbours_.news());
  const bool heard = hear();
  say();
  return heard;
}

std::optional<PeerError> SocketStore::died(Rank rank) {
  End& end = ends_[static_cast<size_t>(rank)];
  auto& [neighbour, gone, apart] = end.reached;
  if (end.way.wire == nullptr && !end.way.socket.empty() && !neighbour && next_check_.passed()) {
    next_check_ = Deadline(kLookEvery);
    gone = gone || neighbours_.is_gone(end.way.socket);
  }
  std::string why;
  if (end.way.wire != nullptr && end.way.wire->lost()) why = ": " + end.way.wire->condition();
  if (gone) why = " died: leave it out of the group (see its own output)";
  if (!apart.empty()) {
    why = str(" is on this host, and ", apart, ": set RINGCOMM_TRANSPORT=tcp on every rank");
  }
  if (why.empty()) return std::nullopt;
  return PeerError(rank, str("rank ", rank, why));
}

// Can it be told something now?
bool SocketStore::reach(End& end) {
  if (end.way.wire != nullptr) return !end.way.wire->lost();
  if (end.way.socket.empty()) return false;
  if (end.reached.neighbour && !end.reached.neighbour->lost()) return true;
  end.reached = neighbours_.reach(end.way.socket);
  end.said = 0;  // it may live, and could not keep the connection
  return end.reached.neighbour != nullptr;
}

// The next piece. False: there is no room.
bool SocketStore::say(const End& end) {
  const std::string& piece = pieces_[end.said];
  if (end.way.wire == nullptr) {
    const auto number = static_cast<int32_t>(end.said);
    return end.reached.neighbour->send({channel_, self_, end.rank, number}, Fd(), piece);
  }
  const auto* const from = reinterpret_cast<const std::byte*>(piece.data());
  end.way.wire->post({.type = FrameType::kState,
                      .channel = channel_,
                      .offset = static_cast<uint64_t>(self_),
                      .stamp = end.said},
                     Payload(std::vector(from, from + piece.size())));
  end.way.wire->flush();
  return true;
}

// True when all that can be reached have been told all.
bool SocketStore::say() {
  bool all = true;
  for (End& end : ends_) {
    if (!reach(end)) continue;
    while (end.said < pieces_.size() && say(end)) ++end.said;
    all = all && end.said == pieces_.size();
  }
  return all;
}

// True when there was something.
bool SocketStore::hear() {
  bool any = false;
  for (End& end : ends_) {
    std::string piece;
    while (!(piece = neighbours_.take_words({channel_, end.rank, self_, end.heard})).empty()) {
      any = true;
      if (end.heard++ == 0) end.said = 0;
      end.text += piece.substr(1);
      if (piece[0] == kMore) continue;
      const size_t line = end.text.find('\n');
      values_.emplace(end.text.substr(0, line), end.text.substr(line + 1));
      end.text.clear();
    }
  }
  return any;
}

void SocketStore::deliver(const Frame& frame, std::span<const std::byte> payload) {
  const auto from = static_cast<Rank>(frame.offset);
  const std::string piece(reinterpret_cast<const char*>(payload.data()), payload.size());
  here_->send({channel_, from, self_, static_cast<int32_t>(frame.stamp)}, Fd(), piece);
}

}  // namespace ringcomm
