#include "torch/park.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <thread>

namespace ringcomm {
namespace {

constexpr int kSignal = SIGURG;  // ignored unless a program says otherwise
constexpr int kTries = 100;
constexpr auto kPause = std::chrono::milliseconds(2);

// Was the thread in a system call? There it holds no lock of the C library's, which others would
// then wait for in vain.
bool in_system_call([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  constexpr unsigned char kCall[] = {0x0f, 0x05};
  const auto next = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  constexpr unsigned char kCall[] = {0x01, 0x00, 0x00, 0xd4};
  const auto next = static_cast<const ucontext_t*>(context)->uc_mcontext.pc;
#endif
#if defined(__x86_64__) || defined(__aarch64__)
  const auto at = static_cast<uintptr_t>(next);
  const auto is_call = [&](uintptr_t address) {
    return std::memcmp(reinterpret_cast<const void*>(address), kCall, sizeof kCall) == 0;
  };
  return is_call(at - sizeof kCall) || is_call(at);  // it would return, or begin anew
#else
  return true;
#endif
}

void stay(int /*number*/, siginfo_t* info, void* context) {
  if (!in_system_call(context)) return;  // it is asked again
  // Partner: ask()'s caller.
  static_cast<std::atomic<bool>*>(info->si_value.sival_ptr)->store(true);
  while (true) ::pause();
}

// False: there is no such thread any more.
bool ask(int thread, std::atomic<bool>* parked) {
  siginfo_t info{};
  info.si_signo = kSignal;
  info.si_code = SI_QUEUE;
  info.si_pid = ::getpid();
  info.si_uid = ::getuid();
  info.si_value.sival_ptr = parked;
  return ::syscall(SYS_rt_tgsigqueueinfo, ::getpid(), thread, kSignal, &info) == 0;
}

}  // namespace

void park(const std::vector<int>& threads) {
  if (threads.empty()) return;
  struct sigaction action{};
  action.sa_sigaction = stay;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigfillset(&action.sa_mask);
  if (::sigaction(kSignal, &action, nullptr) != 0) return;
  for (const int thread : threads) {
    auto* const parked = new std::atomic<bool>(false);  // the thread's, for good; partner: stay()
    for (int i = 0; i < kTries && !*parked && ask(thread, parked); ++i) {
      std::this_thread::sleep_for(kPause);
    }
  }
}

}  // namespace ringcomm
