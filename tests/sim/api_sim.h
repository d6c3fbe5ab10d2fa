// A device simulated by threads of the host, for tests of ringcomm where there is no GPU: all that
// processes do with one, and what may go wrong (sim_options.h). It is strict where CUDA hangs or
// breaks at random: what waits for the device on some machines does so always, and addresses that
// the device cannot use are errors.
//
// A program that loads this as a library allocates its tensors by the functions at the end, and
// makes tensors of them (torch.frombuffer): such memory can be exported, other tensors' cannot.
#pragma once

#include <cstdint>
#include <memory>

#include "device/api.h"
#include "sim/sim_options.h"

namespace ringcomm::sim {

// Makes a table of one process's devices: all its tables share memory, streams and errors.
std::unique_ptr<cuda::Api> make_simulated_api(const SimOptions& options);
// Counts the bytes of a device that this process has allocated, those included that it has released
// and others have mapped.
uint64_t used_bytes(int card);
uint64_t copies();  // that were enqueued or captured
uint64_t copied();  // that are over
uint64_t pinned_bytes();

}  // namespace ringcomm::sim

extern "C" {

// Memory of device 0 out of segments, as torch allocates it: a block mostly begins inside of an
// allocation. Null when there is none.
void* ringcomm_sim_allocate(uint64_t bytes);
// Poisoned, and kept for the next one. Null, or in a forked child: nothing.
void ringcomm_sim_release(void* block);
// Releases the segments that have no block, and returns how many those were.
uint64_t ringcomm_sim_empty_cache();
uint64_t ringcomm_sim_used();         // used_bytes() of device 0
uint64_t ringcomm_sim_copies();       // copies()
uint64_t ringcomm_sim_copied();       // copied()
uint64_t ringcomm_sim_asked();        // calls of the driver's that asked about memory
uint64_t ringcomm_sim_lost_slices();  // lost_slices()
// The memory of a block, of chunks, gives way to other memory at the same addresses.
void ringcomm_sim_remap(void* block, uint64_t bytes);
uint64_t ringcomm_sim_pinned();  // pinned_bytes()
int ringcomm_sim_pinned_node();  // SimMemory::pinned_node()
// Waits for all that was enqueued on the default stream. 0, or 1 after an error.
int ringcomm_sim_synchronize();

// Graphs, by CUDA's rules (sim_graphs.h). Streams are those of the table of functions, on the
// calling thread's device. 0, or 1 after an error; ringcomm_sim_graph_error() says which.
// `mode` is a cudaStreamCaptureMode: 0 is global, 1 thread_local, 2 relaxed.
int ringcomm_sim_begin_capture(void* stream, int mode);
// The graph; null after an error, as when the capture was invalidated.
void* ringcomm_sim_end_capture(void* stream);
int ringcomm_sim_is_capturing(void* stream);  // 1 also when the capture was invalidated, else 0
int ringcomm_sim_launch_graph(void* graph, void* stream);
void ringcomm_sim_destroy_graph(void* graph);
// The calling thread's last error: "cudaStreamEndCapture: capturing stream has unjoined work".
const char* ringcomm_sim_graph_error();
}
