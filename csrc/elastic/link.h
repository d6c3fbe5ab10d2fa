// Links carry slips between two members of a world. Members of one host read them in the page of
// each other's doorbell, where they stay when a process has died. Others get them as frames.
#pragma once

#include <atomic>
#include <mutex>

#include "elastic/decree.h"
#include "net/session.h"
#include "net/wire.h"
#include "transport/socket_store.h"
#include "transport/transport.h"

namespace ringcomm {

// The latest slip of a process, in shared memory: one writer, any number of readers. A new slip
// does not touch the last one. So a process that dies while it writes leaves what it showed last.
struct SlipPage {
  struct Slot {
    std::atomic<uint64_t> bytes;
    std::atomic<uint64_t> words[kSlipBytes / 8];
  };
  std::atomic<uint32_t> version;  // its slip is in slots[version % 2]; partner: has_news()
  Slot slots[2];

  void write(const std::vector<std::byte>& slip);
  // Returns nothing if it is `seen`, or overwritten meanwhile. Otherwise sets `seen`.
  std::optional<std::vector<std::byte>> read(uint32_t& seen) const;
};
static_assert(sizeof(SlipPage) <= kNoticeBytes);

// One end of the way between two members.
class Link {
 public:
  enum class Fate : uint8_t { kAlive, kSuspected, kDead };
  virtual ~Link() = default;
  // Shows this member's slip to the other one, which wakes.
  virtual void show(const std::vector<std::byte>& slip) = 0;
  // Returns the other's latest, if it was not read before.
  virtual std::optional<Slip> read() = 0;
  virtual bool has_news() const = 0;
  // Begins an epoch, after this member has shown its slip of it. The other's latest may be of it,
  // and is read once more.
  virtual void begin() = 0;
  virtual Fate fate() = 0;
  // Tells whether this end knows that the other one has been reached in this epoch.
  virtual bool answers() = 0;
  // Suspects the other one in this epoch: it lives and does not come.
  virtual void give_up() = 0;
  virtual std::string condition() = 0;  // for people
  virtual Way way() = 0;                // to the other's process
};

class LocalLink final : public Link {
 public:
  explicit LocalLink(std::shared_ptr<Neighbour> neighbour) : neighbour_(std::move(neighbour)) {}
  void show(const std::vector<std::byte>&) override { neighbour_->bell().ring(kAllNews); }
  std::optional<Slip> read() override {
    const auto bytes = page().read(seen_);
    return bytes ? slip_from(*bytes) : std::nullopt;
  }
  bool has_news() const override { return page().version.load(std::memory_order_seq_cst) != seen_; }
  void begin() override {
    seen_ = 0;
    given_up_ = false;
  }
  Fate fate() override {
    if (neighbour_->lost()) return Fate::kDead;
    return given_up_ ? Fate::kSuspected : Fate::kAlive;
  }
  bool answers() override { return !neighbour_->lost(); }
  void give_up() override { given_up_ = true; }
  std::string condition() override {
    if (neighbour_->lost()) return "its process died";
    return is_stopped(neighbour_->process()) ? "stopped by a signal" : "alive";
  }
  Way way() override { return {neighbour_->name(), nullptr}; }

 private:
  const SlipPage& page() const { return *reinterpret_cast<const SlipPage*>(neighbour_->notice()); }
  const std::shared_ptr<Neighbour> neighbour_;
  uint32_t seen_ = 0;
  bool given_up_ = false;
};

// Frames of a channel that all epochs share, with the latest slip. It is sent again now and then,
// since the other end may have opened the channel later.
//
// Nothing that is seen from here proves that a process of another host has ended: a host that
// refuses connections may have a firewall that does. So the other end is suspected at most. If it
// is lost, this end goes on trying to reach it: even if both suspect wrongly, they may yet agree.
class RemoteLink final : public Link, private Receiver {
 public:
  RemoteLink(Wire& wire, uint64_t channel);
  ~RemoteLink() override { wire_.close(channel_); }

  void show(const std::vector<std::byte>& slip) override;
  std::optional<Slip> read() override;
  bool has_news() const override { return news_.load(std::memory_order_seq_cst); }
  void begin() override {
    suspected_ = answered_ = false;
    news_.store(true, std::memory_order_seq_cst);
  }
  Fate fate() override;
  bool answers() override;
  void give_up() override { suspected_ = true; }
  std::string condition() override { return wire_.condition(); }
  Way way() override { return {"", &wire_}; }

 private:
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame& frame, std::span<const std::byte> payload) override;
  std::vector<std::byte> news() override;

  Wire& wire_;
  const uint64_t channel_;
  std::atomic<bool> news_{false};
  bool suspected_ = false, answered_ = false;  // in this epoch
  std::mutex mutex_;                           // guards what follows
  std::vector<std::byte> shown_, heard_;
  int repeats_ = 0;
};

// A process's links to the ranks of its world, for ringcomm/elastic/agreement.py. There is none to
// the process itself, and none to guests whose group is not made yet.
class Links {
 public:
  // `run`: the same for all members, and for no other world.
  Links(Neighbours& neighbours, const std::string& run);

  // Makes the links to all ranks of that group.
  void adopt(const Transport& transport, const Decree& decree);
  // Begins an epoch with these ranks, in this order, and so many new guests behind them. The ranks
  // that are left out see the slip, too.
  void keep(const std::vector<Rank>& ranks, size_t guests, const Decree& decree);
  size_t size() const { return links_.size(); }

  // Shows this member's slip to all, if it is a new one.
  void show(const Decree& decree);
  // Tells `decree` what the others show, and what has become of them.
  void hear(Decree& decree);
  // Gives up those that are awaited: all, or those that another member has given up, so that
  // members with less patience need not wait for the others. `waited`: seconds since this one came.
  // Members that answer this one are on their way, and the other may just have been refused by a
  // firewall, so they have a second to come.
  void give_up(const Decree& decree, bool all, double waited);
  // Sleeps until there is something to hear.
  void sleep(Clock::duration most) const;
  std::string condition(Rank rank) const;  // for people
  // Returns the store through which the ranks make their group.
  std::unique_ptr<Store> store(Rank self) const;

 private:
  Neighbours& neighbours_;
  const uint64_t channel_;
  SlipPage& page_;
  const Doorbell bell_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank
  uint32_t epoch_ = 0;                        // of the slip that is shown
  std::vector<std::byte> shown_;
};

}  // namespace ringcomm
