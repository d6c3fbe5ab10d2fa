// The settings of users, as typed values. The table of ringcomm/options.py has the names,
// variables, ranges and defaults: Python reads the environment, and gives these. Nothing here
// parses text.
#pragma once

#include <optional>

#include "base/log.h"

namespace ringcomm {

// The settings of one group.
struct GroupConfig {
  std::optional<std::string>
      algorithm;                   // for collectives that have it; all ranks hear of an unknown
  std::optional<int64_t> spin_us;  // a waiting call spins so long; unset: as long as it pays
  int threads = 0;                 // that copy and reduce a message together; 0: as many as fit
  std::string cuda_mode = "auto";  // or "ipc", "host": see stream/device_engine.h
  std::optional<uint64_t> cuda_memory;  // bytes a rank gives the group; unset: as many as fit
  int cuda_blocks = 16;                 // of a kernel that waits for other ranks, at most
  // Bytes of tensors, at most, that a process keeps where others can read them; unset: no limit.
  std::optional<uint64_t> shared_buffers;
  std::string trace_lines = "0";  // "1": records have the line of the program that calls
};

// Where a process listens: numbers of addresses, best first, and a range of ports, 0 for any.
struct Places {
  std::vector<std::string> addresses = {"127.0.0.1"};
  uint16_t first_port = 0, last_port = 0;
};

// The settings of the process: its first group sets them.
struct ProcessConfig {
  LogLevel log = LogLevel::kWarning;
  std::string ifname;  // "eth0,10.0.0.0/8,^docker": ringcomm/_runtime/addresses.py
  std::string ports;   // "40000-40100": where ranks listen; "": any
  // Chooses by these two, and by the host of the store. Throws UsageError.
  Places (*places)(const ProcessConfig&, const std::string& store_host) = nullptr;
  // Returns how far the host with these addresses is: 0, 1 or 2, see plan/shape.h. It may wait.
  int (*distance)(const std::vector<std::string>& addresses) = nullptr;
  std::string transport = "auto";  // "tcp": inside a host too
  int flows = 0;                   // connections between two processes; 0: as many as help
  std::string congestion;          // their control, as "bbr"; "": the kernel's choice
  int64_t resume_seconds = 30;     // a lost peer has so long to come back
  std::string secret;              // the job's; "": anyone who can read the store can connect
  std::string tls = "off";         // "on": connections are encrypted, by the secret or by these
  std::string tls_cert, tls_key, tls_ca;  // files: certificate, its key, who may sign others'
  std::string costs;                      // a file, see comm/groups.h
  // Returns that file in the words of plan/topology.h. Throws UsageError.
  std::string (*costs_text)(const std::string& file) = nullptr;
  std::string host;   // this host's name in that file; "": its hostname
  std::string trace;  // the folder of flight records; "" or "off": none
  // Opens a file of so many bytes there, for records of this rank. Returns -1 if it can't.
  int (*ring)(int rank, uint64_t bytes) = nullptr;
  std::string metrics;         // a file: Python writes it
  std::string cuda_library;    // instead of the one installed
  int cuda_connections = 8;    // CUDA_DEVICE_MAX_CONNECTIONS: CUDA reads it itself
  std::string run = "none/0";  // the launcher's name for this start of the job
};

struct Config : ProcessConfig, GroupConfig {};

}  // namespace ringcomm
