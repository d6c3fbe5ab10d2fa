#include "sim/sim_slices.h"

#include <fcntl.h>
#include <sys/file.h>

#include <atomic>
#include <map>
#include <thread>

#include "base/error.h"

namespace ringcomm::sim {
namespace {

std::atomic<uint64_t> lost{0};  // alone: it orders nothing

Fd open_lock(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CREAT | O_CLOEXEC, 0600));
  RINGCOMM_CHECK(file.get() >= 0, "the simulated device cannot open ", path);
  return file;
}

void lock(const Fd& file) {
  while (::flock(file.get(), LOCK_EX) != 0) RINGCOMM_CHECK(errno == EINTR, "flock: ", errno);
}

}  // namespace

uint64_t lost_slices() { return lost; }

Slices::Slices(const std::string& folder, int card)
    : gate_(open_lock(str(folder, "/gate", card))), card_(open_lock(str(folder, "/card", card))) {}

std::shared_ptr<Slices> Slices::of(const std::string& folder, int card) {
  if (folder.empty()) return nullptr;
  static std::mutex mutex;
  static auto* all = new std::map<int, std::shared_ptr<Slices>>;  // threads outlive main()
  const std::lock_guard hold(mutex);
  auto& slices = (*all)[card];
  if (!slices) slices = std::make_shared<Slices>(folder, card);
  return slices;
}

void Slices::begin() {
  const std::lock_guard hold(mutex_);
  if (running_ == 0) acquire();
  ++running_;
}

void Slices::end() {
  const std::lock_guard hold(mutex_);
  if (--running_ > 0) return;
  ::flock(card_.get(), LOCK_UN);
  if (paused_ > 0) take_next();
}

void Slices::pause() {
  std::unique_lock hold(mutex_);
  if (std::chrono::steady_clock::now() - since_ < kSlice || !others_wait()) {
    hold.unlock();
    std::this_thread::yield();
    return;
  }
  --running_, ++paused_;
  if (running_ > 0) {
    resumed_.wait(hold, [&, before = slice_] { return slice_ != before; });
    return;
  }
  ++lost;
  ::flock(card_.get(), LOCK_UN);
  take_next();
}

bool Slices::others_wait() const {
  if (::flock(gate_.get(), LOCK_EX | LOCK_NB) != 0) return true;
  ::flock(gate_.get(), LOCK_UN);
  return false;
}

void Slices::acquire() {
  lock(gate_);
  lock(card_);
  ::flock(gate_.get(), LOCK_UN);
  since_ = std::chrono::steady_clock::now();
}

void Slices::take_next() {
  acquire();
  running_ += std::exchange(paused_, 0);
  ++slice_;
  resumed_.notify_all();
}

}  // namespace ringcomm::sim
