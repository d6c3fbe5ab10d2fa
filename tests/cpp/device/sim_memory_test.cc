// Memory of the simulated device, within a process and between processes.
#include <signal.h>
#include <sys/socket.h>

#include "sim_harness.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kChunk = 65'536;

void addresses() {
  in_processes(1, [](Rank) {
    const auto api = make_simulated_api({});
    std::byte* memory = api->allocate(kBytes);
    const Allocation first = api->allocation_of(memory + kBytes / 2);
    require(first.base == memory && first.bytes == kBytes && first.ipc, "an address inside");
    require(reinterpret_cast<uintptr_t>(memory) % 256 == 0, "alignment");
    api->release(memory);
    require(!readable(memory), "what was released cannot be read");
    require(api->allocate(kBytes) == memory, "the same address");
    const Allocation second = api->allocation_of(memory);
    require(second.id != first.id && is_all(memory, kBytes, kPoison), "another allocation");

    int local = 0;
    const auto* ordinary = reinterpret_cast<const std::byte*>(&local);
    require(api->allocation_of(ordinary).bytes == 0, "no memory of the device");
    require_error("cudaFree: invalid argument", [&] { api->release(memory + 1); });
    require_error("cudaIpcGetMemHandle: invalid", [&] { api->export_memory(memory + 1); });

    SimOptions small;
    small.memory_bytes = 2 * kBytes;
    require_error("cudaMalloc: out of memory",
                  [&] { make_simulated_api(small)->allocate(kBytes + 1); });
  });
}

void mapped_host_memory() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    const auto api = make_simulated_api({});
    auto* host = reinterpret_cast<std::byte*>(shared.word);
    require_error("cuStreamWriteValue32: invalid argument", [&] { api->write(nullptr, host, 1); });
    std::byte* device = register_words(*api, shared);
    require(device != host && !readable(device), "the device's address is not the host's");
    require_error("cuStreamWriteValue32: invalid argument", [&] { api->write(nullptr, host, 1); });
    require_error("cuStreamWaitValue32: invalid argument",
                  [&] { api->wait_until(nullptr, device + sizeof shared.word, 1); });
    require_error("cudaHostRegister: part", [&] { api->register_host(host + 4, 4); });

    std::byte* pinned = api->allocate_pinned(64);
    api->write(nullptr, pinned + 4, 5);
    api->copy(nullptr, device + 4, pinned + 4, 4);
    api->synchronize(nullptr);
    require(shared.load(1) == 5, "pinned, then registered memory");
    api->unregister_host(host);
    require_error("cuStreamWriteValue32: invalid", [&] { api->write(nullptr, device, 1); });
    require_error("cudaHostUnregister: pointer", [&] { api->unregister_host(host); });
    api->release_pinned(pinned);
    require_error("cuStreamWriteValue32: invalid", [&] { api->write(nullptr, pinned, 1); });
  });
}

void ipc() {
  Shared& shared = Shared::make();
  in_processes(2, [&](Rank rank) {
    const auto api = make_simulated_api({});
    if (rank == 0) {
      std::byte* memory = api->allocate(kBytes);
      std::memset(memory, 1, kBytes);
      shared.handle = api->export_memory(memory);
      require_error("cudaIpcOpenMemHandle: invalid device context",
                    [&] { api->open_memory(shared.handle); });
      shared.reach(1);
      shared.await(2);
      require(is_all(memory, kBytes, std::byte{2}), "what the peer wrote");
      api->release(memory);
      require(api->allocate(kBytes) == memory, "the same address again");
      shared.reach(3);
      shared.await(4);
      return;
    }
    shared.await(1);
    std::byte* memory = api->open_memory(shared.handle);
    require(is_all(memory, kBytes, std::byte{1}), "what the exporter wrote");
    require(!api->allocation_of(memory).ipc, "not ours to export");
    require(api->open_memory(shared.handle) == memory, "opened once more: it is counted");
    api->close_memory(memory);
    const auto write_to = [&](std::byte* at) {
      api->each_word(nullptr, std::array{Word{at, 7, Word::kWrite64}});
    };
    require_error("cuStreamWriteValue64: invalid argument", [&] { write_to(memory); });
    std::byte* own = api->allocate(kBytes);
    write_to(own);
    api->synchronize(nullptr);
    require(own[0] == std::byte{7}, "a stream writes to memory of its own device");
    require_error("cuStreamWriteValue64: invalid argument", [&] {
      SimOptions two;
      two.devices = 2;
      const auto other = make_simulated_api(two);
      const OnDevice there(*other, 1);
      other->each_word(nullptr, std::array{Word{own, 7, Word::kWrite64}});
    });
    std::memset(memory, 2, kBytes);
    shared.reach(2);
    shared.await(3);
    require(is_all(memory, kBytes, kPoison), "poisoned when it was released");
    api->close_memory(memory);
    require(!readable(memory), "closed");
    require_error("cudaIpcCloseMemHandle: invalid", [&] { api->close_memory(memory); });
    require_error("cudaIpcOpenMemHandle: invalid resource handle",
                  [&] { api->open_memory(shared.handle); });
    shared.reach(4);
  });
}

