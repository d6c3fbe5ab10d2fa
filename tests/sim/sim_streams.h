// Streams and events of a simulated device: a thread for each stream, which runs what is enqueued.
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

class SimStream : public std::enable_shared_from_this<SimStream> {
 public:
  using Operation = std::function<void(uint64_t number)>;

  SimStream(uint64_t id, int device) : id(id), device(device) {}

  uint64_t enqueue(Operation operation);  // returns its number in the stream: 1, 2, ...
  void wait_for(uint64_t number);         // until that one is done
  void wait_for_all();                    // those that are enqueued now
  void close();                           // the thread does what is left, and ends

  const uint64_t id;
  const int device;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  uint64_t enqueued_ = 0, done_ = 0;
  bool running_ = false, closed_ = false;
};

// Those of a process. Threads are detached: a stream that waits for a peer keeps no process alive.
class SimStreams {
 public:
  Stream make(int device);
  void destroy(Stream stream);
  // Null is the default stream of `device`. `call` is whom an error names.
  std::shared_ptr<SimStream> find(const char* call, Stream stream, int device);
  // Waits for all work on the device, also of streams that were destroyed: as cudaFree does.
  void drain(int device);

  Event make_event(int device);
  void destroy_event(Event event);
  int device_of(const char* call, Event event);
  void record(Event event, std::shared_ptr<SimStream> stream, uint64_t number);
  // Returns what waits for the work that is recorded now.
  std::function<void()> waiter(Event event);

 private:
  struct Recorded {
    int device;
    std::shared_ptr<SimStream> stream;
    uint64_t number;
  };
  Recorded& recorded(const char* call, Event event);  // with mutex_ held

  std::mutex mutex_;
  uint64_t next_id_ = 1;
  std::map<Stream, std::shared_ptr<SimStream>> open_;
  std::map<int, std::shared_ptr<SimStream>> default_;
  std::list<std::weak_ptr<SimStream>> all_;
  std::map<Event, std::unique_ptr<Recorded>> events_;
};

// Waits until (int32)(word - value) >= 0. Nobody rings: another process's thread writes the word.
void poll_word(uint32_t* word, uint32_t value);

}  // namespace ringcomm::sim
