// How slips pass between two members of a world. Members of one host read them in the page of each
// other's doorbell, where they stay when a process has died. Others get them as frames.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "elastic/slip.h"
#include "net/session.h"
#include "net/wire.h"
#include "transport/neighbours.h"

namespace ringcomm {

// The latest slip of a process, in shared memory: one writer, any number of readers. A reader that
// sees the same even version before and after has read one whole slip.
struct SlipPage {
  std::atomic<uint32_t> version;  // odd while the rest is being written; partner: read()
  std::atomic<uint32_t> bytes;
  std::atomic<uint64_t> words[kSlipBytes / 8 - 1];

  void write(const std::vector<std::byte>& slip);
  // Nothing, if it is `seen`, or being written. Otherwise sets `seen`.
  std::optional<std::vector<std::byte>> read(uint32_t& seen) const;
};
static_assert(sizeof(SlipPage) <= kNoticeBytes);

// One end, at one member.
class Link {
 public:
  enum class Fate : uint8_t { kAlive, kSuspected, kDead };
  virtual ~Link() = default;
  // Shows this member's slip to the other one, which wakes.
  virtual void show(const std::vector<std::byte>& slip) = 0;
  // The other's latest, if it was not read before.
  virtual std::optional<Slip> read() = 0;
  virtual bool has_news() const = 0;
  // The latest is to be read once more: it may be of an epoch that only begins here.
  virtual void read_again() = 0;
  virtual Fate fate() = 0;
  virtual std::string condition() = 0;  // for people
};

class LocalLink final : public Link {
 public:
  explicit LocalLink(std::shared_ptr<Neighbour> neighbour) : neighbour_(std::move(neighbour)) {}
  void show(const std::vector<std::byte>&) override { neighbour_->bell().ring(kAllNews); }
  std::optional<Slip> read() override;
  bool has_news() const override;
  void read_again() override { seen_ = 0; }
  Fate fate() override { return neighbour_->lost() ? Fate::kDead : Fate::kAlive; }
  std::string condition() override;

 private:
  const SlipPage& page() const { return *reinterpret_cast<const SlipPage*>(neighbour_->notice()); }
  const std::shared_ptr<Neighbour> neighbour_;
  uint32_t seen_ = 0;
};

// Frames of a channel that all epochs share. The latest slip is sent again now and then: the other
// end may have opened the channel later, and its acknowledgement shows that it lives.
class RemoteLink final : public Link, private Receiver {
 public:
  RemoteLink(Wire& wire, uint64_t channel);
  ~RemoteLink() override { wire_.close(channel_); }
  RemoteLink(const RemoteLink&) = delete;
  RemoteLink& operator=(const RemoteLink&) = delete;

  void show(const std::vector<std::byte>& slip) override;
  std::optional<Slip> read() override;
  bool has_news() const override { return news_.load(std::memory_order_seq_cst); }
  void read_again() override { news_.store(true, std::memory_order_seq_cst); }
  Fate fate() override;
  std::string condition() override { return wire_.condition(); }

 private:
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame& frame, std::span<const std::byte> payload) override;
  std::vector<std::byte> news() override;

  Wire& wire_;
  const uint64_t channel_;
  std::atomic<bool> news_{false};
  std::mutex mutex_;  // guards what follows
  std::vector<std::byte> shown_, heard_;
  int asked_ = 0;
};

}  // namespace ringcomm
