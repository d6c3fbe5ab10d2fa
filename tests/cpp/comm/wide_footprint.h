// The costs of a rank, as the kernel counts them.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>

#include "cpp/comm/wide_board.h"

namespace ringcomm::testing {

// The number behind `word` in a file of /proc, in which each line begins with a word.
inline uint64_t number_in(const std::string& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(word)) return std::stoull(line.substr(word.size()));
  }
  return 0;
}

inline uint64_t lines_in(const std::string& file) {
  std::ifstream in(file);
  return static_cast<uint64_t>(std::count(std::istreambuf_iterator<char>(in), {}, '\n'));
}

inline bool is_connected(int descriptor) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  return ::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
         info.tcpi_state == TCP_ESTABLISHED;
}

// Counts those of all threads, except threads that have ended meanwhile.
inline uint64_t voluntary_switches() {
  uint64_t all = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    all += number_in(task.path().string() + "/status", "voluntary_ctxt_switches:");
  }
  return all;
}

inline Footprint footprint_now() {
  Footprint footprint;
  const std::string status = "/proc/self/status";
  footprint.vm_bytes = 1024 * number_in(status, "VmSize:");
  footprint.rss_bytes = 1024 * number_in(status, "VmRSS:");
  footprint.pss_bytes = 1024 * number_in("/proc/self/smaps_rollup", "Pss:");
  footprint.threads = number_in(status, "Threads:");
  footprint.mappings = lines_in("/proc/self/maps");
  std::vector<int> descriptors;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    descriptors.push_back(std::stoi(entry.path().filename()));
  }
  footprint.descriptors = descriptors.size() - 1;  // the listing's own
  footprint.connections =
      static_cast<uint64_t>(std::count_if(descriptors.begin(), descriptors.end(), is_connected));
  footprint.switches = voluntary_switches();
  return footprint;
}

}  // namespace ringcomm::testing
