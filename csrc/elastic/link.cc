#include "elastic/link.h"

#include <cstring>

#include "transport/host.h"

namespace ringcomm {
namespace {

constexpr int kRepeatEvery = 5;  // of the wire's questions for news, five in a second
constexpr auto kJudgeAfter = std::chrono::milliseconds(200);

}  // namespace

// ---- in shared memory

void SlipPage::write(const std::vector<std::byte>& slip) {
  const uint32_t now = version.load(std::memory_order_relaxed);
  version.store(now + 1, std::memory_order_relaxed);
  // Each of these is a release, so it comes after the odd version; and each load below an acquire.
  bytes.store(static_cast<uint32_t>(slip.size()), std::memory_order_release);
  for (size_t at = 0; at < slip.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, slip.data() + at, std::min<size_t>(8, slip.size() - at));
    words[at / 8].store(word, std::memory_order_release);
  }
  version.store(now + 2, std::memory_order_seq_cst);  // partner: has_news(), before it sleeps
}

std::optional<std::vector<std::byte>> SlipPage::read(uint32_t& seen) const {
  const uint32_t before = version.load(std::memory_order_acquire);
  if (before == seen || before % 2 != 0) return std::nullopt;
  const size_t size = std::min<size_t>(bytes.load(std::memory_order_acquire), sizeof words);
  std::vector<std::byte> slip(size);
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = words[at / 8].load(std::memory_order_acquire);
    std::memcpy(slip.data() + at, &word, std::min<size_t>(8, size - at));
  }
  if (version.load(std::memory_order_relaxed) != before) return std::nullopt;
  seen = before;
  return slip;
}

std::optional<Slip> LocalLink::read() {
  const auto bytes = page().read(seen_);
  return bytes ? slip_from(*bytes) : std::nullopt;
}

bool LocalLink::has_news() const {
  const uint32_t now = page().version.load(std::memory_order_seq_cst);
  return now != seen_ && now % 2 == 0;
}

std::string LocalLink::condition() {
  if (neighbour_->lost()) return "its process died";
  return is_stopped(neighbour_->process()) ? "stopped by a signal" : "alive";
}

// ---- as frames

RemoteLink::RemoteLink(Wire& wire, uint64_t channel) : wire_(wire), channel_(channel) {
  wire_.judge_after(kJudgeAfter);
  wire_.open(channel_, this);
}

void RemoteLink::show(const std::vector<std::byte>& slip) {
  {
    const std::lock_guard lock(mutex_);
    shown_ = slip;
  }
  const auto bytes = static_cast<uint32_t>(slip.size());
  wire_.post({.type = FrameType::kState, .channel = channel_, .bytes = bytes}, Payload(slip));
  wire_.flush();
  wire_.need();
}

std::optional<Slip> RemoteLink::read() {
  if (!news_.exchange(false, std::memory_order_seq_cst)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return slip_from(heard_);
}

Link::Fate RemoteLink::fate() {
  if (!wire_.lost()) return Fate::kAlive;
  return wire_.died() ? Fate::kDead : Fate::kSuspected;
}

void RemoteLink::deliver(const Frame&, std::span<const std::byte> payload) {
  const std::lock_guard lock(mutex_);
  heard_.assign(payload.begin(), payload.end());
  news_.store(true, std::memory_order_seq_cst);
}

std::vector<std::byte> RemoteLink::news() {
  const std::lock_guard lock(mutex_);
  if (++asked_ % kRepeatEvery != 0) return {};
  return shown_;
}

}  // namespace ringcomm
