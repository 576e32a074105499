// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace longscan {

/// A thread beside the one that solves. It does one job at a time and knows nothing of MPI or Kokkos. Signals go to
/// other threads.
class Worker {
 public:
  Worker();
  /// Waits for the job at hand.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// The job before must have been waited for.
  void start(std::function<void()> job);
  /// There is no job, and nothing that one threw.
  bool idle();
  /// Until the job is done; throws what it threw. Nothing to wait for: returns at once.
  void wait();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  std::exception_ptr failure_;
  bool busy_ = false, leaving_ = false;
  std::thread thread_;
};

}  // namespace longscan
