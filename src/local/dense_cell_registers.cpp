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

__device__ __forceinline__ void call_into_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

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
/// a token ahead out of the L2 cache, where they have been called some tokens before. Whatever a token does beside its
/// products costs registers that reads of the state could go ahead in: loops count in 32 bits, sums are closed outside,
/// and a width that is the layout's own (`exact`) makes offsets constants.
template <class Gates, class T, class L, bool exact>
__global__ __launch_bounds__(L::threads* L::segments_of_block,
                             L::blocks_of_processor) void run_segments(CellTrajectory<T> path, DenseWork<T> work,
                                                                       const T* __restrict__ weights,
                                                                       const T* __restrict__ bias, int channels,
                                                                       T* starts, T* ends, double* squares, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates, in = inputs_of<Gates>(), parts = L::parts_of_unit,
                columns = L::columns, lanes = Vector<T>::size;
  constexpr int padded = columns + lanes, ahead = 12, together = 16, sector = 32 / sizeof(T);
  static_assert(in * (L::units / sector) <= L::threads, "each sector of a token's inputs is called by a thread");
  __shared__ __align__(16) T shared[2][L::segments_of_block][parts * padded];
  const int D = exact ? L::units : channels;
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

  std::int64_t left = warm_up + (end - begin);  // tokens
  int warming = static_cast<int>(warm_up);
  const T* x = path.x + (begin - warm_up) * path.x_stride;
  const int sectors = (D + sector - 1) / sector;
  const bool calls = thread < in * sectors;
  const T* called = x + thread / sectors * D + thread % sectors * sector;
  for (int i = 0; i < ahead; ++i, called += path.x_stride)
    if (calls && i < left) call_into_l2(called);

  T w[g][columns];
#pragma unroll
  for (int q = 0; q < g; ++q)
#pragma unroll
    for (int c = 0; c < columns; ++c) w[q][c] = weights[(q * columns + c) * L::threads + thread];
  const bool real = exact || unit < D, writes = real && part == 0;
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

  x += unit;
  T* out = path.h + begin * path.h_stride + unit;
#pragma unroll
  for (int q = 0; q < in; ++q) xs[q] = real && left > 0 ? load_once(x + q * D) : T(0);
  const T* state = &shared[0][group][part * padded];
  T* put = &shared[0][group][unit / columns * padded + unit % columns];
  int other = L::segments_of_block * parts * padded;  // from one state to the next, and back
  if (part == 0) *put = h[0];
  wait_for_segment<L::threads>(group);
  double sum = 0;
  while (left > 0) {
    const bool warm = warming > 0;
    const auto most = static_cast<int>(left < 2 * together ? left : 2 * together);
    const int wanted = warm ? warming : most, tokens = wanted < together ? wanted : together;
    const int more = most > tokens ? tokens : tokens - 1, far = most - ahead < tokens ? most - ahead : tokens;
    T here = 0;
    for (int i = 0; i < tokens; ++i) {
      if (calls && i < far) call_into_l2(called);
      called += path.x_stride;
      T p[g], sums[g][2];
#pragma unroll
      for (int q = 0; q < g; ++q) sums[q][0] = parts == 1 ? b[q] : T(0), sums[q][1] = 0;
      const auto* values = reinterpret_cast<const Vector<T>*>(state);
#pragma unroll
      for (int c = 0; c < columns / lanes; ++c) {
        const Vector<T> v = values[c];
#pragma unroll
        for (int j = 0; j < lanes; ++j)
#pragma unroll
          for (int q = 0; q < g; ++q) sums[q][j % 2] = fused(w[q][c * lanes + j], v.v[j], sums[q][j % 2]);
      }
#pragma unroll
      for (int q = 0; q < g; ++q) {
        p[q] = sums[q][0] + sums[q][1];
#pragma unroll
        for (int with = 1; with < parts; with *= 2) p[q] += __shfl_xor_sync(0xffffffffu, p[q], with);
        if (parts > 1) p[q] += b[q];
      }
      Gates::step(xs, p, h);
      x += path.x_stride;  // the next token's, which has the products' time to arrive
#pragma unroll
      for (int q = 0; q < in; ++q)
        if (real && i < more) xs[q] = load_once(x + q * D);
      put += other, state += other, other = -other;
      if (part == 0) *put = real ? h[0] : T(0);
      if (!warm) {
        if (writes && keep) {
#pragma unroll
          for (int m = 0; m < k; ++m) store_once(out + m * D, h[m]);
        }
        out += path.h_stride;
      }
      here = fused(h[0], h[0], here);
#pragma unroll
      for (int m = 1; m < k; ++m) here = fused(h[m], T(0), here);  // not a number, if it is not
      wait_for_segment<L::threads>(group);
    }
    left -= tokens;
    if (!warm) sum += static_cast<double>(here);
    if (warm && (warming -= tokens) == 0) note_start();
  }
  if (!writes) return;
#pragma unroll
  for (int i = 0; i < k; ++i) ends[slot * size + i * D + unit] = h[i];
  if (squares) squares[slot * D + unit] = sum;
}

}  // namespace

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run(const CellTrajectory<T>& path, const DenseWork<T>& work, T* starts, T* ends,
                                  double* squares, bool keep, bool alone) const {
  if (work.count == 0) return;
  const auto launch = [&](auto layout, const DeviceArray<T>& weights) {
    using L = decltype(layout);
    const auto blocks = static_cast<unsigned>((work.count + L::segments_of_block - 1) / L::segments_of_block);
    const auto kernel = D_ == L::units ? run_segments<Gates, T, L, true> : run_segments<Gates, T, L, false>;
    kernel<<<blocks, L::threads * L::segments_of_block, 0, stream()>>>(path, work, weights.data(), bias_.data(), D_,
                                                                       starts, ends, squares, keep);
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
  run_segments<Tangent<k, g>, T, L, false><<<blocks, L::threads * L::segments_of_block, 0, stream()>>>(
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
