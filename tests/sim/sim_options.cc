#include "sim/sim_options.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include "base/error.h"

namespace ringcomm::sim {
namespace {

constexpr std::string_view kPrefix = "RINGCOMM_SIM_";

class Reader {
 public:
  std::string text(const std::string& name, const std::string& otherwise) {
    known_.insert(name);
    const char* value = std::getenv((std::string(kPrefix) + name).c_str());
    return value == nullptr ? otherwise : value;
  }

  template <typename Number>
  void number(const std::string& name, Number& value) {
    const std::string word = text(name, std::to_string(value));
    const char* end = word.data() + word.size();
    const auto result = std::from_chars(word.data(), end, value);
    RINGCOMM_CHECK(result.ec == std::errc() && result.ptr == end, kPrefix, name, "=", word,
                   " is no number");
  }

  void flag(const std::string& name, bool& value) {
    int number_of = value ? 1 : 0;
    number(name, number_of);
    value = number_of != 0;
  }

  // A misspelt fault would be one that never happens.
  void refuse_unknown() const {
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view line = *entry;
      if (!line.starts_with(kPrefix)) continue;
      const auto name = line.substr(kPrefix.size(), line.find('=') - kPrefix.size());
      RINGCOMM_CHECK(known_.contains(std::string(name)), "the simulated device does not know ",
                     kPrefix, name);
    }
  }

 private:
  std::set<std::string> known_;
};

Ipc ipc_of(const std::string& word) {
  if (word == "works") return Ipc::kWorks;
  if (word == "fails") return Ipc::kFails;
  RINGCOMM_CHECK(word == "lies", kPrefix, "IPC=", word, ": use works, fails or lies");
  return Ipc::kLies;
}

void read_faults(Reader& reader, SimOptions& options) {
  options.ipc = ipc_of(reader.text("IPC", "works"));
  reader.number("IPC_OPENS", options.ipc_opens);
  reader.flag("CHUNK_EXPORTS", options.chunk_exports);
  reader.flag("MEMOPS", options.memory_operations);
  reader.number("CAPTURE_FAILS", options.capture_fails);
  reader.flag("REGISTER", options.register_host);
  reader.number("SLOW_US", options.slow_us);
  reader.number("RANDOM_US", options.random_us);
  reader.number("SEED", options.seed);
  reader.number("DIES_AT", options.dies_at);
}

}  // namespace

SimOptions SimOptions::from_environment() {
  SimOptions options;
  Reader reader;
  reader.number("DEVICES", options.devices);
  reader.flag("NVLINK", options.nvlink);
  reader.number("MULTIPROCESSORS", options.multiprocessors);
  reader.number("NODE", options.node);
  reader.number("ROTATE", options.rotate);
  reader.number("MEMORY_BYTES", options.memory_bytes);
  reader.number("CHUNK_BYTES", options.chunk_bytes);
  reader.number("SEGMENT_BYTES", options.segment_bytes);
  reader.flag("SAME_IDS", options.same_ids);
  reader.number("COMMANDS", options.commands);
  if (const char* most = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) {
    options.connections = std::clamp(std::strtoul(most, nullptr, 10), 1UL, 32UL);
  }
  options.slices = reader.text("SLICES", "");
  reader.flag("STAND_INS", options.stand_ins);
  if (reader.text("DRIVER", "") == "none") {
    options.driver = 0;
  } else {
    reader.number("DRIVER", options.driver);
  }
  RINGCOMM_CHECK(options.devices >= 1 && options.rotate >= 0, kPrefix, "DEVICES=", options.devices,
                 " and ", kPrefix, "ROTATE=", options.rotate, " make no sense");
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  RINGCOMM_CHECK(options.chunk_bytes % page == 0, kPrefix, "CHUNK_BYTES=", options.chunk_bytes,
                 " is no multiple of ", page);

  const SimOptions faultless = options;
  read_faults(reader, options);
  const std::string only = reader.text("RANK", "");
  reader.refuse_unknown();
  const char* rank = std::getenv("RANK");
  return only.empty() || (rank != nullptr && only == rank) ? options : faultless;
}

}  // namespace ringcomm::sim
