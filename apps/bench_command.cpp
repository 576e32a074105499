// SPDX-License-Identifier: Apache-2.0
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <vector>

#include "apps/bench.hpp"

namespace longscan {
namespace {

/// Seconds that `f` takes, by the device's own clock where there is one.
class Clock {
 public:
  double seconds(const std::function<void()>& f) {
#ifdef KOKKOS_ENABLE_CUDA
    float milliseconds = 0;
    const cudaStream_t stream = Kokkos::Cuda().cuda_stream();
    cudaEventRecord(begin_, stream);
    f();
    cudaEventRecord(end_, stream);
    cudaEventSynchronize(end_);
    cudaEventElapsedTime(&milliseconds, begin_, end_);
    return milliseconds * 1e-3;
#else
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
#endif
  }
#ifdef KOKKOS_ENABLE_CUDA
  Clock() { cudaEventCreate(&begin_), cudaEventCreate(&end_); }
  ~Clock() { cudaEventDestroy(begin_), cudaEventDestroy(end_); }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

 private:
  cudaEvent_t begin_, end_;
#endif
};

}  // namespace

nlohmann::json Timing::json() const {
  return {{"median_ms", median * 1e3}, {"min_ms", least * 1e3}, {"max_ms", most * 1e3}, {"runs", runs}};
}

Timing time_runs(int runs, const std::function<void()>& f) {
  f();
  std::vector<double> seconds;
  Clock clock;
  for (int i = 0; i < runs; ++i) seconds.push_back(clock.seconds(f));
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), runs};
}

double copy_rate() {
  const std::int64_t bytes = std::int64_t{1} << (Kokkos::DefaultExecutionSpace().concurrency() > 1024 ? 31 : 27);
  using Bytes = Kokkos::View<std::int64_t*, Kokkos::DefaultExecutionSpace::memory_space>;
  const Bytes from("longscan::bench::from", bytes / 8), to("longscan::bench::to", bytes / 8);
  const Kokkos::DefaultExecutionSpace space;
  const Timing t = time_runs(9, [&] {
    Kokkos::deep_copy(space, to, from);
    space.fence();
  });
  return 2.0 * static_cast<double>(bytes) / t.median;
}

}  // namespace longscan
