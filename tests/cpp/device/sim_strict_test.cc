// The simulated device is as strict as CUDA where programs hang or run out of memory: mappings that
// overlap, memory that others have mapped, calls that wait, queues that are full, and connections
// that streams share.
#include <signal.h>
#include <sys/socket.h>

#include <thread>

#include "sim_harness.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kChunk = 65'536;

// ---- memory that others have mapped -------------------------------------------------------------

void a_range_is_mapped_once() {
  Shared& shared = Shared::make();
  in_processes(2, [&](Rank rank) {
    const auto api = make_simulated_api({});
    if (rank == 0) {
      std::byte* memory = api->allocate(kBytes);
      shared.handle = api->export_memory(memory);
      shared.reach(1);
      shared.await(2);
      api->release(memory);
      require(api->allocate(kBytes) == memory, "the same address");
      shared.handle = api->export_memory(memory);
      shared.reach(3);
      shared.await(4);
      shared.handle = api->export_memory(api->allocate(kBytes));
      shared.reach(5);
      shared.await(6);
      return;
    }
    shared.await(1);
    std::byte* old = api->open_memory(shared.handle);
    shared.reach(2);
    shared.await(3);
    require_error("cudaIpcOpenMemHandle: resource already mapped",
                  [&] { api->open_memory(shared.handle); });
    api->close_memory(old);
    std::byte* again = api->open_memory(shared.handle);
    shared.reach(4);
    shared.await(5);
    require(api->open_memory(shared.handle) != again, "another range");
    shared.reach(6);
  });
}

uint64_t pages_of(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void released_memory_counts_until_it_is_closed() {
  Shared& shared = Shared::make();
  const auto statuses = run_processes(3, [&](Rank rank) {
    SimOptions options;
    options.memory_bytes = 2 * pages_of(kBytes);
    const auto api = make_simulated_api(options);
    if (rank == 0) {
      std::byte* memory = api->allocate(kBytes);
      shared.handle = api->export_memory(memory);
      shared.reach(1);
      shared.await(3);  // both have it
      api->release(memory);
      require(used_bytes(0) == pages_of(kBytes), "it is mapped elsewhere");
      api->allocate(kBytes);
      require_error("cudaMalloc: out of memory", [&] { api->allocate(kBytes); });
      shared.reach(4);
      shared.await(5);  // one has closed it
      require(used_bytes(0) == 2 * pages_of(kBytes), "the other one has it");
      ::kill(shared.pid, SIGKILL);
      const Deadline deadline(std::chrono::seconds(20));
      while (used_bytes(0) > pages_of(kBytes)) require(!deadline.passed(), "what the dead had");
      api->allocate(kBytes);
      return;
    }
    shared.await(rank);
    std::byte* memory = api->open_memory(shared.handle);
    if (rank == 2) shared.pid = ::getpid();
    shared.reach(rank + 1);
    shared.await(rank == 1 ? 4 : 6);
    api->close_memory(memory);
    shared.reach(5);
  });
  require(statuses[0] == 0 && statuses[1] == 0 && WIFSIGNALED(statuses[2]), "statuses");
}

void chunks_count_until_they_are_unmapped() {
  Shared& shared = Shared::make();
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "socketpair");
  in_processes(2, [&](Rank rank) {
    SimOptions options;
    options.chunk_bytes = kChunk;
    const auto api = make_simulated_api(options);
    const Fd socket(ends[rank]);
    if (rank == 0) {
      std::byte* memory = api->allocate(2 * kChunk);
      const auto exported = api->export_chunks(memory, kChunk, 1);
      require(exported.size() == 1, "a chunk");
      send_descriptors(socket, exported);
      shared.await(1);
      api->release(memory);
      require(used_bytes(0) == kChunk, "one of two is mapped");
      shared.reach(2);
      shared.await(3);
      require(used_bytes(0) == 0, "none is");
      return;
    }
    std::vector<Chunk> received;
    received.push_back({receive_descriptor(socket), kChunk});
    std::byte* memory = api->map_chunks(received);
    received.clear();
    shared.reach(1);
    shared.await(2);
    api->unmap_chunks(memory, kChunk);
    shared.reach(3);
  });
}

// ---- waits --------------------------------------------------------------------------------------

void calls_that_wait() {
  const std::vector<std::pair<std::string, std::function<void(Api&, Shared&)>>> calls{
      {"make_stream", [](Api& api, Shared&) { api.make_stream(); }},
      {"allocate", [](Api& api, Shared&) { api.allocate(1); }},
      {"allocate_pinned", [](Api& api, Shared&) { api.allocate_pinned(1); }},
      {"load_kernels", [](Api& api, Shared&) { api.load_kernels(); }},
      {"register_host",
       [](Api& api, Shared& shared) {
         api.register_host(reinterpret_cast<std::byte*>(&shared.handle), 8);
       }},
  };
  for (const auto& [name, call] : calls) {
    Shared& shared = Shared::make();
    in_processes(1, [&](Rank) {
      const auto api = make_simulated_api({});
      const Stream stream = api->make_stream();
      std::byte* words = register_words(*api, shared);
      api->wait_until(stream, word_at(words, 0), 1);
      await_waiting_stream();
      require_late(name, shared, [&] { call(*api, shared); });
    });
  }
}

// A launch that finds no room blocks, and with it all calls of the process.
void full_queues() {
  for (const bool elsewhere : {false, true}) {
    Shared& shared = Shared::make();
    in_processes(1, [&](Rank) {
      SimOptions options;
      options.commands = 10;
      const auto api = make_simulated_api(options);
      const Stream stream = api->make_stream();
      std::byte* words = register_words(*api, shared);
      api->wait_until(stream, word_at(words, 0), 1);
      for (uint32_t i = 1; i < 10; ++i) api->write(stream, word_at(words, 1), i);
      require(api->current_device() == 0, "there was room");
      if (!elsewhere) {
        require_late("write", shared, [&] { api->write(stream, word_at(words, 1), 10); });
      } else {
        std::thread full([&] { api->write(stream, word_at(words, 1), 10); });
        while (Process::get().driver.try_lock()) {
          Process::get().driver.unlock();
          ::usleep(100);
        }
        require_late("another call", shared, [&] { api->current_device(); });
        full.join();
      }
      api->synchronize(stream);
      require(shared.load(1) == 10, "all is done");
    });
  }
}

void shared_connections() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    SimOptions options;
    options.connections = 2;
    const auto api = make_simulated_api(options);
    std::byte* words = register_words(*api, shared);
    std::vector<Stream> streams;
    for (int i = 0; i < 3; ++i) streams.push_back(api->make_stream());
    api->wait_until(streams[0], word_at(words, 0), 1);
    for (const Stream stream : streams) api->write(stream, word_at(words, 1), 7);
    api->synchronize(streams[1]);  // it has the other connection
    require_late("a stream behind it", shared, [&] { api->synchronize(streams[2]); });
    api->synchronize(streams[0]);
  });
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"a range of another process is mapped once", a_range_is_mapped_once},
                     {"released memory counts until it is closed everywhere",
                      released_memory_counts_until_it_is_closed},
                     {"chunks count until they are unmapped", chunks_count_until_they_are_unmapped},
                     {"calls that wait behind a stream that waits", calls_that_wait},
                     {"full queues", full_queues},
                     {"connections that streams share", shared_connections}},
                    argc, argv);
}
