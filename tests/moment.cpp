// SPDX-License-Identifier: Apache-2.0
// Preloaded into the ranks of a solve, this does something to one at a moment of the solve, so that no test has to look
// in time. LONGSCAN_MOMENT is "EVENT COUNT ACTION RANK MICROSECONDS": the COUNTth time that
//   window      a part of an output has gone to its file (in the thread that writes), or
//   checkpoint  a checkpoint got its name (in the main thread of rank 0)
// on RANK (-1: each), so many microseconds later, the process sends itself the signal ACTION, or its parent the signal
// -ACTION, or, if ACTION is 0, waits there until it got SIGTERM, SIGUSR1 or SIGUSR2 and its handler has run.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

namespace {

std::atomic<bool> signalled = false;
std::atomic<int> events = 0;
void (*handlers[NSIG])(int) = {};

void on_signal(int signal) {
  handlers[signal](signal);
  signalled = true;
}

void happens(std::string_view event) {
  char name[16] = "";
  int count = 0, action = 0, rank = -1, microseconds = 0;
  const char *words = std::getenv("LONGSCAN_MOMENT"), *my_rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (!words || std::sscanf(words, "%15s %d %d %d %d", name, &count, &action, &rank, &microseconds) != 5) return;
  if (event != name || (rank >= 0 && rank != (my_rank ? std::atoi(my_rank) : 0)) || ++events != count) return;
  const auto act = [=] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    if (action != 0) kill(action > 0 ? getpid() : getppid(), std::abs(action));
    while (action == 0 && !signalled) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  if (microseconds > 0)
    std::thread(act).detach();
  else
    act();
}

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int sync_file_range(int file, off64_t offset, off64_t bytes, unsigned flags) {
  const int result = next(&sync_file_range, "sync_file_range")(file, offset, bytes, flags);
  happens("window");
  return result;
}

int rename(const char* from, const char* to) noexcept {
  const int result = next(&rename, "rename")(from, to);
  const std::string_view path = to, end = "checkpoint";
  if (result == 0 && path.size() >= end.size() && path.substr(path.size() - end.size()) == end) happens("checkpoint");
  return result;
}

int sigaction(int signal, const struct sigaction* action, struct sigaction* before) noexcept {
  const auto real = next(&sigaction, "sigaction");
  if (!action || (signal != SIGTERM && signal != SIGUSR1 && signal != SIGUSR2) || action->sa_handler == SIG_DFL ||
      action->sa_handler == SIG_IGN || (action->sa_flags & SA_SIGINFO))
    return real(signal, action, before);
  handlers[signal] = action->sa_handler;
  struct sigaction ours = *action;
  ours.sa_handler = on_signal;
  return real(signal, &ours, before);
}
}
