// Runs a fuzz target on inputs that seeds make: random bytes, and altered members of its corpus.
//
//   fuzz_NAME                        its corpus, and some seeds
//   fuzz_NAME --seeds FIRST COUNT    so many seeds; the first that fails is named
//   fuzz_NAME --without RULE COUNT [FIRST]  a rule switched off: exits 1 with the seed that fails
//   fuzz_NAME --rules                their names
//   fuzz_NAME --corpus FOLDER        writes the corpus there, for libFuzzer
//   fuzz_NAME FILE...                inputs that libFuzzer kept
#include "fuzz_driver.h"

#include <unistd.h>

#include <bit>
#include <csignal>
#include <fstream>
#include <iterator>
#include <utility>

extern "C" {
void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
// The undefined sanitizer of GCC has a callback of its own: a signal tells of it.
const char* __ubsan_default_options();
const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
}

namespace ringcomm::testing {
namespace {

constexpr uint64_t kSomeSeeds = 500;
constexpr size_t kMostBytes = 4096;

// ---- one seed, one input

uint64_t interesting(Random& random) {
  const uint64_t edge = uint64_t{1} << random.below(64);
  switch (random.below(5)) {
    case 0:
      return 0;
    case 1:
      return edge;
    case 2:
      return edge - 1;
    case 3:
      return ~uint64_t{0} - random.below(4);
    default:
      return random.below(300);
  }
}

Bytes random_bytes(Random& random) {
  Bytes bytes(random.below(random.below(4) == 0 ? kMostBytes : 256));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
  return bytes;
}

ptrdiff_t place(const Bytes& bytes, Random& random) {
  return static_cast<ptrdiff_t>(random.below(bytes.size() + 1));
}

// Puts a piece of `from` into `bytes`.
void splice(Bytes& bytes, Bytes from, Random& random) {
  const ptrdiff_t begin = place(from, random), end = place(from, random);
  bytes.insert(bytes.begin() + place(bytes, random), from.begin() + std::min(begin, end),
               from.begin() + std::max(begin, end));
}

void alter(Bytes& bytes, const std::vector<Bytes>& corpus, Random& random) {
  if (bytes.empty()) bytes = random_bytes(random);
  if (bytes.empty()) return;
  uint8_t& byte = bytes[random.below(bytes.size())];
  switch (random.below(8)) {
    case 0:
      byte ^= static_cast<uint8_t>(1 << random.below(8));
      return;
    case 1:
      byte = static_cast<uint8_t>(random.next());
      return;
    case 2:
      byte = static_cast<uint8_t>(byte + random.below(9) - 4);
      return;
    case 3: {
      const uint64_t value = interesting(random);
      const size_t at = random.below(bytes.size());
      const size_t width = size_t{1} << random.below(4);
      std::memcpy(bytes.data() + at, &value, std::min(width, bytes.size() - at));
      return;
    }
    case 4:
      bytes.resize(random.below(bytes.size()));
      return;
    case 5: {
      const auto at = static_cast<ptrdiff_t>(random.below(bytes.size()));
      const auto most = static_cast<uint64_t>(bytes.end() - (bytes.begin() + at));
      const auto length = static_cast<ptrdiff_t>(1 + random.below(std::min<uint64_t>(most, 16)));
      bytes.erase(bytes.begin() + at, bytes.begin() + at + length);
      return;
    }
    case 6:
      return splice(bytes, bytes, random);
    default:
      return splice(bytes, corpus[random.below(corpus.size())], random);
  }
}

Bytes make_input(uint64_t seed, const std::vector<Bytes>& corpus) {
  Random random(seed);
  if (random.below(8) == 0) return random_bytes(random);
  Bytes bytes = corpus[random.below(corpus.size())];
  for (uint64_t left = random.below(9); left > 0; --left) alter(bytes, corpus, random);
  bytes.resize(std::min(bytes.size(), kMostBytes));
  return bytes;
}

// ---- where the process ends in the middle of one

std::string* running = nullptr;

void name_it() {
  if (running == nullptr) return;
  const std::string& text = *std::exchange(running, nullptr);
  if (::write(STDOUT_FILENO, text.data(), text.size()) < 0) ::_exit(1);
}

void died(int signal) {
  name_it();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void watch_for_death() {
  std::signal(SIGABRT, &died);
  if (__sanitizer_set_death_callback != nullptr) return __sanitizer_set_death_callback(&name_it);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, &died);
}

void run(const std::string& name, const Bytes& input) {
  std::string last_words = "FAILED " + name + ": the process died\n";
  running = &last_words;
  try {
    LLVMFuzzerTestOneInput(input.data(), input.size());
  } catch (const std::exception& error) {
    running = nullptr;
    throw Failure(str(name, ": ", error.what()));
  }
  running = nullptr;
}

struct Seeds {
  uint64_t first, count;
};

void run_seeds(const std::string& program, const Seeds& seeds) {
  const std::vector<Bytes> from = corpus();
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    run(str("seed ", seed, " (", program, " --seeds ", seed, " 1)"), make_input(seed, from));
  }
}

// ---- the command line

int run_without(const std::string& program, const std::string& rule, const Seeds& seeds) {
  const auto known = rules();
  require(std::find(known.begin(), known.end(), rule) != known.end(), "no rule ", rule);
  switched_off = rule;
  try {
    run_seeds(program, seeds);
  } catch (const Failure& failure) {
    std::printf("caught without %s: %s\n", rule.c_str(), failure.what());
    return 1;
  }
  std::printf("%s is never missed in %lu seeds\n", rule.c_str(), seeds.count);
  return 0;
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "cannot read ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_corpus(const std::string& folder) {
  size_t number = 0;
  for (const Bytes& bytes : corpus()) {
    std::ofstream file(str(folder, "/", number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    require(file.good(), "cannot write to ", folder);
  }
}

int command(const std::string& program, const std::vector<std::string>& words) {
  const std::string first = words.empty() ? "" : words[0];
  if (first == "--without") {
    const uint64_t begin = words.size() > 3 ? std::stoull(words[3]) : 0;
    return run_without(program, words.at(1), {begin, std::stoull(words.at(2))});
  }
  if (first == "--rules") {
    for (const std::string& rule : rules()) std::printf("%s\n", rule.c_str());
  } else if (first == "--corpus") {
    write_corpus(words.at(1));
  } else if (first == "--seeds") {
    const uint64_t begin = std::stoull(words.at(1)), count = std::stoull(words.at(2));
    run_seeds(program, {begin, count});
    std::printf("ok %lu seeds from %lu\n", count, begin);
  } else if (words.empty()) {
    size_t number = 0;
    for (const Bytes& input : corpus()) run(str("corpus ", number++), input);
    std::printf("ok corpus of %lu\n", number);
    run_seeds(program, {0, kSomeSeeds});
    std::printf("ok %lu seeds\n", kSomeSeeds);
  } else {
    for (const std::string& path : words) run(path, read_file(path));
    std::printf("ok %lu files\n", words.size());
  }
  return 0;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  const std::string path = argv[0];
  ringcomm::testing::watch_for_death();
  try {
    return ringcomm::testing::command(path.substr(path.rfind('/') + 1), {argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
