// Preloaded into ranks: one reading of the monotonic clock in DELAY_ONE_IN takes DELAY_US more, as if
// the thread had lost its processor there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec*);
static unsigned one_in, microseconds;
static __thread unsigned chance;

__attribute__((constructor)) static void begin(void) {
  const char* often = getenv("DELAY_ONE_IN");
  const char* how_long = getenv("DELAY_US");
  real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  one_in = often != NULL ? (unsigned)atoi(often) : 0;
  microseconds = how_long != NULL ? (unsigned)atoi(how_long) : 0;
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  if (real == NULL) begin();
  const int result = real(clock, time);
  if (one_in == 0 || clock != CLOCK_MONOTONIC) return result;
  if (chance == 0) chance = (unsigned)syscall(SYS_gettid) * 2654435761u | 1;
  chance ^= chance << 13;
  chance ^= chance >> 17;
  chance ^= chance << 5;
  if (chance % one_in != 0) return result;
  const struct timespec pause = {0, microseconds * 1000L};
  syscall(SYS_nanosleep, &pause, NULL);
  return result;
}
