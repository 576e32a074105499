// SPDX-License-Identifier: Apache-2.0
#include "apps/stop_request.hpp"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace longscan {
namespace {

std::atomic<int> requested = 0;
std::atomic<std::int64_t> requested_at = 0;  // nanoseconds
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * std::int64_t{1000000000} + t.tv_nsec;
}

/// Calls nothing but what may be called in a signal handler.
void on_signal(int signal) {
  constexpr std::int64_t copies_within = 200000000;
  if (requested == 0) {
    requested_at = now();
    requested = signal;
  } else if (now() - requested_at > copies_within) {
    std::signal(signal, SIG_DFL);
    raise(signal);  // delivered when this handler returns
  }
}

}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) {
    sigaction(signal, &action, nullptr);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    pthread_sigmask(SIG_UNBLOCK, &one, nullptr);  // a launcher may have left it blocked
  }
}

void ignore_stop_signals() {
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) std::signal(signal, SIG_IGN);
}

int stop_requested() { return requested; }

}  // namespace longscan
