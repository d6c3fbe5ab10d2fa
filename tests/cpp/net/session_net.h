// The simulated connections of session_sim.h.
#pragma once

#include <utility>

#include "session_sim.h"

namespace ringcomm::testing {

inline size_t at(int index) { return static_cast<size_t>(index); }

inline void Pair::connect(int flow, int initiator) {
  if (pending[at(flow)] || ends[at(initiator)].connections[at(flow)]) return;
  auto connection = std::make_shared<Connection>();
  connection->initiator = initiator;
  pending[at(flow)] = connection;
}

// The next message of the handshake arrives. Each side closes its old connection of this flow
// before it says what came over it.
inline void Pair::shake_hands(int flow, Clock::time_point now) {
  const auto connection = pending[at(flow)];
  if (!connection) return;
  const int initiator = connection->initiator, acceptor = 1 - initiator;
  Session& first = ends[at(initiator)].session;
  Session& second = ends[at(acceptor)].session;
  switch (connection->phase++) {
    case 0:
      connection->generation = 1 + std::max(first.generation(flow), second.generation(flow));
      return;
    case 1:
      detach(initiator, flow);
      connection->theirs = first.cursor();
      return;
    case 2:
      detach(acceptor, flow);
      if (!second.up(flow, connection->generation, connection->theirs, now)) {
        pending[at(flow)] = nullptr;
        return;
      }
      connection->theirs = second.cursor();
      ends[at(acceptor)].connections[at(flow)] = connection;
      return;
    default:
      pending[at(flow)] = nullptr;
      if (first.up(flow, connection->generation, connection->theirs, now)) {
        ends[at(initiator)].connections[at(flow)] = connection;
      }
  }
}

inline void Pair::detach(int side, int flow) {
  End& end = ends[at(side)];
  if (auto& connection = end.connections[at(flow)]) {
    connection->to[0].cut = connection->to[1].cut = true;
    connection->to[at(side)].bytes.clear();
    connection = nullptr;
  }
  end.session.down(flow);
}

inline void Pair::close_those_it_closed(int side) {
  for (const int flow : ends[at(side)].session.take_closed()) detach(side, flow);
}

// Follows the frames that pass, so that one can be repeated where it ends.
inline void Pair::carry(Connection& connection, Pipe& pipe, const std::byte* data, size_t bytes) {
  while (bytes > 0) {
    size_t whole = sizeof(Frame);
    if (pipe.frame.size() >= whole) {
      Frame header;
      std::memcpy(&header, pipe.frame.data(), sizeof header);
      whole += header.bytes;
    }
    const size_t taken = std::min(bytes, whole - pipe.frame.size());
    pipe.frame.insert(pipe.frame.end(), data, data + taken);
    pipe.bytes.insert(pipe.bytes.end(), data, data + taken);
    data += taken;
    bytes -= taken;
    Frame header;
    if (pipe.frame.size() < sizeof header) continue;
    std::memcpy(&header, pipe.frame.data(), sizeof header);
    if (pipe.frame.size() < sizeof header + header.bytes) continue;
    if (std::exchange(connection.repeats, false)) {
      pipe.bytes.insert(pipe.bytes.end(), pipe.last.begin(), pipe.last.end());
    }
    pipe.last = std::exchange(pipe.frame, {});
  }
}

inline void Pair::repeat(int side, int flow) {
  if (const auto connection = ends[at(side)].connections[at(flow)]) connection->repeats = true;
}

inline void Pair::write(int side, int flow, Random& random) {
  End& end = ends[at(side)];
  const auto connection = end.connections[at(flow)];
  if (!connection) return;
  if (end.session.flows() > 1 && random.below(8) == 0) {  // mostly not known: all are used
    const uint64_t pace = random.below(8) == 0 ? random.below(100'000) : 0;
    end.session.pace(flow, {pace, random.below(10'000)});
  }
  std::array<iovec, 16> parts;
  const size_t count = end.session.gather(flow, parts);
  Pipe& pipe = connection->to[at(1 - side)];
  size_t room = pipe.bytes.size() > 4000 ? 0 : 1 + random.below(random.below(2) == 0 ? 100 : 6000);
  size_t written = 0;
  for (size_t i = 0; i < count && room > 0; ++i) {
    const size_t bytes = std::min(room, parts[i].iov_len);
    const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
    if (!pipe.cut) carry(*connection, pipe, data, bytes);
    written += bytes;
    room -= bytes;
  }
  end.session.wrote(flow, written);
  require(end.session.unacknowledged() <= end.window, end.session.unacknowledged(),
          " frames wait for their acknowledgement");
}

inline void Pair::read(int side, int flow, Random& random, Clock::time_point now) {
  End& end = ends[at(side)];
  const auto connection = end.connections[at(flow)];
  if (!connection || connection->to[at(side)].held > now) return;
  const bool before = end.session.parked();
  Pipe& pipe = connection->to[at(side)];
  if (pipe.bytes.empty()) {
    if (pipe.cut && !connection->silent) detach(side, flow);
    return;
  }
  size_t bytes = std::min<size_t>(pipe.bytes.size(), 1 + random.below(random.below(2) ? 5000 : 90));
  const auto take = [&](std::byte* to, size_t count) {
    std::copy_n(pipe.bytes.begin(), count, to);
    pipe.bytes.erase(pipe.bytes.begin(), pipe.bytes.begin() + static_cast<std::ptrdiff_t>(count));
  };
  try {
    if (const auto landing = end.session.landing(flow); !landing.empty() && random.below(4) != 0) {
      const size_t count = std::min(bytes, landing.size());
      take(landing.data(), count);
      end.session.landed(flow, count);
      bytes -= count;
    }
    std::vector<std::byte> rest(bytes);
    take(rest.data(), bytes);
    end.session.read(flow, rest, now);
  } catch (const FlowError&) {
    detach(side, flow);
  }
  if (!before && end.session.parked()) ++parked;
  close_those_it_closed(side);
}

// A session at rest, of which no connection is left on this side.
inline void Pair::forget(int side, bool keeps_numbers) {
  End& end = ends[at(side)];
  const auto is_there = [](const auto& connection) { return connection != nullptr; };
  if (!end.session.at_rest() || std::ranges::any_of(end.connections, is_there) ||
      std::ranges::any_of(pending, is_there)) {
    return;
  }
  end.forget(keeps_numbers);
  ++forgotten;
}

inline void Pair::tick(int side, Clock::time_point now, Clock::duration stalled) {
  ends[at(side)].session.tick(now, stalled);
  close_those_it_closed(side);
}

// Each direction keeps what was in the receiver's hands already. Sometimes nobody is told; or one
// side knows at once and the other, best in the middle of a frame, has bytes to read for long.
inline void Pair::cut(int flow, Random& random, Clock::time_point now) {
  if (pending[at(flow)] && random.below(2) == 0) {
    const auto connection = std::exchange(pending[at(flow)], nullptr);
    connection->to[0].cut = connection->to[1].cut = true;
    return;
  }
  const auto connection = ends[random.below(2)].connections[at(flow)];
  if (!connection) return;
  ++cuts;
  connection->silent = random.below(4) == 0;
  int late = random.below(4) == 0 ? static_cast<int>(random.below(2)) : -1;
  for (const int side : {0, 1}) {
    if (!ends[at(side)].session.landing(flow).empty()) late = side;
  }
  for (const int side : {0, 1}) {
    Pipe& pipe = connection->to[at(side)];
    if (!pipe.cut && side != late) pipe.bytes.resize(random.below(pipe.bytes.size() + 1));
    pipe.cut = true;
  }
  if (late < 0) return;
  connection->to[at(late)].held = now + std::chrono::milliseconds(random.below(3000));
  detach(1 - late, flow);
}

inline void Pair::corrupt(int side, int flow, Random& random) {
  const auto connection = ends[at(side)].connections[at(flow)];
  if (!connection || connection->to[at(side)].bytes.empty()) return;
  auto& bytes = connection->to[at(side)].bytes;
  bytes[random.below(bytes.size())] ^= static_cast<std::byte>(1 + random.below(255));
  ++corrupted;
}

}  // namespace ringcomm::testing
