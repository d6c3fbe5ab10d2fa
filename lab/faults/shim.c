// Preloaded into ranks: their wall clock is wrong by as many seconds as the file CLOCK_SHIFT says, and
// a thread that gets SIGUSR2 stands still for 5 seconds. The monotonic clock is left alone.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long* shift;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("CLOCK_SHIFT");
  const int file = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* page = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) shift = page;
  close(file);
}

static int real_clock_gettime(clockid_t clock, struct timespec* time) {
  static int (*next)(clockid_t, struct timespec*);
  if (next == NULL) next = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  return next(clock, time);
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  const int result = real_clock_gettime(clock, time);
  const int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (result == 0 && wall && shift != NULL) time->tv_sec += *shift;
  return result;
}

int gettimeofday(struct timeval* restrict time, void* restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* to) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (to != NULL) *to = now.tv_sec;
  return now.tv_sec;
}

static void stand_still(int number) {
  (void)number;
  const int saved = errno;
  struct timespec left = {5, 0};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  errno = saved;
}

// SIGUSR2 stops the thread that gets it; called by the ranks that want it.
void ready_to_stand_still(void) {
  struct sigaction action = {.sa_handler = stand_still, .sa_flags = SA_RESTART};
  sigaction(SIGUSR2, &action, NULL);
}
