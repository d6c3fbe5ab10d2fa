// The conformance suite of transports: every check runs with ranks as threads, then as processes.
#include "transport/transport.h"

#include <csignal>
#include <memory>
#include <numeric>

#include "base/stream_copy.h"
#include "cpp/harness.h"
#include "cpp/processes.h"
#include "meeting.h"
#include "transport/assembly.h"
#include "transport/host.h"

namespace ringcomm::testing {
namespace {

// Counters are monotonic per pair and lane, carry stamp and line, and make memory visible.
void signals(Store& store, Rank rank, int size) {
  End end(store, rank, size);
  Transport& t = *end.transport;
  for (uint64_t round = 1; round <= 200; ++round) {
    const int half = static_cast<int>(round % 2);
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const uint64_t word = round * 1000 + static_cast<uint64_t>(rank);
      std::memcpy(t.line(peer, rank, half), &word, sizeof word);
      std::memcpy(t.window(rank, half), &word, sizeof word);
      t.signal(peer, 0, half, word);
      t.signal(peer, 1, half, word + 1);
    }
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      await_signal(t, peer, 0, half, round);
      await_signal(t, peer, 1, half, round);
      const uint64_t want = round * 1000 + static_cast<uint64_t>(peer);
      uint64_t line = 0, window = 0;
      std::memcpy(&line, t.line(rank, peer, half), sizeof line);
      std::memcpy(&window, t.window(peer, half), sizeof window);
      require(line == want && window == want, "round ", round, ": line ", line, ", window ", window,
              ", not ", want);
      require(t.stamp(peer, 0, half) == want && t.stamp(peer, 1, half) == want + 1, "stamp");
    }
  }
}

// A byte stream keeps order and content through every wrap, and never takes more than fits.
void streams(Store& store, Rank rank, int size) {
  End end(store, rank, size);
  Transport& t = *end.transport;
  const Rank to = (rank + 1) % size, from = (rank + size - 1) % size;
  constexpr size_t kTotal = 300'000;
  Random sizes(7 + static_cast<uint64_t>(rank));
  size_t written = 0, read = 0;
  std::vector<std::byte> buffer(5000);
  require(t.stream_space(to) == kLayout.mailbox_bytes, "an empty stream has its whole space");
  while (written < kTotal || read < kTotal) {
    size_t want = std::min<size_t>(sizes.below(buffer.size()), kTotal - written);
    for (size_t i = 0; i < want; ++i) buffer[i] = static_cast<std::byte>((written + i) * 31 % 251);
    const size_t put = t.stream_write(to, buffer.data(), want);
    written += put;
    const size_t got = t.stream_read(from, buffer.data(), sizes.below(buffer.size()));
    for (size_t i = 0; i < got; ++i) {
      require(buffer[i] == static_cast<std::byte>((read + i) * 31 % 251), "byte ", read + i);
    }
    read += got;
    if (put == 0 && got == 0) {
      await(t, [&] {
        return (written < kTotal && t.stream_space(to) > 0) || t.stream_available(from) > 0 ||
               read == kTotal;
      });
    }
  }
}

// Peers see a rank's words about itself.
void board(Store& store, Rank rank, int size) {
  End end(store, rank, size);
  Transport& t = *end.transport;
  for (uint64_t sequence = 1; sequence <= 20; ++sequence) {
    Descriptor mine;
    mine.sequence = sequence;
    mine.words[0] = sequence * 10 + static_cast<uint64_t>(rank);
    t.announce(Board::kHost, mine);
    const int half = static_cast<int>(sequence % 2);
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer != rank) t.signal(peer, 0, half, sequence);
    }
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      await_signal(t, peer, 0, half, sequence);
      const auto theirs = t.descriptor(peer, Board::kHost, sequence);
      require(theirs && theirs->words[0] == sequence * 10 + static_cast<uint64_t>(peer),
              "descriptor of rank ", peer);
      require(t.state(peer, Board::kHost).called >= sequence, "called");
    }
    t.finish(Board::kHost, sequence);
  }
  require(!t.first_failed(), "nobody failed");
}

// A failure reaches every peer, asleep or not, with its text.
void failures(Store& store, Rank rank, int size) {
  End end(store, rank, size);
  Transport& t = *end.transport;
  if (rank == size - 1) {
    t.mark_failed("the disk is on fire");
    t.tell_failure();
    return;
  }
  await(t, [&] { return t.first_failed().has_value(); });
  require(*t.first_failed() == size - 1, "who failed");
  require(t.state(size - 1, Board::kHost).failed && t.failure(size - 1) == "the disk is on fire",
          "the text");
}

