// Streams, kernels, devices and faults of the simulated device are as its table says
// (tests/sim/sim_options.h).
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "sim/sim_slices.h"
#include "sim_harness.h"

namespace ringcomm::testing {
namespace {

// ---- streams ------------------------------------------------------------------------------------

void streams() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    SimOptions options;
    options.random_us = 200;
    const auto api = make_simulated_api(options);
    std::byte* words = register_words(*api, shared);
    const Stream held = api->make_stream(), free = api->make_stream();
    std::vector<std::byte*> at(20);
    for (auto& memory : at) memory = api->allocate(kBytes);
    require(is_all(at[0], kBytes, kPoison), "new memory is poisoned");

    api->wait_until(held, word_at(words, 0), 1);
    for (size_t i = 1; i < at.size(); ++i) api->copy(held, at[i], at[i - 1], kBytes);
    api->write(held, word_at(words, 3), 1);
    api->write(free, word_at(words, 1), 7);
    api->synchronize(free);
    require(shared.load(1) == 7, "a stream that waits holds up no other");
    std::memset(at[0], 1, kBytes);
    shared.store(0, 1);
    while (shared.load(3) != 1) ::usleep(100);  // words alone order what this thread and streams do
    require(is_all(at.back(), kBytes, std::byte{1}), "copies one after the other");

    api->wait_until(nullptr, word_at(words, 2), 1);
    api->copy(nullptr, at[1], at[2], kBytes);
    shared.store(2, 1);
    api->synchronize(nullptr);
    api->destroy_stream(free);
    require_error("cudaStreamSynchronize: invalid resource handle",
                  [&] { api->synchronize(free); });
  });
}

void events() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    SimOptions options;
    options.random_us = 300;
    const auto api = make_simulated_api(options);
    std::byte* words = register_words(*api, shared);
    const Stream first = api->make_stream(), second = api->make_stream();
    const Event event = api->make_event();
    api->wait(second, event);  // not recorded yet: nothing to wait for
    api->synchronize(second);
    std::byte* memory = api->allocate(3 * kBytes);
    for (int i = 1; i <= 50; ++i) {
      std::memset(memory, i, kBytes);
      api->wait_until(first, word_at(words, 0), static_cast<uint32_t>(i));
      api->copy(first, memory + kBytes, memory, kBytes);
      api->record(event, first);
      api->wait(second, event);
      api->record(event, first);  // earlier waits do not wait for this
      api->copy(second, memory + 2 * kBytes, memory + kBytes, kBytes);
      shared.store(0, static_cast<uint32_t>(i));
      api->synchronize(second);
      require(is_all(memory + 2 * kBytes, kBytes, static_cast<std::byte>(i)), "round ", i);
    }
    api->destroy_event(event);
    require_error("cudaStreamWaitEvent: invalid resource handle", [&] { api->wait(first, event); });
  });
}

void waiting_between_processes() {
  Shared& shared = Shared::make();
  constexpr uint32_t kBegin = 0xffffffff - 50;  // wraps
  shared.store(0, kBegin);
  shared.store(1, kBegin);
  in_processes(2, [&](Rank rank) {
    const auto api = make_simulated_api({});
    std::byte* words = register_words(*api, shared);
    const Stream stream = api->make_stream();
    for (uint32_t i = 1; i <= 100; ++i) {
      if (rank == 0) api->write(stream, word_at(words, 0), kBegin + i);
      api->wait_until(stream, word_at(words, 1 - rank), kBegin + i);
      if (rank == 1) api->write(stream, word_at(words, 1), kBegin + i);
    }
    api->synchronize(stream);
    require(shared.load(1 - rank) == kBegin + 100, "rank ", rank, " went on too soon");
  });
}

void exit_with_a_blocked_stream() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    const auto api = make_simulated_api({});
    const Stream stream = api->make_stream();
    std::byte *to = api->allocate(kBytes), *from = api->allocate(kBytes);
    api->wait_until(stream, word_at(register_words(*api, shared), 0), 1);
    api->copy(stream, to, from, kBytes);
    api->destroy_stream(stream);
    std::exit(0);
  });
}

