// SPDX-License-Identifier: Apache-2.0
// Segments of small cells: W_hh in the registers of a few warps.
#include "local/dense_cell_layouts.hpp"

namespace longscan {

using namespace dense;

namespace {

template <int threads>
__device__ __forceinline__ void wait_for_segment(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(threads) : "memory");
}

/// The recurrence of a delta, in place of a cell.
template <int k, int g>
struct Tangent {
  static constexpr int state = k, gates = g, inputs = k * (g + k + 1);
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* p, T* delta) {
    T next[k];
#pragma unroll
    for (int m = 0; m < k; ++m) {
      next[m] = x[k * (g + k) + m];
#pragma unroll
      for (int q = 0; q < g; ++q) next[m] = fused(x[m * g + q], p[q], next[m]);
#pragma unroll
      for (int j = 0; j < k; ++j) next[m] = fused(x[k * g + m * k + j], delta[j], next[m]);
    }
#pragma unroll
    for (int m = 0; m < k; ++m) delta[m] = next[m];
  }
};
template <class Gates>
KOKKOS_INLINE_FUNCTION constexpr int inputs_of() {
  if constexpr (requires { Gates::inputs; })
    return Gates::inputs;
  else
    return Gates::gates;
}

/// One segment a group of threads: W_hh stays in registers, the state goes round through shared memory, inputs are read
/// a token ahead out of the L2 cache, where they have been called some tokens before.
template <class Gates, class T, class L>
__global__ __launch_bounds__(L::threads* L::segments_of_block,
                             L::blocks_of_processor) void run_segments(CellTrajectory<T> path, DenseWork<T> work,
                                                                       const T* __restrict__ weights,
                                                                       const T* __restrict__ bias, int D, T* starts,
                                                                       T* ends, double* squares, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates, in = inputs_of<Gates>(), parts = L::parts_of_unit,
                columns = L::columns;
  constexpr int padded = columns + Vector<T>::size, ahead = 12;
  __shared__ __align__(16) T shared[2][L::segments_of_block][parts * padded];
  const int group = threadIdx.x / L::threads, thread = threadIdx.x % L::threads;
  const int unit = thread / parts, part = thread % parts;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * L::segments_of_block + group, size = k * D;
  if (index >= work.count) return;
  std::int64_t begin, end, slot = work.first + index, warm_up = 0;
  const T* from = starts + slot * size;
  bool put_start = false;
  if (work.list) {
    const CellSegment s = work.list[index];
    begin = s.begin, end = s.end, slot = s.slot, warm_up = s.warm_up;
    const std::int64_t at = warm_up > 0 ? s.from : slot;
    from = at >= 0 ? starts + at * size : nullptr, put_start = warm_up > 0;
  } else {
    if (work.active && !work.active[slot]) return;
    const std::int64_t r = work.grid.runs == 1 ? 0 : work.grid.index_of(slot);
    const SegmentRun run = work.grid.runs == 1 ? work.grid.first : work.grid.table[r];
    begin = work.grid.begin(run, slot), end = work.grid.end(run, slot);
    put_start = work.initial && (slot > run.slot || run.exact);
    if (put_start) {
      const bool reaches = begin - run.begin <= work.grid.warm_up;
      warm_up = reaches ? begin - run.begin : work.grid.warm_up;
      from = reaches && run.exact ? work.initial + r * size : nullptr;
    }
  }

  T w[g][columns];
#pragma unroll
  for (int q = 0; q < g; ++q)
#pragma unroll
    for (int c = 0; c < columns; ++c) w[q][c] = weights[(q * columns + c) * L::threads + thread];
  const bool real = unit < D, writes = real && part == 0;
  T b[g], h[k], xs[in];
#pragma unroll
  for (int q = 0; q < g; ++q) b[q] = real ? bias[q * D + unit] : T(0);
#pragma unroll
  for (int i = 0; i < k; ++i) h[i] = real && from ? from[i * D + unit] : T(0);

  const auto note_start = [&] {
    if (!put_start || !writes) return;
#pragma unroll
    for (int i = 0; i < k; ++i) starts[slot * size + i * D + unit] = h[i];
  };
  if (warm_up == 0) note_start();

  const int place = unit / columns * padded + unit % columns;
  std::int64_t t = begin - warm_up;
  const T* x = path.x + t * path.x_stride + unit;
  T* out = path.h + t * path.h_stride + unit;
#pragma unroll
  for (int q = 0; q < in; ++q) xs[q] = real && t < end ? load_once(x + q * D) : T(0);
  if (part == 0) shared[0][group][place] = h[0];
  wait_for_segment<L::threads>(group);
  int now = 0;
  T here = 0;
  double sum = 0;
  for (; t < end; ++t) {
    x += path.x_stride;
    T next[in];
#pragma unroll
    for (int q = 0; q < in; ++q) next[q] = real && t + 1 < end ? load_once(x + q * D) : T(0);
    if (real && part == 0 && t + ahead < end) {
#pragma unroll
      for (int q = 0; q < in; ++q)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(x + (ahead - 1) * path.x_stride + q * D));
    }
    if (t == begin && warm_up > 0) note_start();
    T p[g], sums[g][2] = {};
    const auto* state = reinterpret_cast<const Vector<T>*>(&shared[now][group][part * padded]);
#pragma unroll
    for (int c = 0; c < columns / Vector<T>::size; ++c) {
      const Vector<T> v = state[c];
#pragma unroll
      for (int i = 0; i < Vector<T>::size; ++i)
#pragma unroll
        for (int q = 0; q < g; ++q) sums[q][i % 2] = fused(w[q][c * Vector<T>::size + i], v.v[i], sums[q][i % 2]);
    }
#pragma unroll
    for (int q = 0; q < g; ++q) {
      p[q] = sums[q][0] + sums[q][1];
#pragma unroll
      for (int other = 1; other < parts; other *= 2) p[q] += __shfl_xor_sync(0xffffffffu, p[q], other);
      p[q] += b[q];
    }
    Gates::step(xs, p, h);
    now ^= 1;
    if (part == 0) shared[now][group][place] = real ? h[0] : T(0);
    if (t >= begin) {
      if (writes && keep) {
#pragma unroll
        for (int i = 0; i < k; ++i) store_once(out + i * D, h[i]);
      }
      here = fused(h[0], h[0], here);
#pragma unroll
      for (int i = 1; i < k; ++i) here = fused(h[i], T(0), here);  // not a number, if it is not
      if ((t & 15) == 15) sum += static_cast<double>(here), here = 0;
    }
    out += path.h_stride;
#pragma unroll
    for (int q = 0; q < in; ++q) xs[q] = next[q];
    wait_for_segment<L::threads>(group);
  }
  if (!writes) return;
