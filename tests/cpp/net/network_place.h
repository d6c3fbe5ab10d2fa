// A process's network, as tests of networks have it.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpp/harness.h"
#include "net/network.h"

namespace ringcomm::testing {

struct Place {
  DoorbellPage page{};
  Network network;
  explicit Place(NetworkOptions options = {}) : network(ring(options, page)) {}
  static NetworkOptions& ring(NetworkOptions& options, DoorbellPage& page) {
    options.bell = Doorbell(&page);
    return options;
  }
};

// Knows the id of a peer, and not its key.
class Liar final : public Party {
 public:
  const Key& key() const override { return key_; }
  int flows() const override { return NetworkOptions().flows; }
  uint64_t generation(int) const override { return 0; }
  Cursor fence(int) override { return {}; }

 private:
  const Key key_ = random_key();
};

inline bool is_open(const Fd& socket) {
  std::array<std::byte, 4096> challenge;
  ssize_t got = 1;
  while (got > 0) got = ::recv(socket.get(), challenge.data(), challenge.size(), MSG_DONTWAIT);
  return got < 0 && errno == EAGAIN;
}

// Counts the frames that come, and compares them.
class Counter final : public Receiver {
 public:
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame& frame, std::span<const std::byte> payload) override {
    exact = exact && frame.stamp == came.load() + 1 && payload.size() == frame.bytes;
    for (const std::byte byte : payload)
      exact = exact && byte == static_cast<std::byte>(frame.stamp);
    ++came;
  }
  std::atomic<uint64_t> came{0};
  std::atomic<bool> exact{true};
};

// Posts the frame that a Counter expects under that number.
inline void post(Wire& wire, uint64_t channel, uint64_t number, size_t bytes) {
  std::vector<std::byte> payload(bytes, static_cast<std::byte>(number));
  wire.post({.type = FrameType::kState,
             .channel = channel,
             .stamp = number,
             .bytes = static_cast<uint32_t>(bytes)},
            Payload(std::move(payload)));
}

// Until then; a limit against hangs, not a claim.
inline void wait_until(const std::function<bool()>& ready, const std::function<std::string()>& what,
                       Clock::duration most = std::chrono::seconds(60)) {
  const Deadline deadline(most);
  while (!ready()) {
    require(!deadline.passed(), what());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace ringcomm::testing
