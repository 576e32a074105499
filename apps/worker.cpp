// SPDX-License-Identifier: Apache-2.0
#include "apps/worker.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

#include "apps/watchdog.hpp"

namespace longscan {

Worker::Worker() {
  sigset_t all, before;
  sigfillset(&all);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, own);  // faults of the thread itself
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  watch_thread(thread_.native_handle());
}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  forget_thread(thread_.native_handle());
  thread_.join();
}

void Worker::start(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job), busy_ = true;
  }
  changed_.notify_all();
}

bool Worker::idle() {
  const std::lock_guard lock(mutex_);
  return !busy_ && !failure_;
}

void Worker::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || leaving_; });
    if (!busy_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      job_();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    job_ = nullptr, failure_ = failure, busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace longscan
