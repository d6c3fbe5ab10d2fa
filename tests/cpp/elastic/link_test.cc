// When a member of another host counts as dead, and when it is only suspected (elastic/link.h).
// Frames pass by hand here, and the times of refusals are given.
#include "elastic/link.h"

#include <deque>

#include "cpp/harness.h"

namespace ringcomm::testing {
namespace {

using Fate = Link::Fate;
constexpr auto kResume = std::chrono::hours(2);

class HandWire final : public Wire {
 public:
  void open(uint64_t, Receiver* receiver) override { receiver_ = receiver; }
  void close(uint64_t) override { receiver_ = nullptr; }
  void post(const Frame&, Payload payload) override { posted.push_back(std::move(payload.own)); }
  void reclaim_lent(uint64_t) override {}
  void flush() override {}
  bool reached() override { return true; }
  uint64_t undelivered() override { return posted.size(); }
  bool progress() override { return false; }
  int descriptor() const override { return -1; }
  void begin_driving() override {}
  void end_driving(bool) override {}
  void need() override {}
  bool lost() override { return is_lost; }
  std::string condition() override { return {}; }
  std::optional<Clock::time_point> refused() override { return refused_at; }
  Clock::duration resume() const override { return silence; }
  void judge_after(Clock::duration) override {}

  // The network asks for news, and brings to `other` all that was posted here.
  void tick() {
    if (auto news = receiver_->news(); !news.empty()) posted.push_back(std::move(news));
  }
  void pass_to(HandWire& other) {
    for (const auto& bytes : posted) other.receiver_->deliver({}, bytes);
    posted.clear();
  }
  void refuse(Clock::duration after) {
    is_lost = true;
    refused_at = Clock::now() + after;
  }

  std::deque<std::vector<std::byte>> posted;
  bool is_lost = false;
  std::optional<Clock::time_point> refused_at;
  Clock::duration silence = kResume;

 private:
  Receiver* receiver_ = nullptr;
};

// Two members of two hosts: what one thinks of the other.
struct Pair {
  HandWire here, there;
  RemoteLink link{here, 1}, theirs{there, 1};

  Pair() {
    link.show(to_bytes(Slip{}));
    theirs.show(to_bytes(Slip{}));
  }
  void ask_and_answer() {
    here.tick();
    here.pass_to(there);
    there.tick();
    there.pass_to(here);
  }
};

void expect(Link& link, Fate fate, const char* why) { require(link.fate() == fate, why); }

void an_early_refusal_is_a_death() {
  Pair pair;
  pair.ask_and_answer();
  pair.here.refuse(kResume / 4);
  expect(pair.link, Fate::kDead, "it answered a moment before");
}

void a_late_refusal_is_none() {
  Pair pair;
  pair.ask_and_answer();
  pair.here.refuse(kResume / 2 + std::chrono::minutes(1));
  expect(pair.link, Fate::kSuspected, "it may have given this end up");
}

void who_never_answered_is_suspected() {
  Pair pair;
  pair.here.tick();
  pair.here.pass_to(pair.there);
  pair.here.refuse({});
  expect(pair.link, Fate::kSuspected, "no answer has come");
}

// It says whom it suspects before it dies, and that is lost with it. Its answers must be older.
void who_suspects_answers_no_more() {
  Pair pair;
  pair.ask_and_answer();
  pair.there.is_lost = true;
  expect(pair.theirs, Fate::kSuspected, "nothing was heard for long");
  pair.there.is_lost = false;  // a new group is a new beginning for the wire
  pair.here.tick();
  pair.here.pass_to(pair.there);
  pair.there.tick();
  std::array<uint64_t, 2> numbers;  // its question, and its answer
  std::memcpy(numbers.data(), pair.there.posted.back().data(), sizeof numbers);
  require(numbers[1] == 1, "the answer ", numbers[1], " came from one that suspects");
  pair.theirs.begin();
  pair.here.tick();
  pair.here.pass_to(pair.there);
  pair.there.tick();
  std::memcpy(numbers.data(), pair.there.posted.back().data(), sizeof numbers);
  require(numbers[1] == 2, "no answer in the next epoch");
}

void a_lost_wire_answers_nothing() {
  Pair pair;
  pair.there.is_lost = true;  // and the member has not seen it yet
  pair.ask_and_answer();
  pair.here.refuse({});
  expect(pair.link, Fate::kSuspected, "the answer came from one that is about to suspect");
}

void who_does_not_come_is_suspected_after_a_silence() {
  Pair pair;
  pair.ask_and_answer();
  pair.link.give_up();
  expect(pair.link, Fate::kAlive, "it may count this end as dead for a while");
  pair.here.silence = Clock::duration(-1);
  expect(pair.link, Fate::kSuspected, "it was given up");
  pair.link.begin();
  expect(pair.link, Fate::kAlive, "in this epoch it was not");
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
  return run_checks({{"an early refusal is a death", an_early_refusal_is_a_death},
                     {"a late refusal is none", a_late_refusal_is_none},
                     {"who never answered", who_never_answered_is_suspected},
                     {"who suspects answers no more", who_suspects_answers_no_more},
                     {"a lost wire answers nothing", a_lost_wire_answers_nothing},
                     {"who does not come", who_does_not_come_is_suspected_after_a_silence},
                     {"slips come again", slips_come_again_and_may_be_read_again}},
                    argc, argv);
}
