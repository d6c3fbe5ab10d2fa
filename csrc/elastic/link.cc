#include "elastic/link.h"

#include "transport/host.h"

namespace ringcomm {

constexpr int kRepeatEvery = 5;  // of the wire's calls for news, five in a second
constexpr auto kJudgeAfter = std::chrono::milliseconds(200);

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
  wire_.judge_after(kJudgeAfter);
  wire_.open(channel_, this);
}

void RemoteLink::show(const std::vector<std::byte>& slip) {
  std::vector<std::byte> bytes;
  {
    const std::lock_guard lock(mutex_);
    shown_ = slip;
    bytes = frame(true);
  }
  wire_.post({.type = FrameType::kState, .channel = channel_}, Payload(std::move(bytes)));
  wire_.flush();
  wire_.need();
}

std::vector<std::byte> RemoteLink::news() {
  const std::lock_guard lock(mutex_);
  return shown_.empty() ? shown_ : frame(++repeats_ % kRepeatEvery == 0);
}

std::vector<std::byte> RemoteLink::frame(bool with_slip) {
  const std::array<uint64_t, 2> numbers{question_, answer_};
  const auto head = std::as_bytes(std::span(numbers));
  std::vector<std::byte> bytes(head.begin(), head.end());
  if (with_slip) bytes.insert(bytes.end(), shown_.begin(), shown_.end());
  return bytes;
}

void RemoteLink::deliver(const Frame&, std::span<const std::byte> payload) {
  std::array<uint64_t, 2> numbers;
  if (payload.size() < sizeof numbers) return;
  std::memcpy(numbers.data(), payload.data(), sizeof numbers);
  const std::lock_guard lock(mutex_);
  if (!silent_since_ && !wire_.lost()) answer_ = numbers[0];
  if (numbers[1] == question_) {
    alive_ = asked_;
    ++question_;
    asked_ = Clock::now();
  }
  if (payload.size() == sizeof numbers) return;
  heard_.assign(payload.begin() + sizeof numbers, payload.end());
  news_.store(true, std::memory_order_seq_cst);
}

std::optional<Slip> RemoteLink::read() {
  if (!news_.exchange(false, std::memory_order_seq_cst)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return slip_from(heard_);
}

Link::Fate RemoteLink::fate() {
  const auto resume = wire_.resume();
  const bool lost = wire_.lost();
  const auto refused = wire_.refused();
  const std::lock_guard lock(mutex_);
  if (lost && refused && alive_ && *refused - *alive_ < resume / 2) return Fate::kDead;
  if (lost && !silent_since_) silent_since_ = Clock::now();
  const bool silent = silent_since_ && Clock::now() - *silent_since_ > resume;
  return lost || silent ? Fate::kSuspected : Fate::kAlive;
}

}  // namespace ringcomm
