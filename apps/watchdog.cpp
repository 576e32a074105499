// SPDX-License-Identifier: Apache-2.0
#include "apps/watchdog.hpp"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "longscan/error.hpp"

namespace longscan {
namespace {

using Clock = std::chrono::steady_clock;

// What the threads of this rank leave for the watchdog to see.
std::atomic<const char*> phase = "starting";
std::atomic<std::int64_t> phase_token = 0;
std::atomic<std::int64_t> moves = 0;  // phases noted, messages begun and ended
std::atomic<int> waits = 0;           // the main thread is in a call that waits for other ranks
std::mutex threads_mutex;
std::vector<pthread_t> threads;
pthread_t main_thread;

/// Seconds that a thread has run on a core.
double cpu_seconds(pthread_t thread) {
  clockid_t clock{};
  timespec t{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

class WatchedTransport final : public Transport {
 public:
  explicit WatchedTransport(Transport& ranks) : ranks_(ranks) {}
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  int local_rank() const override { return ranks_.local_rank(); }
  int local_size() const override { return ranks_.local_size(); }
  std::string name() const override { return ranks_.name(); }
  std::int64_t bytes_sent() const override { return ranks_.bytes_sent(); }
  std::unique_ptr<Request> send(const void* data, std::int64_t bytes, int to, int tag) override {
    return std::make_unique<WatchedRequest>(ranks_.send(data, bytes, to, tag));
  }
  void receive(void* data, std::int64_t bytes, int from, int tag) override {
    const Waiting waiting;
    ranks_.receive(data, bytes, from, tag);
  }
  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) override {
    const Waiting waiting;
    ranks_.exchange(sends, receives);
  }
  Reach reach() const override { return ranks_.reach(); }
  void settle() override {
    const Waiting waiting;
    ranks_.settle();
  }
  bool enable_device_memory() override { return ranks_.enable_device_memory(); }
  void broadcast(void* data, std::int64_t bytes, int root) override {
    const Waiting waiting;
    ranks_.broadcast(data, bytes, root);
  }
  void all_gather(const void* mine, std::int64_t bytes, void* all) override {
    const Waiting waiting;
    ranks_.all_gather(mine, bytes, all);
  }
  void exclusive_scan(const void* mine, void* result, std::int64_t count, std::int64_t element_bytes,
                      const Operator& combine, bool reversed) override {
    const Waiting waiting;
    ranks_.exclusive_scan(mine, result, count, element_bytes, combine, reversed);
  }
  void all_reduce(std::int64_t* values, int count, Reduction reduction) override {
    const Waiting waiting;
    ranks_.all_reduce(values, count, reduction);
  }
  void all_reduce(double* values, int count, Reduction reduction) override {
    const Waiting waiting;
    ranks_.all_reduce(values, count, reduction);
  }
  void barrier() override {
    const Waiting waiting;
    ranks_.barrier();
  }

 private:
  class WatchedRequest final : public Request {
   public:
    explicit WatchedRequest(std::unique_ptr<Request> request) : request_(std::move(request)) {}
    void wait() override {
      const Waiting waiting;
      request_->wait();
    }

   private:
    std::unique_ptr<Request> request_;
  };
  Transport& ranks_;
};

/// What a rank tells all others.
struct Beat {
  double idle = 0;  ///< seconds since it moved
  std::int64_t token = 0;
  char phase[40] = "";
  std::int32_t waits = 0, leaving = 0;
};

class Watchdog {
 public:
  explicit Watchdog(double seconds) : limit_(0.9 * seconds), period_(std::clamp(seconds / 20, 0.02, 2.0)) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm_);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    first_claim_ = size_;
    sigset_t all, before;  // signals are for the other threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  /// Every rank stops after the same exchange.
  void leave() {
    {
      const std::lock_guard lock(mutex_);
      leaving_ = true;
    }
    left_.notify_all();
    thread_.join();
  }

 private:
  void run() {
    moved_ = heard_ = Clock::now();
    looked_ = moved_;
    begin_exchange();
    while (true) {
      pause();
      if (was_stopped()) moved_ = heard_ = Clock::now();
      looked_ = Clock::now();
      look_at_myself();
      if (first_claim() < size_) {  // that rank ends the job
        if (since(claimed_) > patience)
          end("rank " + std::to_string(first_claim_) + " noticed that the job does not move, and fell silent itself; " +
              "the job ends here (--stall-timeout)");
        continue;
      }
      look_behind();
      int done = 0;
      MPI_Test(&exchange_, &done, MPI_STATUS_IGNORE);
      if (!done) continue;
      if (std::all_of(beats_.begin(), beats_.end(), [](const Beat& b) { return b.leaving != 0; })) return;
      look_at_all();
      begin_exchange();
    }
  }

  void pause() {
    std::unique_lock lock(mutex_);
    if (leaving_)
      left_.wait_for(lock, std::chrono::milliseconds(2));
    else
      left_.wait_for(lock, std::chrono::duration<double>(period_), [this] { return leaving_.load(); });
  }

  /// This rank itself, since it last looked; or starved. What it has not heard since then says nothing of others.
  bool was_stopped() const { return since(looked_) > 0.5 * limit_; }

  static double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

  void look_at_myself() {
    double work = 0;
    {
      const std::lock_guard lock(threads_mutex);
      for (const pthread_t thread : threads) work += cpu_seconds(thread);
    }
    const double main_work = cpu_seconds(main_thread);  // in MPI's calls it runs without working
    const std::int64_t now = moves;
    if (now != moves_ || work != work_ || (waits == 0 && main_work - main_work_ > 1e-4)) moved_ = Clock::now();
    moves_ = now, work_ = work, main_work_ = main_work;
  }

  /// Each rank listens to the one before it, so that one rank speaks of one that is silent.
  void look_behind() {
    if (size_ == 1) return;
    const int before = (rank_ + size_ - 1) % size_, after = (rank_ + 1) % size_;
    int flag = 1;
    if (sending_ != MPI_REQUEST_NULL) MPI_Test(&sending_, &flag, MPI_STATUS_IGNORE);
    if (flag) MPI_Isend(&alive_, 1, MPI_CHAR, after, tag_alive, comm_, &sending_);
    for (flag = 1; flag;) {
      MPI_Iprobe(before, tag_alive, comm_, &flag, MPI_STATUS_IGNORE);
      if (!flag) break;
      char alive = 0;
      MPI_Recv(&alive, 1, MPI_CHAR, before, tag_alive, comm_, MPI_STATUS_IGNORE);
      heard_ = Clock::now();
    }
    if (since(heard_) > limit_ && !was_stopped())
      end("rank " + std::to_string(before) + " has not been heard of for " + seconds_text(since(heard_)) +
          " (stopped, or its node is gone), while rank " + std::to_string(rank_) + " was " + phase.load() +
          at(phase_token) + "; the job ends here (--stall-timeout)");
  }

  void look_at_all() {
    if (rank_ != 0 || !std::all_of(beats_.begin(), beats_.end(), [this](const Beat& b) { return b.idle > limit_; }))
      return;
    const auto stuck = std::find_if(beats_.begin(), beats_.end(), [](const Beat& b) { return b.waits == 0; });
    const Beat& beat = stuck == beats_.end() ? beats_.front() : *stuck;
    end("nothing has moved for " + seconds_text(beat.idle) + ": rank " +
        std::to_string(stuck == beats_.end() ? 0 : stuck - beats_.begin()) + " is stuck while " + beat.phase +
        at(beat.token) + (stuck == beats_.end() ? ", and all ranks wait for each other" : "") +
        "; the job ends here (--stall-timeout)");
  }

  static std::string at(std::int64_t token) { return " from token " + std::to_string(token); }
  static std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", seconds);
    return text;
  }

