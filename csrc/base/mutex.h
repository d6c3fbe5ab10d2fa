// A mutex whose use clang checks: with -Wthread-safety it refuses code that reads or writes what is
// GUARDED_BY a mutex without holding it. Other compilers see a plain std::mutex.
#pragma once

#include <mutex>

#ifdef __clang__
#define RINGCOMM_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define RINGCOMM_THREAD_SAFETY(attribute)
#endif
#define RINGCOMM_GUARDED_BY(mutex) RINGCOMM_THREAD_SAFETY(guarded_by(mutex))

namespace ringcomm {

class RINGCOMM_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() RINGCOMM_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() RINGCOMM_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds it for a scope.
class RINGCOMM_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) RINGCOMM_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~Lock() RINGCOMM_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace ringcomm