// Calls that unmap memory wait for all streams, also for destroyed ones; so does loading.
void implicit_waits() {
  Shared& shared = Shared::make();
  in_processes(1, [&](Rank) {
    const auto api = make_simulated_api({});
    std::byte* words = register_words(*api, shared);
    std::byte* at = api->allocate(1);
    const LeaderArgs move = bytes_moved(at, at, 1);
    const std::vector<std::function<void()>> calls{
        [&] { api->launch(nullptr, move); },
        [&, memory = api->allocate(1)] { api->release(memory); },
        [&, memory = api->allocate_pinned(1)] { api->release_pinned(memory); },
        [&] { api->unregister_host(reinterpret_cast<std::byte*>(shared.word)); },
    };
    uint32_t round = 0;
    for (const auto& call : calls) {
      const Stream stream = api->make_stream();
      api->wait_until(stream, word_at(words, 0), ++round);
      for (int i = 0; i < 100; ++i) api->write(stream, word_at(words, 1), round - 1);
      api->write(stream, word_at(words, 1), round);
      api->destroy_stream(stream);
      shared.store(0, round);
      call();
      require(shared.load(1) == round, "call ", round, " came back too soon");
    }
  });
}

void a_forked_child() {
  in_processes(1, [](Rank) {
    const auto api = make_simulated_api({});
    require(api->unusable().empty(), "usable");
    const Stream stream = api->make_stream();
    std::byte* memory = api->allocate(kBytes);
    void* tensor = ringcomm_sim_allocate(kBytes);
    api->copy(stream, memory, memory + 1, 1);
    const Fd file(::memfd_create("kept", MFD_CLOEXEC));
    require(::ftruncate(file.get(), kBytes) == 0, "no memory");
    const Mapping kept(file, kBytes);
    in_processes(1, [&](Rank) {
      require_error("cudaMemcpyAsync: initialization error",
                    [&] { api->copy(stream, memory, memory + 1, 1); });
      require(make_simulated_api({})->unusable() == "cudaGetDeviceCount: initialization error",
              "what CUDA says");
      // qemu ignores MADV_DONTFORK, so there a child has all that its parent had.
      require(!readable(memory) || readable(kept.data()), "the parent's memory");
      ringcomm_sim_release(tensor);
      require(ringcomm_sim_allocate(1) == nullptr, "the parent's device");
    });
    api->synchronize(stream);
  });
}

// ---- kernels ------------------------------------------------------------------------------------

void kernels() {
  in_processes(1, [](Rank) {
    const auto api = make_simulated_api({});
    api->load_kernels();
    auto* values = reinterpret_cast<int32_t*>(api->allocate_pinned(4 * sizeof(int32_t)));
    for (int i = 0; i < 4; ++i) values[i] = i + 1;
    int32_t total = 0;
    auto* host = reinterpret_cast<std::byte*>(&total);
    const auto registered_total =
        reinterpret_cast<uint64_t>(api->register_host(host, sizeof total));

    // The slots are filled in when the launch is long enqueued.
    auto* slots = reinterpret_cast<LeaderSlot*>(api->allocate(4 * sizeof(LeaderSlot)));
    std::byte* word = api->allocate_pinned(8);
    std::memset(word, 0, 8);
    LeaderArgs leader{};
    leader.reduction.dtype = DType::kInt32;
    leader.call = leader.parts = 1;
    leader.length[0] = leader.unit = sizeof(int32_t);
    leader.n_ranks = 4;
    leader.abort = reinterpret_cast<uint32_t*>(word + 4);
    const auto address = [&](int i) { return reinterpret_cast<uint64_t>(values + i); };
    leader.own = {address(0), registered_total};
    for (int i = 0; i < 4; ++i) leader.slot[i] = slots + i;
    api->wait_until(nullptr, word, 1);
    api->launch(nullptr, leader);
    for (int i = 1; i < 4; ++i) slots[i] = {address(i), address(i), 0, 1};
    std::atomic_ref(*reinterpret_cast<uint32_t*>(word)).store(1);
    api->synchronize(nullptr);
    require(total == 10 && values[0] == 1 && values[1] == 10 && values[3] == 10, "leader");

    const uint32_t elsewhere = 0;
    const uint32_t* const registered = std::exchange(leader.abort, &elsewhere);
    require_error("cudaLaunchKernel: invalid argument", [&] { api->launch(nullptr, leader); });
    leader.abort = registered;
    slots[2] = {0, 0, 0, 1};
    std::atomic_ref(*reinterpret_cast<uint32_t*>(word + 4)).store(1);  // slots are not looked at
    api->launch(nullptr, leader);
    api->synchronize(nullptr);
    std::atomic_ref(*reinterpret_cast<uint32_t*>(word + 4)).store(0);
    api->launch(nullptr, leader);
    require_error("cudaStreamSynchronize: an illegal memory access",
                  [&] { api->synchronize(nullptr); });
    require_error("cudaMalloc: an illegal memory access", [&] { api->allocate(1); });
  });
}

// ---- devices and faults -------------------------------------------------------------------------

