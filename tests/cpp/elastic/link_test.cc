// A member of another host is suspected at most, and its slips come (elastic/link.h). Frames pass
// by hand here.
#include "elastic/link.h"

#include <deque>

#include "cpp/harness.h"

namespace ringcomm::testing {
namespace {

using Fate = Link::Fate;

class HandWire final : public Wire {
 public:
  void open(uint64_t, Receiver* receiver) override {
    receiver_ = receiver;
    is_lost = false;  // as Network::Peer
  }
  void close(uint64_t) override { receiver_ = nullptr; }
  void post(const Frame&, Payload payload) override { posted.push_back(std::move(payload.own)); }
  void reclaim_lent(uint64_t) override {}
  void flush() override {}
  bool reached() override { return true; }
  uint64_t undelivered() override { return posted.size(); }
  void need() override { is_needed = true; }
  bool lost() override { return is_lost; }
  std::string condition() override { return {}; }

  // The network asks for news, and brings to `other` all that was posted here.
  void tick() {
    if (auto news = receiver_->news(); !news.empty()) posted.push_back(std::move(news));
  }
  void pass_to(HandWire& other) {
    for (const auto& bytes : posted) other.receiver_->deliver({}, bytes);
    posted.clear();
  }
  std::deque<std::vector<std::byte>> posted;
  bool is_lost = false, is_needed = false;

 private:
  Receiver* receiver_ = nullptr;
};

// Two members of two hosts: one's knowledge of the other.
struct Pair {
  HandWire here, there;
  RemoteLink link{here, 1}, theirs{there, 1};

  Pair() {
    link.show(to_bytes(Slip{}));
    theirs.show(to_bytes(Slip{}));
  }
};

void expect(Link& link, Fate fate, const char* why) { require(link.fate() == fate, why); }

// It was heard a moment ago, and refuses now: a firewall does that, too.
void who_is_lost_is_suspected() {
  Pair pair;
  pair.there.pass_to(pair.here);
  expect(pair.link, Fate::kAlive, "it was heard");
  pair.here.is_lost = true;
  expect(pair.link, Fate::kSuspected, "nothing proves that its process has ended");
}

void who_is_lost_is_looked_for() {
  Pair pair;
  pair.here.is_lost = true;
  pair.here.is_needed = false;
  expect(pair.link, Fate::kSuspected, "it is lost");
  require(!pair.here.is_lost && pair.here.is_needed, "the wire gives up");
  pair.there.pass_to(pair.here);
  require(pair.link.read().has_value(), "it is reached again, and not heard");
  expect(pair.link, Fate::kSuspected, "what others may have seen is not taken back");
  pair.link.begin();
  expect(pair.link, Fate::kAlive, "another epoch is a new beginning");
}

void who_does_not_come_is_suspected() {
  Pair pair;
  pair.link.give_up();
  expect(pair.link, Fate::kSuspected, "it was given up");
  pair.link.begin();
  expect(pair.link, Fate::kAlive, "in this epoch it was not");
}

// Another member's suspicion counts less where this one knows better: see Links::give_up().
void who_has_the_slip_answers() {
  Pair pair;
  require(!pair.link.answers(), "the slip is on its way");
  pair.here.pass_to(pair.there);
  require(pair.link.answers(), "it has the slip");
  pair.link.show(to_bytes(Slip{}));
  require(pair.link.answers(), "it had one in this epoch");
  pair.link.begin();
  require(!pair.link.answers(), "another epoch is a new beginning");
}

void slips_come_again_and_may_be_read_again() {
  Pair pair;
  pair.here.posted.clear();  // the first was lost: the other end had not opened the channel
  for (int i = 0; i < 5; ++i) pair.here.tick();
  pair.here.pass_to(pair.there);
  require(pair.theirs.has_news() && pair.theirs.read(), "the slip did not come again");
  require(!pair.theirs.has_news() && !pair.theirs.read(), "it was read");
  pair.theirs.begin();
  require(pair.theirs.has_news() && pair.theirs.read(), "it is of the epoch that begins");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"who is lost", who_is_lost_is_suspected},
                     {"who is lost is looked for", who_is_lost_is_looked_for},
                     {"who does not come", who_does_not_come_is_suspected},
                     {"who has the slip", who_has_the_slip_answers},
                     {"slips come again", slips_come_again_and_may_be_read_again}},
                    argc, argv);
}
