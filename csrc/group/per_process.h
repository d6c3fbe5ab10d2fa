// Keeps a part that a process has once. It is made at its first use, and never destroyed: threads
// may still use it while the process exits. A forked child makes one of its own. There are no other
// globals in ringcomm.
#pragma once

#include <pthread.h>

#include <atomic>

#include "base/error.h"
#include "base/mutex.h"

namespace ringcomm {

// The engine's parts are instantiated in libringcomm.so alone, so that a process has each of them
// once. So a function with a variable of its own must not be inlined into another library.
//
// Where the process forks, before_fork() and after_fork() lock and unlock the part. In the child,
// forked() lets go of the parent's, which stays locked: nothing else of it may be used.
template <typename Part>
class PerProcess {
 public:
  static Part& get() {
    Part* const part = made();
    return part != nullptr ? *part : make();
  }
  // Returns null before the first use.
  static Part* made() { return only.load(std::memory_order_acquire); }  // partner: make()

 private:
  [[gnu::noinline]] static Mutex& mutex() {
    static Mutex* const instance = new Mutex;  // outlives every thread
    return *instance;
  }
  [[gnu::noinline]] static Part& make() {
    static const int refused = ::pthread_atfork(before_fork, after_fork, forked);
    if (refused != 0) throw SystemError("pthread_atfork", refused);
    const Lock lock(mutex());
    if (made() == nullptr) only.store(new Part, std::memory_order_release);
    return *made();
  }
  static void before_fork() RINGCOMM_UNCHECKED_LOCKS {
    mutex().lock();
    if (Part* const part = made()) part->before_fork();
  }
  static void after_fork() RINGCOMM_UNCHECKED_LOCKS {
    if (Part* const part = made()) part->after_fork();
    mutex().unlock();
  }
  static void forked() RINGCOMM_UNCHECKED_LOCKS {
    if (Part* const part = made()) part->forked();
    only.store(nullptr, std::memory_order_relaxed);
    mutex().unlock();
  }

  inline static std::atomic<Part*> only{nullptr};
};

}  // namespace ringcomm
