// SPDX-License-Identifier: Apache-2.0
#pragma once
// What teams of threads do for cells whose channels mix, on any space: segments in step, linearisations, a tangent
// vector. For one source file: g++ 12 inlines what is called once only where nobody else can call it, and without that
// a gru of 64 channels takes four times as long on a host.
#include "core/delta_chunk.hpp"
#include "core/device_memory.hpp"
#include "local/cell_kernel.hpp"
#include "local/lanes.hpp"

namespace longscan {
namespace {

/// What these functors, and the kernel that launches them, are made of.
template <class Gates, class T>
struct DenseTeam {
  using Space = Kokkos::DefaultExecutionSpace;
  using Memory = typename Space::memory_space;
  using Array = Kokkos::View<T*, Memory>;
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>>;
  using Member = typename Policy::member_type;
  static constexpr int k = Gates::state, g = Gates::gates;
  /// Segments in step: rows of one product.
  static constexpr int rows = is_host_space<Space> ? 32 : 1;
};

/// A tangent vector along tokens [begin, end), on one team.
template <class Gates, class T>
struct DenseLook {
  using Team = DenseTeam<Gates, T>;
  using Array = typename Team::Array;
  using Member = typename Team::Member;
  static constexpr int k = Team::k, g = Team::g;

  CellTrajectory<T> path;
  std::int64_t begin, end;
  const T* before;
  int D, level;
  std::size_t bytes;
  Array Wt, bias;
  GrowthSums* out;

  KOKKOS_FUNCTION void operator()(const Member& member) const {
    T* p = static_cast<T*>(member.team_scratch(level).get_shmem_aligned(bytes, row_bytes));
    T *Wv = p + g * D, *v = Wv + g * D, *next = v + k * D, *s = next + k * D;
    const int rank = member.team_rank(), team = member.team_size();
    const T even = T(1) / T(sqrt(static_cast<double>(k * D)));
    for (int i = rank; i < k * D; i += team) v[i] = i % 3 == 1 ? -even : even;
    GrowthSums sums;
    for (int i = rank; i < k * D; i += team) s[i] = before[i];
    for (std::int64_t t = begin; t < end; ++t) {
      const T* x = path.x + t * path.x_stride;
      member.team_barrier();
      for (int j = rank; j < g * D; j += team) {
        const T* column = &Wt[packed_index<T>(D, 0, j)];
        constexpr int together = 4, loads = 32;  // sums side by side; loads in flight
        T sum[together] = {bias[j]}, tangent[together] = {};
        int e = 0;
        for (; e + loads <= D; e += loads) {
          T weight[loads];
          LONGSCAN_UNROLL
          for (int i = 0; i < loads; ++i) weight[i] = column[(e + i) * strip_columns<T>];
          LONGSCAN_UNROLL
          for (int i = 0; i < loads; ++i) {
            sum[i % together] = fused(weight[i], s[e + i], sum[i % together]);
            tangent[i % together] = fused(weight[i], v[e + i], tangent[i % together]);
          }
        }
        for (; e < D; ++e) {
          const T weight = column[e * strip_columns<T>];
          sum[0] = fused(weight, s[e], sum[0]), tangent[0] = fused(weight, v[e], tangent[0]);
        }
        LONGSCAN_UNROLL
        for (int half = together / 2; half > 0; half /= 2)
          for (int i = 0; i < half; ++i) sum[i] += sum[i + half], tangent[i] += tangent[i + half];
        p[j] = sum[0], Wv[j] = tangent[0];
      }
      member.team_barrier();
      T size = 0;
      Kokkos::parallel_reduce(
          Kokkos::TeamThreadRange(member, D),
          [&](const int d, T& squares) {
            T xs[g], ps[g], hs[k], dp[k * g], ds[k * k];
            for (int i = 0; i < g; ++i) xs[i] = x[i * D + d], ps[i] = p[i * D + d];
            for (int i = 0; i < k; ++i) hs[i] = s[i * D + d];
            Gates::derivatives(xs, ps, hs, dp, ds);
            Gates::step(xs, ps, hs);
            for (int i = 0; i < k; ++i) {
              T sum = 0;
              for (int j = 0; j < g; ++j) sum += dp[i * g + j] * Wv[j * D + d];
              for (int j = 0; j < k; ++j) sum += ds[i * k + j] * v[j * D + d];
              next[i * D + d] = sum, squares += sum * sum;
              s[i * D + d] = hs[i];
            }
          },
          size);
      const double growth = size > T(0) ? 0.5 * static_cast<double>(log(size)) : -700;
      const T scale = size > T(0) ? T(1) / T(sqrt(size)) : T(0);
      sums.add(growth, growth);
      member.team_barrier();
      for (int i = rank; i < k * D; i += team) v[i] = size > T(0) ? next[i] * scale : even;
    }
    if (rank == 0) *out = sums;
  }
};

/// The recurrence over groups of segments in step, a group a team.
template <class Gates, class T>
struct DenseRun {
  using Team = DenseTeam<Gates, T>;
  using Array = typename Team::Array;
  using Member = typename Team::Member;
  static constexpr int k = Team::k, g = Team::g, rows = Team::rows;

  CellTrajectory<T> path;
  Kokkos::View<CellSegment*, typename Team::Memory> list;
  std::int64_t count;
  T *starts, *ends;
  bool keep;
  int D, width;
  Array Wt, bias;

  KOKKOS_FUNCTION std::size_t bytes() const {
    return sizeof(T) * rows * (static_cast<std::size_t>(k) * D + width) + row_bytes;
  }

  KOKKOS_FUNCTION void operator()(const Member& member) const {
    if constexpr (is_host_space<typename Team::Space>)
      work(HostLanes<T>{}, member);
    else
      work(DeviceLanes<T, Member>{member}, member);
  }