  void begin_exchange() {
    mine_.idle = since(moved_), mine_.token = phase_token, mine_.waits = waits, mine_.leaving = leaving_;
    std::snprintf(mine_.phase, sizeof mine_.phase, "%s", phase.load());
    beats_.resize(static_cast<std::size_t>(size_));
    MPI_Iallgather(&mine_, sizeof(Beat), MPI_BYTE, beats_.data(), sizeof(Beat), MPI_BYTE, comm_, &exchange_);
  }

  /// The lowest of the ranks that said they will end the job; size_ if none has.
  int first_claim() {
    for (int flag = 1; flag;) {
      MPI_Status status;
      MPI_Iprobe(MPI_ANY_SOURCE, tag_claim, comm_, &flag, &status);
      if (!flag) break;
      char claim = 0;
      MPI_Recv(&claim, 1, MPI_CHAR, status.MPI_SOURCE, tag_claim, comm_, MPI_STATUS_IGNORE);
      if (first_claim_ == size_) claimed_ = Clock::now();
      first_claim_ = std::min(first_claim_, status.MPI_SOURCE);
    }
    return first_claim_;
  }

  /// Ranks may notice at the same moment, or one after the other while the job goes down: each that knows of no other
  /// tells all others first, and after a moment the lowest that did speaks. Should it be gone by then, the next does.
  [[noreturn]] void end(const std::string& message) {
    const bool late = first_claim() < size_;
    std::vector<MPI_Request> claims(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);  // a stopped rank takes none
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && !late)
        MPI_Isend(&alive_, 1, MPI_CHAR, r, tag_claim, comm_, &claims[static_cast<std::size_t>(r)]);
    const auto noticed = Clock::now();
    while (since(noticed) < (late || first_claim() < rank_ ? patience : period_))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int code = static_cast<int>(ExitCode::internal);
    std::fprintf(stderr, "longscan: %s\n", message.c_str());
    std::fflush(stderr);
    std::thread([] {  // the launcher may be the one that is stuck
      std::this_thread::sleep_for(std::chrono::duration<double>(patience));
      _exit(static_cast<int>(ExitCode::internal));
    })
        .detach();
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
  }

