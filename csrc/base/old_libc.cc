// Functions that a wheel's libraries need, and that glibc 2.28 and the libstdc++ of its time don't
// have. CMake adds them where RINGCOMM_OLD_LIBC names stubs of that glibc (scripts/old_libc.sh).
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <ctime>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

// With glibc 2.32 and newer, code of libstdc++ looks here whether it may do without atomic
// operations. It never may.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;  // NOLINT
}

extern "C" __attribute__((visibility("hidden"))) pid_t gettid() noexcept {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

namespace {

constexpr long kSecond = 1'000'000'000;

// Returns the time of another clock at which `until` comes.
timespec on_wall_clock(clockid_t clock, const timespec& until) {
  timespec now{}, wall{};
  ::clock_gettime(clock, &now);
  ::clock_gettime(CLOCK_REALTIME, &wall);
  timespec result{wall.tv_sec + until.tv_sec - now.tv_sec,
                  wall.tv_nsec + until.tv_nsec - now.tv_nsec};
  for (; result.tv_nsec < 0; result.tv_nsec += kSecond) --result.tv_sec;
  for (; result.tv_nsec >= kSecond; result.tv_nsec -= kSecond) ++result.tv_sec;
  return result;
}

using ClockWait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

}  // namespace

// glibc's own from 2.30 on. Before that the wall clock has to do: where somebody sets it, a wait
// may end early or late, and std::condition_variable looks at its own clock again.
extern "C" __attribute__((visibility("hidden"))) int pthread_cond_clockwait(
    pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static const auto own =
      reinterpret_cast<ClockWait>(::dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (own != nullptr) return own(condition, mutex, clock, until);
  const timespec wall = on_wall_clock(clock, *until);
  return ::pthread_cond_timedwait(condition, mutex, &wall);
}

// GCC 12 has given it a new version, for a `noexcept` alone. The linker sends all calls of it here.
extern "C" void old_wait(std::condition_variable*, std::unique_lock<std::mutex>*);
__asm__(
    ".symver old_wait,_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
extern "C" __attribute__((visibility("hidden"))) void
wait_as_before(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) __asm__(
    "__wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void wait_as_before(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  old_wait(condition, lock);
}

// libstdc++ has gained these since GCC 8. The labels are the names that the compiler gives them.
extern "C" __attribute__((visibility("hidden"))) void throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// A runtime_error that is moved is copied: its text is counted, and copying cannot fail.
extern "C" __attribute__((visibility("hidden"))) void move_error(
    void* place, const std::runtime_error& error) __asm__("_ZNSt13runtime_errorC2EOS_");
void move_error(void* place, const std::runtime_error& error) {
  ::new (place) std::runtime_error(error);
}

// The reference of an exception_ptr was taken and given back by its constructor and destructor.
extern "C" void copy_pointer(void* place, const void* from) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern "C" void end_pointer(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
extern "C" __attribute__((visibility("hidden"))) void add_reference(const void* pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(const void* pointer) {
  alignas(std::exception_ptr) std::byte copy[sizeof(std::exception_ptr)];
  copy_pointer(copy, pointer);  // which stays
}
extern "C" __attribute__((visibility("hidden"))) void release_reference(void* pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release_reference(void* pointer) { end_pointer(pointer); }

// These templates are compiled here, because the older libstdc++ has no copies of them.
template std::ostringstream::basic_ostringstream();
template std::string std::stringbuf::str() const&;