#pragma unroll
  for (int i = 0; i < k; ++i) ends[slot * size + i * D + unit] = h[i];
  if (squares) squares[slot * D + unit] = sum + static_cast<double>(here);
}

}  // namespace

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run(const CellTrajectory<T>& path, const DenseWork<T>& work, T* starts, T* ends,
                                  double* squares, bool keep, bool alone) const {
  if (work.count == 0) return;
  const auto launch = [&](auto layout, const DeviceArray<T>& weights) {
    using L = decltype(layout);
    const auto blocks = static_cast<unsigned>((work.count + L::segments_of_block - 1) / L::segments_of_block);
    run_segments<Gates, T, L><<<blocks, L::threads * L::segments_of_block, 0, stream()>>>(
        path, work, weights.data(), bias_.data(), D_, starts, ends, squares, keep);
  };
  with_layouts<T, Gates::gates>(D_, [&](auto layouts) {
    if (alone)
      launch(typename decltype(layouts)::Few(), alone_);
    else
      launch(typename decltype(layouts)::Many(), together_);
  });
  check_cuda(cudaGetLastError(), "running segments");
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run_tangents(const T* tangents, std::int64_t from, const SegmentGrid& grid,
                                           std::int64_t first, std::int64_t last, T* starts, T* ends, T* deltas) const {
  constexpr int k = Gates::state, g = Gates::gates;
  if (first == last) return;
  using L = typename Layouts<T, g, 64>::Few;
  const std::int64_t stride = static_cast<std::int64_t>(tangent_values<Gates>) * D_, size = std::int64_t{k} * D_;
  const CellTrajectory<T> path{tangents - from * stride, stride, deltas - (deltas ? from * size : 0), size};
  const DenseWork<T> work{.grid = grid, .count = last - first, .first = first};
  const auto blocks = static_cast<unsigned>((work.count + L::segments_of_block - 1) / L::segments_of_block);
  run_segments<Tangent<k, g>, T, L><<<blocks, L::threads * L::segments_of_block, 0, stream()>>>(
      path, work, alone_.data(), no_bias_.data(), D_, starts, ends, nullptr, deltas != nullptr);
  check_cuda(cudaGetLastError(), "deltas along segments");
}

#define LONGSCAN_INSTANTIATE(Gates, T)                                                                             \
  template void DenseCellCuda<Gates, T>::run(const CellTrajectory<T>&, const DenseWork<T>&, T*, T*, double*, bool, \
                                             bool) const;                                                          \
  template void DenseCellCuda<Gates, T>::run_tangents(const T*, std::int64_t, const SegmentGrid&, std::int64_t,    \
                                                      std::int64_t, T*, T*, T*) const;
LONGSCAN_FOR_DENSE_CELLS(LONGSCAN_INSTANTIATE)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