void devices() {
  in_processes(1, [](Rank) {
    SimOptions options;
    options.devices = 3;
    const auto api = make_simulated_api(options);
    options.rotate = 1;
    const auto rotated = make_simulated_api(options);
    require(api->facts(1).uuid != api->facts(0).uuid, "each has its own");
    require(rotated->facts(0).uuid == api->facts(1).uuid, "rotated");
    require(rotated->facts(2).uuid == api->facts(0).uuid, "rotated around");

    const Stream stream = api->make_stream();
    api->use_device(2);
    std::thread([&] { require(api->current_device() == 0, "each thread has its own"); }).join();
    require(api->current_device() == 2, "device 2");
    require_error("cudaLaunchKernel: invalid resource", [&] { api->launch(stream, LeaderArgs{}); });
    require_error("cudaEventRecord: invalid resource",
                  [&] { api->record(api->make_event(), stream); });
    require_error("cudaSetDevice: invalid device ordinal", [&] { api->use_device(3); });
    require_error("cudaGetDeviceProperties: invalid device", [&] { api->facts(-1); });
  });
}

void from_environment() {
  in_processes(1, [](Rank) {
    ::setenv("RINGCOMM_SIM_DEVICES", "4", 1);
    ::setenv("RINGCOMM_SIM_CHUNK_BYTES", "65536", 1);
    ::setenv("RINGCOMM_SIM_IPC", "lies", 1);
    ::setenv("RINGCOMM_SIM_MEMOPS", "0", 1);
    ::setenv("RINGCOMM_SIM_DRIVER", "none", 1);
    SimOptions options = SimOptions::from_environment();
    require(options.devices == 4 && options.chunk_bytes == 65536 && options.driver == 0, "facts");
    require(options.ipc == Ipc::kLies && !options.memory_operations, "faults");
    ::setenv("RINGCOMM_SIM_RANK", "3", 1);
    ::setenv("RANK", "3", 1);
    require(SimOptions::from_environment().ipc == Ipc::kLies, "this rank");
    ::setenv("RANK", "2", 1);
    options = SimOptions::from_environment();
    require(options.ipc == Ipc::kWorks && options.memory_operations, "another rank");
    require(options.devices == 4 && options.driver == 0, "what is the same for all");
    const auto refused = [](const char* name, const char* value) {
      ::setenv(name, value, 1);
      try {
        SimOptions::from_environment();
      } catch (const UsageError& error) {
        ::unsetenv(name);
        return std::string(error.what()).find(name) != std::string::npos;
      }
      return false;
    };
    require(refused("RINGCOMM_SIM_IPC", "maybe"), "a word");
    require(refused("RINGCOMM_SIM_SEED", "1x"), "a number");
    require(refused("RINGCOMM_SIM_CHUNK_BYTES", "1000"), "part of a page");
    require(refused("RINGCOMM_SIM_SLOWUS", "1"), "an unknown name");
  });
}

// ---- time slices --------------------------------------------------------------------------------

// Two kernels of a process wait for one of another process: they lose a slice, both at once. They
// go on when it has ended, and it loses none.
void slices() {
  std::string folder = std::filesystem::temp_directory_path() / "ringcomm-test-XXXXXX";
  require(::mkdtemp(folder.data()) != nullptr, "no temporary folder");
  Shared& shared = Shared::make();
  const auto kernel = [&](const std::function<void(Slices&)>& body) {
    const Slice slice(Slices::of(folder, 0));
    body(*Slices::of(folder, 0));
  };
  const auto waits = [&](int number) {
    kernel([&](Slices& device) {
      shared.store(number, 1);
      while (shared.load(3) == 0) device.pause();
    });
  };
  in_processes(2, [&](Rank rank) {
    if (rank == 0) {
      std::jthread first([&] { waits(0); }), second([&] { waits(1); });
      first.join(), second.join();
      require(lost_slices() > 0, "a kernel that waited lost nothing");
    } else {
      while (shared.load(0) == 0 || shared.load(1) == 0) ::usleep(100);
      kernel([&](Slices&) { shared.store(3, 1); });
      require(lost_slices() == 0, "a kernel that waited for nobody lost a slice");
    }
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"streams run in order, and beside one another", streams},
                     {"events across streams", events},
                     {"streams of two processes wait for one another", waiting_between_processes},
                     {"exit with a blocked stream", exit_with_a_blocked_stream},
                     {"loading and unmapping wait for the device", implicit_waits},
                     {"a forked child gets errors", a_forked_child},
                     {"kernels with addresses of the device", kernels},
                     {"several devices", devices},
                     {"processes take turns", slices},
                     {"options from the environment", from_environment}},
                    argc, argv);
}