// Torch's expandable segments do this with chunks that nobody uses.
void chunks_that_give_way() {
  in_processes(1, [](Rank) {
    for (const bool same : {false, true}) {
      SimOptions options;
      options.chunk_bytes = kChunk;
      options.same_ids = same;
      const auto api = make_simulated_api(options);
      std::byte* memory = api->allocate(3 * kChunk);
      const uint64_t first = api->id_of(memory), second = api->id_of(memory + kChunk);
      const auto exported = api->export_chunks(memory + kChunk, kChunk, 1);
      std::byte* old = api->map_chunks(exported);
      std::memset(memory, 1, 3 * kChunk);
      Process::get().memory.remap(memory + kChunk + 5, 1, same);
      require(api->id_of(memory) == first, "the chunk before stays");
      require((api->id_of(memory + kChunk) == second) == same, "the id of the new one");
      require(api->ids_change() != same, "as a trial finds out");
      require(is_all(memory, kChunk, std::byte{1}) && is_all(memory + kChunk, kChunk, kPoison),
              "new memory");
      std::memset(memory + kChunk, 2, kChunk);
      require(is_all(old, kChunk, kPoison), "who has mapped the old memory still sees that");
      api->unmap_chunks(old, kChunk);
      api->release(memory);
    }
  });
}

void a_killed_exporter() {
  Shared& shared = Shared::make();
  const auto statuses = run_processes(2, [&](Rank rank) {
    const auto api = make_simulated_api({});
    if (rank == 0) {
      shared.handle = api->export_memory(api->allocate(kBytes));
      shared.pid = ::getpid();
      shared.reach(1);
      shared.await(2);
      ::kill(::getpid(), SIGKILL);
    }
    shared.await(1);
    std::byte* memory = api->open_memory(shared.handle);
    shared.reach(2);
    const Deadline deadline(std::chrono::seconds(20));
    while (::kill(shared.pid, 0) == 0) require(!deadline.passed(), "the exporter lives");
    require(is_all(memory, kBytes, kPoison), "the mapping stays");
    api->close_memory(memory);
    require_error("cudaIpcOpenMemHandle: invalid resource handle",
                  [&] { api->open_memory(shared.handle); });
  });
  require(WIFSIGNALED(statuses[0]) && statuses[1] == 0, "statuses");
}

void chunks() {
  Shared& shared = Shared::make();
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "socketpair");
  in_processes(2, [&](Rank rank) {
    SimOptions options;
    options.chunk_bytes = kChunk;
    const auto api = make_simulated_api(options);
    const Fd socket(ends[rank]);
    constexpr uint64_t kBegin = 70'000, kLength = 100'000;
    constexpr uint64_t kOffset = kBegin - kChunk;  // in the second chunk
    if (rank == 0) {
      std::byte* memory = api->allocate(200'000);
      std::memset(memory + kBegin, 1, kLength);
      const Allocation chunk = api->allocation_of(memory + kBegin);
      require(chunk.base == memory + kChunk && chunk.bytes == kChunk && !chunk.ipc, "a chunk");
      require(chunk.id != api->allocation_of(memory).id, "each has its id");
      require_error("cudaIpcGetMemHandle: invalid", [&] { api->export_memory(memory); });
      require(api->export_chunks(memory, 5 * kChunk, 9).empty(), "more than there is");
      require(api->export_chunks(memory, 3 * kChunk, 2).empty(), "more than are wanted");
      std::byte* whole = make_simulated_api({})->allocate(kBytes);
      require(api->export_chunks(whole, kBytes, 9).empty(), "one that has no chunks");
      require(api->allocation_of(whole).id > api->allocation_of(memory + 3 * kChunk).id, "ids");

      const std::vector<Chunk> exported = api->export_chunks(memory + kBegin, kLength, 9);
      require(exported.size() == 2 && exported[1].bytes == kChunk, "the chunks");
      send_descriptors(socket, exported);
      shared.await(1);
      require(is_all(memory + kBegin, kLength, std::byte{2}), "what the peer wrote");
      return;
    }
    std::vector<Chunk> received;
    for (int i = 0; i < 2; ++i) received.push_back({receive_descriptor(socket), kChunk});
    std::byte* memory = api->map_chunks(received);
    require(is_all(memory + kOffset, kLength, std::byte{1}), "what the exporter wrote");
    std::memset(memory + kOffset, 2, kLength);
    require_error("cuMemUnmap: invalid", [&] { api->unmap_chunks(memory, kChunk); });
    api->unmap_chunks(memory, 2 * kChunk);
    require(!readable(memory), "unmapped");
    shared.reach(1);
  });
}

void tensors() {
  in_processes(1, [](Rank) {
    const auto api = make_simulated_api({});
    auto* first = static_cast<std::byte*>(ringcomm_sim_allocate(kBytes));
    auto* second = static_cast<std::byte*>(ringcomm_sim_allocate(kBytes));
    const Allocation segment = api->allocation_of(second);
    require(segment.base == first && segment.ipc, "blocks of one allocation");
    std::memset(second, 1, kBytes);
    ringcomm_sim_release(second);
    require(is_all(second, kBytes, kPoison), "released");
    require(ringcomm_sim_empty_cache() == 0, "a block is in use");
    ringcomm_sim_release(first);
    require(ringcomm_sim_allocate(kBytes) == first, "reused");
    ringcomm_sim_release(first);
    require(ringcomm_sim_empty_cache() == 1 && !readable(first), "given back");
    require(ringcomm_sim_allocate(kBytes) == first, "allocated anew");
    require(api->allocation_of(first).id != segment.id, "another allocation");
    require(ringcomm_sim_synchronize() == 0, "synchronize");
  });
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"addresses, poison, and allocation anew", addresses},
                     {"registered and pinned memory of the host", mapped_host_memory},
                     {"memory of another process", ipc},
                     {"an exporter that is killed", a_killed_exporter},
                     {"chunks", chunks},
                     {"chunks that give way to others", chunks_that_give_way},
                     {"tensors", tensors}},
                    argc, argv);
}