  static constexpr int tag_alive = 0, tag_claim = 1;
  static constexpr double patience = 10;  // seconds, for a rank or a launcher that is ending the job
  const double limit_, period_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int first_claim_ = 0;
  Clock::time_point claimed_;
  std::mutex mutex_;
  std::condition_variable left_;
  std::atomic<bool> leaving_ = false;
  Clock::time_point moved_, heard_, looked_;
  std::int64_t moves_ = -1;
  double work_ = 0, main_work_ = 0;
  char alive_ = 1;
  MPI_Request sending_ = MPI_REQUEST_NULL, exchange_ = MPI_REQUEST_NULL;
  Beat mine_;
  std::vector<Beat> beats_;
  std::thread thread_;
};

std::unique_ptr<Watchdog> watchdog;

}  // namespace

Waiting::Waiting() { ++waits, ++moves; }
Waiting::~Waiting() { --waits, ++moves; }

void note_phase(const char* name, std::int64_t token) { phase = name, phase_token = token, ++moves; }

void watch_thread(pthread_t thread) {
  const std::lock_guard lock(threads_mutex);
  threads.push_back(thread);
}

void forget_thread(pthread_t thread) {
  const std::lock_guard lock(threads_mutex);
  std::erase_if(threads, [&](pthread_t t) { return pthread_equal(t, thread); });
}

std::unique_ptr<Transport> make_watched(Transport& ranks) { return std::make_unique<WatchedTransport>(ranks); }

bool start_watchdog(double seconds) {
  int level = 0;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) return false;
  main_thread = pthread_self();
  if (seconds > 0 && !watchdog) watchdog = std::make_unique<Watchdog>(seconds);
  return true;
}

void stop_watchdog() {
  if (watchdog) watchdog->leave();
  watchdog.reset();
}

}  // namespace longscan
