// Streams and events of a simulated device.
//
// Streams reach the device by a few connections, which they share: CUDA has 8, unless
// CUDA_DEVICE_MAX_CONNECTIONS says otherwise. A connection is a queue, and a thread that runs what
// is in it, one command after the other. So a stream that waits holds up all others behind it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/api.h"

namespace ringcomm::sim {

using cuda::DeviceError;
using cuda::Event;
using cuda::Stream;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  explicit Connection(uint64_t room) : room_(room) {}

  // Waits for room.
  void enqueue(std::function<void()> command);

 private:
  void work();

  const uint64_t room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool running_ = false;
};

class SimStream : public std::enable_shared_from_this<SimStream> {
 public:
  using Operation = std::function<void(uint64_t number)>;

  SimStream(uint64_t id, int device, std::shared_ptr<Connection> connection)
      : id(id), device(device), connection_(std::move(connection)) {}

  uint64_t enqueue(Operation operation);  // returns its number in the stream: 1, 2, ...
  void wait_for(uint64_t number);         // until that one is done
  void wait_for_all();                    // those that are enqueued now

  const uint64_t id;
  const int device;

 private:
  const std::shared_ptr<Connection> connection_;
  std::mutex order_;  // of one number and the next, in the connection
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t enqueued_ = 0, done_ = 0;
};

// Those of a process. Threads are detached: a stream that waits for a peer keeps no process alive.
class SimStreams {
 public:
  // Sets the limits of streams that are made from now on.
  void set_limits(uint64_t connections, uint64_t commands);
  Stream make(int device);
  void destroy(Stream stream);
  // Null is the default stream of `device`. An error names `call`.
  std::shared_ptr<SimStream> find(const char* call, Stream stream, int device);
  // Waits for all work on the device, also of streams that were destroyed: as cudaFree does.
  void drain(int device);
  // Waits for a word, on the thread of a stream of the device. pass() waits until none does so.
  void wait_for_word(int device, uint32_t* word, uint32_t value);
  void pass(int device);
  bool is_waiting(int device);  // some stream, for a word

  Event make_event(int device);
  void destroy_event(Event event);
  int device_of(const char* call, Event event);
  void record(Event event, std::shared_ptr<SimStream> stream, uint64_t number);
  // Returns a function that waits for the work that is recorded now.
  std::function<void()> waiter(Event event);

 private:
  struct Recorded {
    int device;
    std::shared_ptr<SimStream> stream;
    uint64_t number;
  };
  Recorded& recorded(const char* call, Event event);  // with mutex_ held
  std::shared_ptr<SimStream> new_stream(int device);

  std::mutex mutex_;
  uint64_t most_connections_ = 8, commands_ = 1000;
  uint64_t next_id_ = 1;
  std::map<Stream, std::shared_ptr<SimStream>> open_;
  std::map<int, std::shared_ptr<SimStream>> default_;
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Connection>> connections_;
  std::list<std::weak_ptr<SimStream>> all_;
  std::map<Event, std::unique_ptr<Recorded>> events_;

  std::mutex waiting_mutex_;
  std::condition_variable no_more_waiting_;
  std::map<int, int> waiting_;  // streams of a device that wait for a word
};

}  // namespace ringcomm::sim
