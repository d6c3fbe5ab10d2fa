#include "sim/sim_streams.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace ringcomm::sim {

uint64_t SimStream::enqueue(Operation operation) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(operation));
  if (!running_) {
    running_ = true;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  }
  changed_.notify_all();
  return ++enqueued_;
}

void SimStream::work() {
  sigset_t all;
  ::sigfillset(&all);  // signals are for the program's own threads
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    operation(done_ + 1);  // only this thread changes done_
    operation = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void SimStream::wait_for(uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

void SimStream::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&, number = enqueued_] { return done_ >= number; });
}

void SimStream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

Stream SimStreams::make(int device) {
  const std::lock_guard lock(mutex_);
  auto stream = std::make_shared<SimStream>(next_id_++, device);
  all_.remove_if([](const auto& old) { return old.expired(); });
  all_.push_back(stream);
  return open_.emplace(stream.get(), std::move(stream)).first->first;
}

void SimStreams::destroy(Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(stream);
  if (found == open_.end()) throw DeviceError("cudaStreamDestroy: invalid resource handle");
  found->second->close();
  open_.erase(found);
}

std::shared_ptr<SimStream> SimStreams::find(const char* call, Stream stream, int device) {
  const std::lock_guard lock(mutex_);
  if (stream == nullptr) {
    auto& made = default_[device];
    if (!made) all_.push_back(made = std::make_shared<SimStream>(next_id_++, device));
    return made;
  }
  const auto found = open_.find(stream);
  if (found == open_.end()) throw DeviceError(str(call, ": invalid resource handle"));
  return found->second;
}

void SimStreams::drain(int device) {
  std::vector<std::shared_ptr<SimStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& weak : all_) {
      auto stream = weak.lock();
      if (stream && stream->device == device) streams.push_back(std::move(stream));
    }
  }
  for (const auto& stream : streams) stream->wait_for_all();
}

Event SimStreams::make_event(int device) {
  const std::lock_guard lock(mutex_);
  auto event = std::make_unique<Recorded>(Recorded{device, nullptr, 0});
  return events_.emplace(event.get(), std::move(event)).first->first;
}

void SimStreams::destroy_event(Event event) {
  const std::lock_guard lock(mutex_);
  recorded("cudaEventDestroy", event);
  events_.erase(event);
}

SimStreams::Recorded& SimStreams::recorded(const char* call, Event event) {
  const auto found = events_.find(event);
  if (found == events_.end()) throw DeviceError(str(call, ": invalid resource handle"));
  return *found->second;
}

int SimStreams::device_of(const char* call, Event event) {
  const std::lock_guard lock(mutex_);
  return recorded(call, event).device;
}

void SimStreams::record(Event event, std::shared_ptr<SimStream> stream, uint64_t number) {
  const std::lock_guard lock(mutex_);
  Recorded& entry = recorded("cudaEventRecord", event);
  entry.stream = std::move(stream);
  entry.number = number;
}

std::function<void()> SimStreams::waiter(Event event) {
  const std::lock_guard lock(mutex_);
  const Recorded& entry = recorded("cudaStreamWaitEvent", event);
  return [stream = entry.stream, number = entry.number] {
    if (stream) stream->wait_for(number);
  };
}

void poll_word(uint32_t* word, uint32_t value) {
  for (int round = 0;; ++round) {
    const uint32_t now = std::atomic_ref(*word).load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(now - value) >= 0) return;
    if (round >= 100) {
      ::usleep(50);
    } else if (round >= 60) {
      ::sched_yield();
    }
  }
}

}  // namespace ringcomm::sim
