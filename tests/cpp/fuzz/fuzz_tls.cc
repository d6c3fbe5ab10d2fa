// Fuzz target: two ends of TLS that know a secret, or do not, and between them somebody who keeps,
// changes, repeats, drops and makes up bytes. An end that knows the secret gets a beginning of what
// its peer has said, or nothing: never another byte, and no byte of one that does not know it.
//
// The keys are the system's, not the seed's: no property depends on their values.
#include "cpp/net/tls_pair.h"
#include "fuzz_driver.h"

namespace ringcomm::testing {
namespace {

constexpr size_t kMostSteps = 60;

class Between {
 public:
  explicit Between(Input& input)
      : input_(input),
        stranger_(input_.below(4) == 0),
        pair_(by_secret("bees"), by_secret(stranger_ && !without("secret") ? "wasps" : "bees")) {}

  void run() {
    for (size_t step = 0; step < kMostSteps && !input_.empty(); ++step) {
      const auto side = static_cast<size_t>(input_.below(2));
      TlsEnd& end = *pair_.ends[side];
      if (input_.below(4) == 0) say(side);
      end.step();
      recorded_[side] += end.take_from_wire();
      deliver(side);
      check();
    }
  }

 private:
  void say(size_t side) {
    const auto letter = static_cast<char>('a' + said_[side].size() % 26);
    const std::string words(1 + size_t{40} * input_.take(), letter);
    said_[side] += words;
    pair_.ends[side]->unsent += words;
  }

  // Sends the other end new bytes, all or a part of them, or something else.
  void deliver(size_t from) {
    const std::string& recorded = recorded_[from];
    size_t& taken = taken_[from];
    std::string bytes = recorded.substr(taken);
    const auto how = input_.take();
    if (how % 8 < 5) {
      taken = recorded.size();
    } else if (how % 8 == 5) {
      bytes = bytes.substr(0, input_.below(1 + bytes.size()));
      taken += bytes.size();
    } else if (how % 8 == 6) {
      const std::string& any = recorded_[input_.below(2)];
      const size_t at = input_.below(1 + any.size());
      bytes = any.substr(at, size_t{8} * input_.take());
    } else {
      const auto own = input_.take_bytes(input_.take());
      bytes.assign(own.begin(), own.end());
    }
    if (how >= 240 && !bytes.empty()) {
      bytes[input_.below(bytes.size())] ^= static_cast<char>(1 + input_.below(255));
    }
    pair_.ends[1 - from]->put_on_wire(bytes);
  }

  void check() const {
    for (const size_t side : {0, 1}) {
      const std::string& got = pair_.ends[side]->got;
      require(said_[1 - side].starts_with(got), "another byte than was said");
      require(!stranger_ || got.empty(), "words of one that does not know the secret");
    }
  }

  Input& input_;
  const bool stranger_;
  TlsPair pair_;
  std::array<std::string, 2> said_, recorded_;  // by each: in clear, and on the wire
  std::array<size_t, 2> taken_{};               // of what is recorded, by the other end
};

// ---- scripts

constexpr int kWhole = 0, kPart = 5, kOld = 6, kOwn = 7, kChanged = 248;

// The ends take turns; each delivers all it has. From the fourth turn on they say something.
Output& talk(Output& out, int turns) {
  for (int turn = 0; turn < turns; ++turn) {
    for (const int side : {0, 1}) {
      turn < 3 ? out.add_each(side, 1, kWhole) : out.add_each(side, 0, 9, kWhole);
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> rules() { return {"secret"}; }

std::vector<Bytes> corpus() {
  std::vector<Bytes> scripts;
  for (const int stranger : {1, 0}) {  // 0: it is one
    Output out;
    out.add_each(stranger);
    scripts.push_back(talk(out, 8).take());
  }
  for (const int how : {kPart, kOld, kOwn, kChanged}) {
    for (const int before : {0, 2, 6}) {
      Output out;
      out.add_each(1);
      talk(out, before);
      out.add_each(0, 0, 20, how, 3, 9, 1, 2, 3);
      scripts.push_back(talk(out, 5).take());
    }
  }
  return scripts;
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  ringcomm::testing::Input input(data, bytes);
  ringcomm::testing::Between(input).run();
  return 0;
}
