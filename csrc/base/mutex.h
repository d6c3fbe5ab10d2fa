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
// Marks a function whose callers hold the mutex.
#define RINGCOMM_REQUIRES(mutex) RINGCOMM_THREAD_SAFETY(requires_capability(mutex))
// Marks a function that returns with another set of mutexes than it was called with.
#define RINGCOMM_UNCHECKED_LOCKS RINGCOMM_THREAD_SAFETY(no_thread_safety_analysis)

namespace ringcomm {

class RINGCOMM_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() RINGCOMM_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() RINGCOMM_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  bool try_lock() RINGCOMM_THREAD_SAFETY(try_acquire_capability(true)) { return mutex_.try_lock(); }
  // Tells clang in a lambda, which it checks alone, that its caller holds the mutex.
  void assert_held() const RINGCOMM_THREAD_SAFETY(assert_capability(this)) {}

 private:
  std::mutex mutex_;
};

// Holds a mutex for a scope, except between unlock() and lock().
class RINGCOMM_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) RINGCOMM_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  Lock(Mutex& mutex, std::adopt_lock_t) RINGCOMM_REQUIRES(mutex) : mutex_(mutex) {}
  ~Lock() RINGCOMM_THREAD_SAFETY(release_capability()) {
    if (held_) mutex_.unlock();
  }
  Lock(const Lock&) = delete;
  void lock() RINGCOMM_THREAD_SAFETY(acquire_capability()) {
    mutex_.lock();
    held_ = true;
  }
  void unlock() RINGCOMM_THREAD_SAFETY(release_capability()) {
    held_ = false;
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

}  // namespace ringcomm
