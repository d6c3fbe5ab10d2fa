// Common parts of the tests of the simulated device. Every check runs in processes of its own,
// because a process can't leave the devices that it uses to its children.
#pragma once

#include <algorithm>
#include <span>
#include <thread>

#include "cpp/processes.h"
#include "sim/api_sim.h"
#include "sim/sim_memory.h"
#include "sim/sim_process.h"
#include "transport/unix_socket.h"

namespace ringcomm::testing {

using namespace cuda;
using namespace sim;

constexpr uint64_t kBytes = 10'000;

// Memory that the processes of a check share.
struct Shared {
  alignas(64) uint32_t word[4] = {};
  std::atomic<int> step{0};
  IpcHandle handle{};
  std::atomic<pid_t> pid{0};

  static Shared& make() {
    void* at =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(at != MAP_FAILED, "mmap");
    return *new (at) Shared;
  }
  void reach(int number) { step.store(number); }
  void await(int number) const {
    const Deadline deadline(std::chrono::seconds(20));
    while (step.load() < number) {
      require(!deadline.passed(), "step ", number, " of the other process");
      ::usleep(100);
    }
  }
  uint32_t load(int i) { return std::atomic_ref(word[i]).load(); }
  void store(int i, uint32_t value) { std::atomic_ref(word[i]).store(value); }
};

inline void in_processes(int size, const std::function<void(Rank)>& body) {
  require_all_zero(run_processes(size, body));
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "nothing";
}

inline void require_error(const std::string& expected, const std::function<void()>& call) {
  const std::string error = error_of(call);
  require(error.starts_with(expected), "expected: ", expected, "; seen: ", error);
}

inline bool is_all(const std::byte* at, uint64_t bytes, std::byte value) {
  return std::all_of(at, at + bytes, [&](std::byte b) { return b == value; });
}

// Whether a byte can be read without a crash: the kernel says EFAULT instead.
inline bool readable(const std::byte* at) {
  int ends[2];
  require(::pipe(ends) == 0, "pipe");
  const Fd in(ends[0]), out(ends[1]);
  return ::write(out.get(), at, 1) == 1;
}

// Sends the descriptor of each, in a message of its own.
inline void send_descriptors(const Fd& socket, const std::vector<Chunk>& chunks) {
  const int word = 0;
  for (const Chunk& chunk : chunks) {
    require(send_message(socket, std::as_bytes(std::span(&word, 1)), chunk.descriptor), "room");
  }
}

// The descriptor of the next message.
inline Fd receive_descriptor(const Fd& socket) {
  int word = 0;
  Fd descriptor;
  Received received = Received::kNothing;
  for (const Deadline end(std::chrono::seconds(20)); received == Received::kNothing;) {
    require(!end.passed(), "nothing came");
    received = try_receive(socket, std::as_writable_bytes(std::span(&word, 1)), descriptor);
  }
  require(received == Received::kMessage && descriptor, "a message with a descriptor");
  return descriptor;
}

// A kernel that copies.
inline LeaderArgs bytes_moved(std::byte* to, const std::byte* from, uint64_t bytes = kBytes) {
  LeaderArgs args{};
  args.reduction = {.dtype = DType::kUint8, .op = ReduceOp::kBor};
  args.from = args.to = Who::kPart;
  args.parts = 1;
  args.length[0] = args.unit = bytes;
  args.own = {reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(to)};
  return args;
}

inline std::byte* register_words(Api& api, Shared& shared) {
  return api.register_host(reinterpret_cast<std::byte*>(shared.word), sizeof shared.word);
}

inline std::byte* word_at(std::byte* words, int i) { return words + i * sizeof(uint32_t); }

inline void await_waiting_stream() {
  while (!Process::get().streams.is_waiting(0)) ::usleep(100);
}

// Runs `call` while a word is 0, for which a stream waits; it has to come back after the word is 1.
inline void require_late(const std::string& what, Shared& shared,
                         const std::function<void()>& call) {
  std::atomic<bool> released{false};
  std::thread other([&] {
    ::usleep(5000);
    released = true;
    shared.store(0, 1);
  });
  call();
  require(released, what, " came back while a stream waited");
  other.join();
}

}  // namespace ringcomm::testing
