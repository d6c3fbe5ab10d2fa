// Fuzz target: handshakes of two processes that know a key, while somebody who does not owns the
// network: he starts them, sees all they say, and delivers what he likes, to whom he likes. One who
// acts on a peer's proof must have a partner that took part, and everything both have said must
// have reached the other unchanged.
//
// Nonces are the system's, not the seed's: no property depends on their values.
#include <memory>

#include "fuzz_driver.h"
#include "net/handshake.h"

namespace ringcomm::testing {
namespace {

constexpr size_t kMostConversations = 8, kMostSteps = 100;
constexpr int kFlows = 2;

ProcessId id_of(int process) {
  ProcessId id{};
  id.fill(static_cast<uint8_t>(0xa0 + process));
  return id;
}

Key key_of(bool stranger) {
  Key key{};
  key.fill(stranger && !without("key") ? 0x13 : 0x42);
  return key;
}

// One process's side of the session; counts how often it acted on a proof.
class Cursors final : public Party {
 public:
  Cursors(bool stranger, Input& input) : key_(key_of(stranger)) {
    generation_ = input.one_of({0, 1, 7, UINT64_MAX});
    cursor_.all = input.take();
    cursor_.more[input.below(cursor_.more.size())] = input.take();
  }
  const Key& key() const override { return key_; }
  int flows() const override { return kFlows; }
  uint64_t generation(int) const override { return generation_; }
  Cursor fence(int) override {
    ++fences;
    return cursor_;
  }
  const Cursor& cursor() const { return cursor_; }

  int fences = 0;

 private:
  Key key_;
  uint64_t generation_;
  Cursor cursor_;
};

struct Conversation {
  Conversation(int process, bool stranger, Input& input)
      : process(process), stranger(stranger), cursors(stranger, input) {}

  const int process;
  const bool stranger;  // says that it is `process`, and does not know the key
  Cursors cursors;
  std::unique_ptr<Handshake> handshake;
  std::vector<Bytes> sent, got;
  bool closed = false;
};

class World {
 public:
  explicit World(Input& input) : input_(input) {}

  void run() {
    for (size_t step = 0; step < kMostSteps && !input_.empty(); ++step) {
      if (input_.below(4) == 0) {
        begin();
      } else {
        deliver();
      }
    }
  }

 private:
  void begin() {
    const auto how = input_.take();
    if (all_.size() == kMostConversations) return;
    const int process = how & 1;
    all_.push_back(std::make_unique<Conversation>(process, (how & 4) != 0, input_));
    Conversation& conversation = *all_.back();
    if ((how & 2) != 0) {
      const int flow = how >> 3 & 1;
      conversation.handshake = std::make_unique<Handshake>(id_of(process), id_of(1 - process), flow,
                                                           conversation.cursors);
      collect(conversation);
    } else {
      conversation.handshake = std::make_unique<Handshake>(id_of(process));
    }
  }

  void collect(Conversation& conversation) {
    const auto out = conversation.handshake->output();
    if (out.empty()) return;
    const auto* data = reinterpret_cast<const uint8_t*>(out.data());
    conversation.sent.emplace_back(data, data + out.size());
    said_.push_back(conversation.sent.back());
  }

  // Something that somebody said, changed perhaps, or words of his own.
  Bytes make_message(size_t wanted) {
    const auto how = input_.take();
    Bytes message(wanted);
    if (how >= 250 || said_.empty()) {
      const auto own = input_.take_bytes(wanted);
      std::copy(own.begin(), own.end(), message.begin());
      return message;
    }
    const Bytes& from = said_[input_.below(said_.size())];
    std::copy_n(from.begin(), std::min(wanted, from.size()), message.begin());
    for (int changes = how % 8 == 7 ? 1 + how / 128 : 0; changes > 0; --changes) {
      message[input_.below(wanted)] ^= input_.take();
    }
    return message;
  }

  void deliver() {
    if (all_.empty()) return;
    Conversation& conversation = *all_[input_.below(all_.size())];
    const size_t wanted = conversation.handshake->wanted();
    require(wanted <= Handshake::kMostBytes, "it wants ", wanted, " bytes");
    if (conversation.closed) return;
    const Bytes message = make_message(std::max<size_t>(wanted, 1));
    if (wanted > 0) conversation.got.push_back(message);
    try {
      conversation.handshake->take(reinterpret_cast<const std::byte*>(message.data()));
      if (conversation.got.size() == 1 && conversation.handshake->accepting())
        meet_caller(conversation);
      collect(conversation);
    } catch (const FlowError&) {
      conversation.closed = true;
      require(!conversation.handshake->done() || wanted == 0, "done, and refused");
    }
    if (!conversation.stranger) check(conversation);
  }

