// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels for cells whose channels do not mix (the concept BlockCell). On a host core time is the outer loop and
// channels the inner one, several segments in step, so that the inner loop vectorises; on a device a lane is a channel
// of a segment. A template, so that a user's cell gets the same kernels.
#include <algorithm>
#include <cmath>

#include "local/cell_kernel.hpp"

namespace longscan {

template <class Cell, class T>
class BlockCellKernel final : public CellKernel<T> {
 public:
  using Space = Kokkos::DefaultExecutionSpace;
  static constexpr int k = Cell::state, g = Cell::inputs, nw = Cell::weights;

  /// weights [Cell::weights][channels], in memory of the default execution space; must outlive the kernel.
  BlockCellKernel(int channels, const T* weights) : channels_(channels), weights_(weights) {}
  int channels() const override { return channels_; }
  int state() const override { return k; }
  int inputs() const override { return g; }
  bool mixes() const override { return false; }

  /// One token for channels [c0, c1): the state [k][D] in place. Vectorised over channels on a host.
  KOKKOS_FUNCTION static void row(const T* x, const T* weights, T* s, int D, int c0, int c1) {
#pragma GCC ivdep
    for (int d = c0; d < c1; ++d) channel(x, weights, s, D, d);
  }

  KOKKOS_INLINE_FUNCTION static void channel(const T* x, const T* weights, T* s, int D, int d) {
    T xs[g], ws[nw], h[k];
    for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
    for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + d];
    for (int i = 0; i < k; ++i) h[i] = s[i * D + d];
    Cell::step(xs, ws, h);
    for (int i = 0; i < k; ++i) s[i * D + d] = h[i];
  }

  void run(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
           bool keep) const override {
    if constexpr (is_host_space<Space>) {
      // Enough channels in step to hide the latency of one channel's chain.
      const int wanted = 256, width = segments.empty() ? 1 : segments[0].channel_end - segments[0].channel_begin;
      const std::int64_t group = std::max(1, wanted / std::max(1, width));
      const std::int64_t count = static_cast<std::int64_t>(segments.size());
      const CellSegment* list = segments.data();
      const int D = channels_;
      const T* weights = weights_;
      Kokkos::parallel_for(
          "longscan::cell::run", Kokkos::RangePolicy<Space>(0, (count + group - 1) / group), [=](const std::int64_t i) {
            in_step(path, list + i * group, std::min(group, count - i * group), weights, D, starts, ends, keep);
          });
    } else {
      run_lanes(path, segments, starts, ends, keep);
    }
  }

