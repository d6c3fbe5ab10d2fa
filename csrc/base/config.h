// Every environment variable that the library reads, in one place; ringcomm/_autoload.py warns of
// others that look like one of them. Options given in code win.
#pragma once

#include <chrono>
#include <optional>

#include "base/log.h"

namespace ringcomm {

struct Config {
  LogLevel log = LogLevel::kWarning;     // RINGCOMM_LOG=debug|info|warning|error|off
  std::optional<std::string> algorithm;  // RINGCOMM_ALGORITHM=direct|ring|tree|...
  std::chrono::microseconds spin{-1};  // RINGCOMM_SPIN_US: how long a waiting call spins; -1: fits
  std::string ifname;                  // RINGCOMM_IFNAME=eth0,10.0.0.0/8,^docker: net/address.h
  std::string ports;                   // RINGCOMM_PORTS=40000-40100: where ranks listen; any
  bool tcp = false;                    // RINGCOMM_TRANSPORT=tcp: also inside a host; auto
  int flows = 1;                       // RINGCOMM_FLOWS: connections between two processes
  std::chrono::seconds resume{30};     // RINGCOMM_RESUME_SECONDS: a lost peer is waited for
  std::string secret;                  // RINGCOMM_SECRET, or the content of RINGCOMM_SECRET_FILE
  std::string costs;                   // RINGCOMM_COSTS: a file, see comm/runtime.h
  std::string cuda_mode;               // RINGCOMM_CUDA_MODE=auto|ipc|host: see comm/device_engine.h
  uint64_t cuda_memory = 0;            // RINGCOMM_CUDA_MEMORY: bytes a rank gives a group; 0: fits
  std::string cuda_library;            // RINGCOMM_CUDA_LIBRARY: instead of the one installed
  int cuda_connections = 8;            // CUDA_DEVICE_MAX_CONNECTIONS: CUDA reads it itself
  std::string run_id;                  // TORCHELASTIC_RUN_ID
  std::string restart;                 // TORCHELASTIC_RESTART_COUNT

  // Reads the environment. Throws UsageError when a value cannot be understood.
  static Config from_environment();
};

}  // namespace ringcomm