// Goodbye is told from the mere end of the connection.
void goodbyes(Store& store, Rank rank, int size) {
  End end(store, rank, size);
  Transport& t = *end.transport;
  if (rank == 0) {
    t.leave();
    for (Rank peer = 1; peer < size; ++peer) await_signal(t, peer, 0, 0, 1);
    return;
  }
  await(t, [&] { return t.connection_lost(0); });
  require(t.state(0, Board::kHost).left, "it said goodbye");
  t.signal(0, 0, 0, 0);
}

// SIGKILL: the peers' sockets tell, no goodbye was said, and the dead rank's memory stays readable.
void killed_rank() {
  SharedStore store;
  const int size = 3;
  const auto statuses = run_processes(size, [&](Rank rank) {
    End end(store, rank, size);
    Transport& t = *end.transport;
    if (rank == 0) {
      std::memset(t.window(0, 0), 42, 1);
      t.signal(1, 0, 0, 1);
      t.signal(2, 0, 0, 1);
      ::kill(::getpid(), SIGKILL);
    }
    await_signal(t, 0, 0, 0, 1);
    const Deadline deadline(std::chrono::seconds(1) * slack());
    while (!t.connection_lost(0)) require(!deadline.passed(), "death not seen in time");
    require(!t.state(0, Board::kHost).left, "it said no goodbye");
    require(*t.window(0, 0) == std::byte{42}, "its memory is still there");
  });
  require(WIFSIGNALED(statuses[0]) && statuses[1] == 0 && statuses[2] == 0, "statuses");
}

// A rank that dies between its card and its connections is named long before the deadline, and
// the one who notices it is not taken for dead in turn. The others came before it: it is no card of
// an earlier life.
void killed_while_meeting(int size) {
  SharedStore store;
  const auto statuses = run_processes(size, [&](Rank rank) {
    RendezvousOptions options = options_of(rank, size);
    const Deadline deadline(std::chrono::seconds(20));
    if (rank == 1) {
      while (!store.has("here")) ::usleep(1000);
      Assembly assembly(store, options, deadline);
      assembly.begin();
      options.interrupt = [] { ::kill(::getpid(), SIGKILL); };
      Card card = make_card();
      card.before = assembly.before();
      assembly.gather(card.to_text(), nullptr, nullptr);
    }
    const Deadline clock(std::chrono::hours(1));
    if (rank == 0) options.interrupt = [&] { store.set("here", "0"); };
    Process process;
    try {
      Group group(process, store, options, std::chrono::seconds(20));
    } catch (const PeerError& error) {
      require(std::string(error.what()).find("rank 1 (process") != std::string::npos, error.what());
      require(clock.elapsed_seconds() < 3 * slack(), "took ", clock.elapsed_seconds(), " s");
      return;
    }
    throw Failure("no error");
  });
  for (Rank rank = 0; rank < size; ++rank) {
    const int status = statuses[static_cast<size_t>(rank)];
    require(rank == 1 ? WIFSIGNALED(status) : status == 0, "rank ", rank, ": status ", status);
  }
}

void stream_copies() {
  std::vector<std::byte> from(1024), to(1024);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  for (size_t at = 0; at < 70; ++at) {
    for (const size_t bytes : {0, 1, 63, 64, 65, 127, 128, 200, 777}) {
      const size_t source = at * 3 % 64;
      std::ranges::fill(to, std::byte{0xee});
      stream_copy(to.data() + at, from.data() + source, bytes);
      for (size_t i = 0; i < to.size(); ++i) {
        const bool inside = i >= at && i < at + bytes;
        require(to[i] == (inside ? from[source + i - at] : std::byte{0xee}), bytes, " bytes to ",
                at, ": wrong at ", i);
      }
    }
  }
}

std::vector<Check> all_checks() {
  using Body = void (*)(Store&, Rank, int);
  const std::pair<const char*, Body> bodies[] = {{"signals", signals},
                                                 {"streams", streams},
                                                 {"board", board},
                                                 {"failures", failures},
                                                 {"goodbyes", goodbyes}};
  std::vector<Check> checks;
  for (const auto& [name, body] : bodies) {
    for (const int size : {2, 3, 5}) {
      checks.push_back({str(name, "/threads/", size), [body = body, size] {
                          LocalStore store;
                          run_threads(size, [&](Rank rank) { body(store, rank, size); });
                        }});
      checks.push_back({str(name, "/processes/", size), [body = body, size] {
                          SharedStore store;
                          require_all_zero(
                              run_processes(size, [&](Rank rank) { body(store, rank, size); }));
                        }});
    }
  }
  checks.push_back({"killed_rank/processes", killed_rank});
  checks.push_back({"stream_copies", stream_copies});
  for (const int size : {2, 3, 5}) {
    checks.push_back(
        {str("killed_while_meeting/processes/", size), [size] { killed_while_meeting(size); }});
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