  /// Device: one lane a channel of a segment, so that a warp reads neighbouring channels.
  void run_lanes(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
                 bool keep) const {
    Kokkos::View<CellSegment*, typename Space::memory_space> list(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::cell::segments"), segments.size());
    Kokkos::deep_copy(list,
                      Kokkos::View<const CellSegment*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
                          segments.data(), segments.size()));
    const int D = channels_, lanes = (D + 31) / 32 * 32;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::run",
        Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(0,
                                                                    static_cast<std::int64_t>(segments.size()) * lanes),
        KOKKOS_LAMBDA(const std::int64_t i) {
          const CellSegment s = list(i / lanes);
          const int d = static_cast<int>(i % lanes);
          if (d < s.channel_begin || d >= s.channel_end) return;
          const std::int64_t size = static_cast<std::int64_t>(k) * D;
          T ws[nw], h[k];
          for (int j = 0; j < nw; ++j) ws[j] = weights[j * D + d];
          const std::int64_t from = s.warm_up > 0 ? s.from : s.slot;
          for (int j = 0; j < k; ++j) h[j] = from >= 0 ? starts[from * size + j * D + d] : T(0);
          for (std::int64_t t = s.begin - s.warm_up; t < s.end; ++t) {
            if (t == s.begin && s.warm_up > 0)
              for (int j = 0; j < k; ++j) starts[s.slot * size + j * D + d] = h[j];
            T xs[g];
            for (int j = 0; j < g; ++j) xs[j] = path.x[t * path.x_stride + j * D + d];
            Cell::step(xs, ws, h);
            if (keep && t >= s.begin)
              for (int j = 0; j < k; ++j) path.h[t * path.h_stride + j * D + d] = h[j];
          }
          for (int j = 0; j < k; ++j) ends[s.slot * size + j * D + d] = h[j];
        });
    Space().fence();  // the list is freed on return
  }

  void guess(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end) const override {
    const int D = channels_;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::guess", Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(begin, end),
        KOKKOS_LAMBDA(const std::int64_t t) {
          T* s = path.h + t * path.h_stride;
          for (int j = 0; j < k * D; ++j) s[j] = T(0);
          row(path.x + t * path.x_stride, weights, s, D, 0, D);
        });
  }

  void linearize(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                 AffineMaps<T> maps, bool diagonal) const override {
    const int D = channels_;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::linearize", Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(begin, end),
        KOKKOS_LAMBDA(const std::int64_t t) {
          const T* x = path.x + t * path.x_stride;
          const T* s = t == begin ? before : path.h + (t - 1) * path.h_stride;
          const T* after = path.h + t * path.h_stride;
          for (int d = 0; d < D; ++d) {
            T xs[g], ws[nw], h[k], A[k * k];
            for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
            for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + d];
            for (int i = 0; i < k; ++i) h[i] = s[i * D + d];
            Cell::jacobian(xs, ws, h, A);
            Cell::step(xs, ws, h);
            for (int i = 0; i < k; ++i) {
              const T minus_r = h[i] - after[i * D + d];
              if (diagonal) {
                T* map = maps.slot((t - begin) * k * D + i * D + d);
                map[0] = A[i * k + i], map[1] = minus_r;
              } else {
                T* map = maps.slot((t - begin) * D + d) + i * (k + 1);
                for (int j = 0; j < k; ++j) map[j] = A[i * k + j];
                map[k] = minus_r;
              }
            }
          }
        });
  }

  std::vector<GrowthSums> look(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                               const T* before) const override;

 private:
  /// `count` segments token by token, all at the same distance from their start.
  static void in_step(const CellTrajectory<T>& path, const CellSegment* segments, std::int64_t count, const T* weights,
                      int D, T* starts, T* ends, bool keep) {
    const std::int64_t size = static_cast<std::int64_t>(k) * D;
    std::vector<T> states(count * size, T(0));
    std::int64_t longest = 0, warmest = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      const CellSegment& s = segments[j];
      longest = std::max(longest, s.end - s.begin), warmest = std::max(warmest, s.warm_up);
      const std::int64_t from = s.warm_up > 0 ? s.from : s.slot;
      if (from >= 0) copy(starts + from * size, &states[j * size], D, s);
    }
    for (std::int64_t i = -warmest; i < longest; ++i)
      for (std::int64_t j = 0; j < count; ++j) {
        const CellSegment& s = segments[j];
        const std::int64_t t = s.begin + i;
        if (i < -s.warm_up || t >= s.end) continue;
        T* state = &states[j * size];
        if (i == 0 && s.warm_up > 0) copy(state, starts + s.slot * size, D, s);
        row(path.x + t * path.x_stride, weights, state, D, s.channel_begin, s.channel_end);
        if (keep && i >= 0) copy(state, path.h + t * path.h_stride, D, s);
      }
    for (std::int64_t j = 0; j < count; ++j) copy(&states[j * size], ends + segments[j].slot * size, D, segments[j]);
  }

  static void copy(const T* from, T* to, int D, const CellSegment& s) {
    for (int i = 0; i < k; ++i)
      std::copy(from + i * D + s.channel_begin, from + i * D + s.channel_end, to + i * D + s.channel_begin);
  }

  int channels_;
  const T* weights_;
};

/// Growth and error bound of one channel while a path is walked along.
template <class Cell, class T>
struct ChannelLook {
  static constexpr int k = Cell::state;
  GrowthSums sums;
  double E[k] = {}, v[k];  // bound on the error of each value, and a tangent vector