  template <class Lanes>
  KOKKOS_FUNCTION void work(const Lanes& lanes, const Member& member) const {
    const std::int64_t first = member.league_rank() * rows;
    const int n = static_cast<int>(count - first < rows ? count - first : rows);
    const int size = k * D;
    T* states = static_cast<T*>(member.team_scratch(1).get_shmem_aligned(bytes(), row_bytes));
    T* p = states +
           (static_cast<std::int64_t>(rows) * size * sizeof(T) + row_bytes - 1) / row_bytes * row_bytes / sizeof(T);
    std::int64_t longest = 0, warmest = 0;
    for (int j = 0; j < n; ++j) {
      const CellSegment& s = list(first + j);
      longest = s.end - s.begin > longest ? s.end - s.begin : longest;
      warmest = s.warm_up > warmest ? s.warm_up : warmest;
      const std::int64_t from = s.warm_up > 0 ? s.from : s.slot;
      lanes.each(size, [&](int i) { states[j * size + i] = from >= 0 ? starts[from * size + i] : T(0); });
    }
    lanes.sync();
    for (std::int64_t i = -warmest; i < longest; ++i) {
      lanes.packed_product(n, width, D, states, size, Wt.data(), p, width, false);
      lanes.sync();
      for (int j = 0; j < n; ++j) {
        const CellSegment& s = list(first + j);
        const std::int64_t t = s.begin + i;
        if (i < -s.warm_up || t >= s.end) continue;
        T* state = states + j * size;
        if (i == 0 && s.warm_up > 0) lanes.each(size, [&](int m) { starts[s.slot * size + m] = state[m]; });
        const T* x = path.x + t * path.x_stride;
        T* out = path.h + t * path.h_stride;
        const bool write = keep && i >= 0;
        const T* pre = p + j * width;
        const T* b = bias.data();
        lanes.sync();
        lanes.each(D, [&](int d) {
          T xs[g], ps[g], h[k];
          for (int m = 0; m < g; ++m) xs[m] = x[m * D + d], ps[m] = pre[m * D + d] + b[m * D + d];
          for (int m = 0; m < k; ++m) h[m] = state[m * D + d];
          Gates::step(xs, ps, h);
          for (int m = 0; m < k; ++m) state[m * D + d] = h[m];
          if (write)
            for (int m = 0; m < k; ++m) out[m * D + d] = h[m];
        });
        if (t + 1 == s.end) {
          lanes.sync();
          lanes.each(size, [&](int m) { ends[s.slot * size + m] = state[m]; });
        }
      }
      lanes.sync();
    }
    for (int j = 0; j < n; ++j) {  // a segment of no tokens passes its state on
      const CellSegment& s = list(first + j);
      if (s.end == s.begin) lanes.each(size, [&](int m) { ends[s.slot * size + m] = states[j * size + m]; });
    }
  }
};

/// CellKernel::linearize, a token a team.
template <class Gates, class T>
struct DenseLinearize {
  using Team = DenseTeam<Gates, T>;
  using Array = typename Team::Array;
  using Member = typename Team::Member;
  static constexpr int k = Team::k, g = Team::g;

  CellTrajectory<T> path;
  std::int64_t begin;
  const T* before;
  AffineMaps<T> maps;
  bool diagonal;
  int D, width;
  Array Wt, W, bias;

  KOKKOS_FUNCTION void operator()(const Member& member) const {
    if constexpr (is_host_space<typename Team::Space>)
      work(HostLanes<T>{}, member);
    else
      work(DeviceLanes<T, Member>{member}, member);
  }

  template <class Lanes>
  KOKKOS_FUNCTION void work(const Lanes& lanes, const Member& member) const {
    T* p = static_cast<T*>(member.team_scratch(1).get_shmem_aligned(width * sizeof(T), row_bytes));
    const std::int64_t i = member.league_rank(), t = begin + i;
    const T* s = i == 0 ? before : path.h + (t - 1) * path.h_stride;
    const T* x = path.x + t * path.x_stride;
    const T* after = path.h + t * path.h_stride;
    const int n = k * D;
    lanes.packed_product(1, width, D, s, n, Wt.data(), p, width, false);
    lanes.sync();
    lanes.each(D, [&](int d) {
      T xs[g], ps[g], h[k], dp[k * g], ds[k * k];
      for (int m = 0; m < g; ++m) xs[m] = x[m * D + d], ps[m] = p[m * D + d] + bias(m * D + d);
      for (int m = 0; m < k; ++m) h[m] = s[m * D + d];
      Gates::derivatives(xs, ps, h, dp, ds);
      Gates::step(xs, ps, h);
      for (int m = 0; m < k; ++m) {
        const T minus_r = h[m] - after[m * D + d];
        const auto entry = [&](int e) {  // of W_hh seen through the gates
          T sum = 0;
          for (int q = 0; q < g; ++q) sum += dp[m * g + q] * W((static_cast<std::int64_t>(q) * D + d) * D + e);
          return sum;
        };
        if (diagonal) {
          T* map = maps.slot(i * n + m * D + d);
          map[0] = (m == 0 ? entry(d) : T(0)) + ds[m * k + m], map[1] = minus_r;
        } else {
          T* row = maps.slot(i) + static_cast<std::int64_t>(m * D + d) * (n + 1);
          for (int e = 0; e < D; ++e) row[e] = entry(e);
          for (int e = D; e < n; ++e) row[e] = T(0);
          for (int q = 0; q < k; ++q) row[q * D + d] += ds[m * k + q];
          row[n] = minus_r;
        }
      }
    });
  }
};

}  // namespace
}  // namespace longscan