  static void meet_caller(Conversation& conversation) {
    if (conversation.handshake->caller() != id_of(1 - conversation.process))
      throw FlowError("unknown");
    require(conversation.handshake->flow() < most_flows(conversation.handshake->flows()),
            "a flow of none");
    if (conversation.handshake->flows() != kFlows) throw FlowError("flows");
    conversation.handshake->with(conversation.cursors);
  }

  static bool reached(const Conversation& from, const Conversation& to, size_t messages) {
    if (from.sent.size() < messages || to.got.size() < messages) return false;
    return std::equal(from.sent.begin(), from.sent.begin() + static_cast<ptrdiff_t>(messages),
                      to.got.begin());
  }

  // Initiator: Hello, Challenge, and when done Proof, Resume. Acceptor: all but Resume.
  bool has_partner(const Conversation& conversation) const {
    const bool accepting = conversation.handshake->accepting(),
               done = conversation.handshake->done();
    for (const auto& candidate : all_) {
      const Conversation& other = *candidate;
      if (other.stranger || other.process == conversation.process) continue;
      if (other.handshake->accepting() == accepting) continue;
      const size_t heard = accepting || done ? 2 : 1, told = done && !accepting ? 2 : 1;
      if (!reached(other, conversation, heard) || !reached(conversation, other, told)) continue;
      const bool same = other.handshake->flow() == conversation.handshake->flow() &&
                        other.handshake->generation() == conversation.handshake->generation();
      require(same, "both are done, with another flow or generation");
      require(!done || conversation.handshake->theirs() == other.cursors.cursor(),
              "another cursor");
      return true;
    }
    return false;
  }

  void check(const Conversation& conversation) const {
    const bool acted = conversation.cursors.fences > 0 || conversation.handshake->done();
    require(conversation.cursors.fences <= 1, "it acted twice");
    require(!acted || has_partner(conversation),
            "it acted on the word of somebody without the key");
  }

  Input& input_;
  std::vector<std::unique_ptr<Conversation>> all_;
  std::vector<Bytes> said_;
};

// ---- scripts

constexpr uint8_t kBegin = 0, kDeliver = 1, kAsItIs = 0, kChanged = 7;

Output& begin(Output& out, int process, bool initiator, bool stranger) {
  return out.add_each(kBegin, process | (initiator ? 2 : 0) | (stranger ? 4 : 0), 2, 9, 3, 1);
}

Output& deliver(Output& out, size_t to, size_t message) {
  return out.add_each(kDeliver, to, kAsItIs, message);
}

// Process 0 to process 1; `first` is the number of the first conversation and message.
Output& whole(Output& out, size_t conversation, size_t message) {
  begin(out, 0, true, false);
  begin(out, 1, false, false);
  deliver(out, conversation + 1, message);
  deliver(out, conversation, message + 1);
  deliver(out, conversation + 1, message + 2);
  return deliver(out, conversation, message + 3);
}

}  // namespace

std::vector<std::string> rules() { return {"key"}; }

std::vector<Bytes> corpus() {
  std::vector<Bytes> scripts;
  Output out;
  scripts.push_back(whole(out, 0, 0).take());
  whole(out, 0, 0);
  scripts.push_back(whole(out, 2, 4).take());  // and the words of the first ones may come again
  for (const bool initiator : {false, true}) {
    begin(out, 0, initiator, true);
    begin(out, 1, !initiator, false);
    const size_t from = initiator ? 0 : 1;
    for (size_t message = 0; message < 4; ++message) {
      deliver(out, message % 2 == 0 ? 1 - from : from, message);
    }
    scripts.push_back(out.take());
  }
  begin(out, 0, true, false);  // both connect at once
  begin(out, 1, true, false);
  begin(out, 1, false, false);
  begin(out, 0, false, false);
  deliver(deliver(out, 2, 0), 3, 1);
  deliver(deliver(out, 0, 2), 1, 3);
  scripts.push_back(deliver(deliver(out, 2, 4), 3, 5).take());
  whole(out, 0, 0);
  begin(out, 1, false, false);
  out.add_each(kDeliver, 2, kChanged, 0, 50, 1);
  scripts.push_back(out.add_each(kDeliver, 2, 255, 1, 2, 3).take());
  return scripts;
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  ringcomm::testing::Input input(data, bytes);
  ringcomm::testing::World(input).run();
  return 0;
}