  KOKKOS_INLINE_FUNCTION ChannelLook() {
    for (int i = 0; i < k; ++i) v[i] = 1;
  }

  /// One token: the state before, and the state that the path has after it.
  KOKKOS_INLINE_FUNCTION void walk(const T* x, const T* w, const T* before, const T* path) {
    T after[k], A[k * k], rho[k];
    for (int i = 0; i < k; ++i) after[i] = before[i];
    Cell::jacobian(x, w, before, A);
    Cell::step(x, w, after);
    if constexpr (requires { Cell::rounding(x, w, before, after, rho); }) {
      Cell::rounding(x, w, before, after, rho);
    } else {  // |h| and ten times the largest value at hand
      for (int i = 0; i < k; ++i) {
        const T now = after[i] < T(0) ? -after[i] : after[i], old = before[i] < T(0) ? -before[i] : before[i];
        rho[i] = now + T(10) * (now > old ? now : old);
      }
    }
    const double unit = sizeof(T) == 8 ? 1.1102230246251565e-16 : 5.9604644775390625e-8;
    double next_E[k], next_v[k], size_before = 0, size = 0, norm = 0;
    for (int i = 0; i < k; ++i) {
      const double r = static_cast<double>(path[i]) - static_cast<double>(after[i]);
      double row = 0;
      next_E[i] = unit * static_cast<double>(rho[i]) + (r < 0 ? -r : r), next_v[i] = 0;
      for (int j = 0; j < k; ++j) {
        const double a = static_cast<double>(A[i * k + j]), size_a = a < 0 ? -a : a;
        next_E[i] += size_a * E[j], next_v[i] += a * v[j], row += size_a;
      }
      norm = row > norm ? row : norm;
      size_before += v[i] * v[i], size += next_v[i] * next_v[i];
    }
    constexpr double nothing = -700;  // log of what a Jacobian of zero leaves
    sums.add(size > 0 ? 0.5 * log(size / size_before) : nothing, norm > 0 ? log(norm) : nothing);
    const double rescale = size > 0 ? 1 / sqrt(size) : 0;
    sums.error = 0;
    for (int i = 0; i < k; ++i) {
      E[i] = next_E[i];
      v[i] = size > 0 ? next_v[i] * rescale : 1.0;
      sums.error = E[i] > sums.error ? E[i] : sums.error;
    }
    sums.error_most = sums.error > sums.error_most ? sums.error : sums.error_most;
  }
};

template <class Cell, class T>
std::vector<GrowthSums> BlockCellKernel<Cell, T>::look(const CellTrajectory<T>& path, std::int64_t begin,
                                                       std::int64_t end, const T* before) const {
  constexpr int width = is_host_space<Space> ? 16 : 1;  // channels side by side: neighbours in memory
  const int D = channels_;
  const T* weights = weights_;
  Kokkos::View<GrowthSums*, typename Space::memory_space> sums("longscan::cell::sums", D);
  Kokkos::parallel_for(
      "longscan::cell::look", Kokkos::RangePolicy<Space>(0, (D + width - 1) / width), KOKKOS_LAMBDA(const int group) {
        const int first = group * width, count = D - first < width ? D - first : width;
        ChannelLook<Cell, T> looks[width];
        for (std::int64_t t = begin; t < end; ++t) {
          const T* x = path.x + t * path.x_stride + first;
          const T* s = (t == begin ? before : path.h + (t - 1) * path.h_stride) + first;
          const T* after = path.h + t * path.h_stride + first;
          for (int d = 0; d < count; ++d) {
            T xs[g], ws[nw], hs[k], ps[k];
            for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
            for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + first + d];
            for (int i = 0; i < k; ++i) hs[i] = s[i * D + d], ps[i] = after[i * D + d];
            looks[d].walk(xs, ws, hs, ps);
          }
        }
        for (int d = 0; d < count; ++d) sums(first + d) = looks[d].sums;
      });
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), sums);
  return {host.data(), host.data() + D};
}

}  // namespace longscan
