// A store that no process serves: every rank keeps what it has set and what the others have. The
// ranks know how each other's process is reached, and talk over the sockets between them. Its keys
// are set once, and it serves one meeting.
//
// A rank may come before another one listens. Its words to a process of this host are kept there,
// and those to other hosts are lost. So each rank says all once more when it first hears of
// another.
#pragma once

#include "net/session.h"
#include "net/wire.h"
#include "transport/neighbours.h"
#include "transport/store.h"

namespace ringcomm {

// The way to a rank's process; neither: it is this rank.
struct Way {
  std::string socket;    // of a process of this host
  Wire* wire = nullptr;  // to one of another host
};

class SocketStore final : public Store, private Receiver {
 public:
  // `ways`: by rank. `channel`: the same on all ranks, and of no other store.
  SocketStore(Neighbours& neighbours, Rank self, const std::vector<Way>& ways, uint64_t channel);
  ~SocketStore() override;
  SocketStore(const SocketStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  bool served() override { return false; }
  bool has(const std::string& key) override;
  std::string get(const std::string& key) override { return values_.at(key); }
  int64_t add(const std::string&, int64_t amount) override { return amount; }  // the first to ask
  void say(const std::string& list, const std::string& name, const std::string& word) override {
    set(list + name, word);
  }
  int64_t said(const std::string& list) override;
  bool wait(Clock::duration most) override;
  std::optional<PeerError> died(Rank rank) override;

 private:
  struct End {  // a rank, as this one talks with it
    Rank rank = 0;
    Way way;
    Neighbours::Reached reached;  // of this host
    size_t said = 0;              // pieces
    int32_t heard = 0;
    std::string text;  // the pieces so far, joined
  };
  bool reach(End& end);
  bool say(const End& end);
  bool say();
  bool hear();
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame& frame, std::span<const std::byte> payload) override;

  Neighbours& neighbours_;
  const uint64_t channel_;
  const std::shared_ptr<Neighbour> here_;  // keeps what comes from other hosts
  const Rank self_;
  std::map<std::string, std::string> values_;
  std::vector<std::string> pieces_;  // of this rank's words
  std::vector<End> ends_;            // by rank
  Deadline next_check_;              // at a process that is silent
};

}  // namespace ringcomm
