#include "sim/sim_streams.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace ringcomm::sim {

namespace {

// Until (int32)(word - value) >= 0. There is no ring: another process's thread writes the word.
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

}  // namespace

// ---- connections

void Connection::enqueue(std::function<void()> command) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.size() < room_; });
  queue_.push_back(std::move(command));
  if (!running_) {
    running_ = true;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  }
  changed_.notify_all();
}

void Connection::work() {
  sigset_t all;
  ::sigfillset(&all);  // signals are for the program's own threads
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    auto command = std::move(queue_.front());
    lock.unlock();
    command();
    command = nullptr;
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

// ---- streams

uint64_t SimStream::enqueue(Operation operation) {
  const std::lock_guard order(order_);
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = ++enqueued_;
  }
  connection_->enqueue([self = shared_from_this(), number, operation = std::move(operation)] {
    operation(number);
    const std::lock_guard lock(self->mutex_);
    self->done_ = number;
    self->changed_.notify_all();
  });
  return number;
}

void SimStream::wait_for(uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

void SimStream::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&, number = enqueued_] { return done_ >= number; });
}

void SimStreams::set_limits(uint64_t connections, uint64_t commands) {
  const std::lock_guard lock(mutex_);
  most_connections_ = connections;
  commands_ = commands;
}

// In turn, as the driver gives them out.
std::shared_ptr<SimStream> SimStreams::new_stream(int device) {
  const uint64_t id = next_id_++;
  auto& connection = connections_[{device, id % most_connections_}];
  if (!connection) connection = std::make_shared<Connection>(commands_);
  auto stream = std::make_shared<SimStream>(id, device, connection);
  all_.remove_if([](const auto& old) { return old.expired(); });
  all_.push_back(stream);
  return stream;
}

Stream SimStreams::make(int device) {
  const std::lock_guard lock(mutex_);
  auto stream = new_stream(device);
  return open_.emplace(stream.get(), std::move(stream)).first->first;
}

void SimStreams::destroy(Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto entry = open_.find(stream);
  if (entry == open_.end()) throw DeviceError("cudaStreamDestroy: invalid resource handle");
  open_.erase(entry);  // work left in its connection is done
}

std::shared_ptr<SimStream> SimStreams::find(const char* call, Stream stream, int device) {
  const std::lock_guard lock(mutex_);
  if (stream == nullptr) {
    auto& made = default_[device];
    if (!made) made = new_stream(device);
    return made;
  }
  const auto entry = open_.find(stream);
  if (entry == open_.end()) throw DeviceError(str(call, ": invalid resource handle"));
  return entry->second;
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
  const auto entry = events_.find(event);
  if (entry == events_.end()) throw DeviceError(str(call, ": invalid resource handle"));
  return *entry->second;
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

void SimStreams::wait_for_word(int device, uint32_t* word, uint32_t value) {
  {
    const std::lock_guard lock(waiting_mutex_);
    ++waiting_[device];
  }
  poll_word(word, value);
  const std::lock_guard lock(waiting_mutex_);
  if (--waiting_[device] == 0) no_more_waiting_.notify_all();
}

bool SimStreams::is_waiting(int device) {
  const std::lock_guard lock(waiting_mutex_);
  return waiting_[device] > 0;
}

void SimStreams::pass(int device) {
  std::unique_lock lock(waiting_mutex_);
  no_more_waiting_.wait(lock, [&] { return waiting_[device] == 0; });
}

}  // namespace ringcomm::sim
