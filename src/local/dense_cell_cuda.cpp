// SPDX-License-Identifier: Apache-2.0
#include "local/dense_cell_cuda.hpp"

#ifdef KOKKOS_ENABLE_CUDA

#include "core/cells.hpp"
#include "local/cuda_blas.hpp"

namespace longscan {
namespace {

cudaStream_t stream() { return Kokkos::Cuda().cuda_stream(); }

/// Threads of a segment: `parts` neighbours a unit, each with a part of the unit's rows in registers.
template <class T, int width, int parts, int segments, int blocks>
struct Layout {
  static constexpr int units = width, parts_of_unit = parts, segments_of_block = segments, blocks_of_processor = blocks;
  static constexpr int threads = width * parts, columns = width / parts;
};

/// The layouts of a cell: many segments at once, and few as fast as can be. A width of 0: not in registers.
template <class T, int gates, int width>
struct Layouts {
  using Many = Layout<T, 0, 1, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<float, 1, 64> {
  using Many = Layout<float, 64, 1, 4, 2>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<float, 1, 128> {
  using Many = Layout<float, 128, 1, 2, 1>;
  using Few = Layout<float, 128, 4, 1, 1>;
};
template <>
struct Layouts<float, 3, 64> {
  using Many = Layout<float, 64, 1, 4, 1>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<float, 3, 128> {
  using Many = Layout<float, 128, 2, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<float, 4, 64> {
  using Many = Layout<float, 64, 2, 2, 1>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<double, 1, 64> {
  using Many = Layout<double, 64, 2, 2, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 1, 128> {
  using Many = Layout<double, 128, 4, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 3, 64> {
  using Many = Layout<double, 64, 4, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 4, 64> {
  using Many = Layout<double, 64, 4, 1, 1>;
  using Few = Many;
};

/// f(layouts) for the narrowest that D fits into; false if there is none.
template <class T, int gates, class F>
bool with_layouts(int D, const F& f) {
  if (D <= 64) return f(Layouts<T, gates, 64>()), true;
  if constexpr (Layouts<T, gates, 128>::Many::units > 0)
    if (D <= 128) return f(Layouts<T, gates, 128>()), true;
  return false;
}

template <class T>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};

template <int threads>
__device__ __forceinline__ void wait_for_segment(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(threads) : "memory");
}

/// One segment a group of threads: W_hh stays in registers, the state goes round through shared memory, inputs are read
/// a token ahead out of the L2 cache, where they have been called some tokens before.
template <class Gates, class T, class L>
__global__ __launch_bounds__(L::threads* L::segments_of_block,
                             L::blocks_of_processor) void run_segments(CellTrajectory<T> path, DenseWork work,
                                                                       const T* __restrict__ weights,
                                                                       const T* __restrict__ bias, int D, T* starts,
                                                                       T* ends, double* squares, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates, parts = L::parts_of_unit, columns = L::columns;
  constexpr int padded = columns + Vector<T>::size, ahead = 12;
  __shared__ __align__(16) T shared[2][L::segments_of_block][parts * padded];
  const int group = threadIdx.x / L::threads, thread = threadIdx.x % L::threads;
  const int unit = thread / parts, part = thread % parts;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * L::segments_of_block + group, size = k * D;
  if (index >= work.count) return;
  std::int64_t begin, end, slot = index, warm_up = 0, from = index;
  if (work.list) {
    const CellSegment s = work.list[index];
    begin = s.begin, end = s.end, slot = s.slot, warm_up = s.warm_up, from = warm_up > 0 ? s.from : slot;
  } else {
    if (work.active && !work.active[index]) return;
    const SegmentRun run = work.grid.run_of(slot);
    begin = work.grid.begin(run, slot), end = work.grid.end(run, slot);
    if (!work.active && slot > run.slot) {
      const bool reaches = begin - run.begin <= work.grid.warm_up;
      warm_up = reaches ? begin - run.begin : work.grid.warm_up, from = reaches && run.exact ? run.slot : -1;
    }
  }

  T w[g][columns];
#pragma unroll
  for (int q = 0; q < g; ++q)
#pragma unroll
    for (int c = 0; c < columns; ++c) w[q][c] = weights[(q * columns + c) * L::threads + thread];
  const bool real = unit < D, writes = real && part == 0;
  T b[g], h[k], xs[g];
#pragma unroll
  for (int q = 0; q < g; ++q) b[q] = real ? bias[q * D + unit] : T(0);
#pragma unroll
  for (int i = 0; i < k; ++i) h[i] = real && from >= 0 ? starts[from * size + i * D + unit] : T(0);

  const int place = unit / columns * padded + unit % columns;
  std::int64_t t = begin - warm_up;
  const T* x = path.x + t * path.x_stride + unit;
  T* out = path.h + t * path.h_stride + unit;
#pragma unroll
  for (int q = 0; q < g; ++q) xs[q] = real && t < end ? load_once(x + q * D) : T(0);
  if (part == 0) shared[0][group][place] = h[0];
  wait_for_segment<L::threads>(group);
  int now = 0;
  T here = 0;
  double sum = 0;
  for (; t < end; ++t) {
    x += path.x_stride;
    T next[g];
#pragma unroll
    for (int q = 0; q < g; ++q) next[q] = real && t + 1 < end ? load_once(x + q * D) : T(0);
    if (real && part == 0 && t + ahead < end) {
#pragma unroll
      for (int q = 0; q < g; ++q)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(x + (ahead - 1) * path.x_stride + q * D));
    }
    if (t == begin && warm_up > 0 && writes) {
#pragma unroll
      for (int i = 0; i < k; ++i) starts[slot * size + i * D + unit] = h[i];
    }
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
    for (int q = 0; q < g; ++q) xs[q] = next[q];
    wait_for_segment<L::threads>(group);
  }
  if (!writes) return;
#pragma unroll
  for (int i = 0; i < k; ++i) ends[slot * size + i * D + unit] = h[i];
  if (squares) squares[slot * D + unit] = sum + static_cast<double>(here);
}

/// The nearest TF32 number (ties away from zero). Not finite stays so.
__device__ __forceinline__ float to_tf32(float x) {
  return fabsf(x) < 3e38f ? __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u) : x;
}

/// Row `row` of the states that the product is made of, for a new h.
template <class T>
__device__ __forceinline__ void put_operand(T* states, T* split, std::int64_t row, int D, int d, T h) {
  states[row * D + d] = h;
  if constexpr (sizeof(T) == 4)
    if (split) {
      const float high = to_tf32(h), low = to_tf32(h - high);
      float* to = split + row * 3 * D + d;
      to[0] = high, to[D] = low, to[2 * D] = high;
    }
}

/// states [state][padded][D] before the first token of each segment.
template <class T>
__global__ void begin_in_step(const CellSegment* list, std::int64_t count, std::int64_t padded, int D, int k,
                              const T* starts, T* ends, T* states, T* split) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= padded * D) return;
  const std::int64_t j = i / D;
  const int d = static_cast<int>(i % D);
  for (int m = 0; m < k; ++m) {
    T value = 0;
    if (j < count) {
      const CellSegment& s = list[j];
      const std::int64_t from = s.warm_up > 0 ? s.from : s.slot, at = static_cast<std::int64_t>(m) * D + d;
      if (from >= 0) value = starts[from * k * D + at];
      if (s.begin == s.end && s.warm_up == 0) ends[s.slot * k * D + at] = value;
    }
    if (m == 0)
      put_operand(states, split, j, D, d, value);
    else
      states[m * padded * D + i] = value;
  }
}

/// What is left of token begin + step once W_hh h is there.
template <class Gates, class T>
__global__ void go_in_step(CellTrajectory<T> path, const CellSegment* list, std::int64_t count, std::int64_t padded,
                           int D, std::int64_t step, const T* __restrict__ products, const T* __restrict__ bias,
                           T* states, T* split, T* starts, T* ends, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates;
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count * D) return;
  const std::int64_t j = i / D;
  const int d = static_cast<int>(i % D);
  const CellSegment s = list[j];
  const std::int64_t t = s.begin + step;
  if (step < -s.warm_up || t >= s.end) return;
  T xs[g], p[g], h[k];
  for (int q = 0; q < g; ++q) {
    xs[q] = load_once(path.x + t * path.x_stride + static_cast<std::int64_t>(q) * D + d);
    p[q] = products[(j * g + q) * D + d] + bias[q * D + d];
  }
  for (int m = 0; m < k; ++m) h[m] = states[m * padded * D + i];
  if (step == 0 && s.warm_up > 0)
    for (int m = 0; m < k; ++m) starts[(s.slot * k + m) * D + d] = h[m];
  Gates::step(xs, p, h);
  put_operand(states, split, j, D, d, h[0]);
  for (int m = 1; m < k; ++m) states[m * padded * D + i] = h[m];
  if (keep && step >= 0)
    for (int m = 0; m < k; ++m) store_once(path.h + t * path.h_stride + m * D + d, h[m]);
  if (t + 1 == s.end)
    for (int m = 0; m < k; ++m) ends[(s.slot * k + m) * D + d] = h[m];
}

}  // namespace

BatchProducts& batch_products() {
  static BatchProducts products = BatchProducts::plain;
  return products;
}

template <class Gates, class T>
DenseCellCuda<Gates, T>::DenseCellCuda(int D, const std::vector<T>& W, const std::vector<T>& bias) : D_(D) {
  constexpr int g = Gates::gates;
  bias_ = on_device("longscan::cell::bias", bias);
  const auto packed = [&](auto layout) {
    using L = decltype(layout);
    std::vector<T> to(static_cast<std::size_t>(g) * L::columns * L::threads, T(0));
    for (int q = 0; q < g; ++q)
      for (int unit = 0; unit < D; ++unit)
        for (int e = 0; e < D; ++e) {
          const int thread = unit * L::parts_of_unit + e / L::columns;
          to[(static_cast<std::size_t>(q) * L::columns + e % L::columns) * L::threads + thread] =
              W[(static_cast<std::size_t>(q) * D + unit) * D + e];
        }
    return on_device("longscan::cell::weights", to);
  };
  in_registers_ = with_layouts<T, g>(D, [&](auto layouts) {
    together_ = packed(typename decltype(layouts)::Many());
    alone_ = packed(typename decltype(layouts)::Few());
  });
  if (in_registers_) return;
  std::vector<T> by_input(W.size());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D; ++i)
    for (std::int64_t e = 0; e < D; ++e) by_input[e * g * D + i] = W[i * D + e];
  W_ = on_device("longscan::cell::weights", by_input);
  if constexpr (sizeof(T) == 4) {
    std::vector<float> split(static_cast<std::size_t>(g) * D * 3 * D);
    const auto rounded = [](float x) {
      return std::isfinite(x) ? bits_as<float>((bits_as<std::uint32_t>(x) + 0x1000u) & 0xffffe000u) : x;
    };
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D; ++i)
      for (int e = 0; e < D; ++e) {
        const float w = W[i * D + e], high = rounded(w), low = rounded(w - high);
        float* row = &split[i * 3 * D + e];
        row[0] = high, row[D] = high, row[2 * D] = low;
      }
    W_split_ = on_device("longscan::cell::weights", split);
  }
}

template <class Gates, class T>
std::int64_t DenseCellCuda<Gates, T>::side_by_side() const {
  const std::int64_t processors = Kokkos::Cuda().cuda_device_prop().multiProcessorCount;
  std::int64_t segments = 0;
  with_layouts<T, Gates::gates>(D_, [&](auto layouts) {
    using L = typename decltype(layouts)::Many;
    segments = processors * L::segments_of_block * L::blocks_of_processor;
  });
  // in step: as many rows as make a matrix product efficient
  return segments > 0 ? segments : 512;
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run(const CellTrajectory<T>& path, const DenseWork& work, T* starts, T* ends,
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
void DenseCellCuda<Gates, T>::run_in_step(const CellTrajectory<T>& path, const CellSegment* list,
                                          const std::vector<CellSegment>& segments, T* starts, T* ends, bool keep,
                                          bool alone) const {
  const auto count = static_cast<std::int64_t>(segments.size());
  if (!alone) {
    run_group(path, list, segments.data(), count, count, starts, ends, keep, batch_products());
    return;
  }
  // products of one shape: each of its rows is made alike
  constexpr std::int64_t rows = 16;
  for (std::int64_t j = 0; j < count; j += rows)
    run_group(path, list + j, segments.data() + j, std::min(rows, count - j), rows, starts, ends, keep,
              BatchProducts::plain);
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run_group(const CellTrajectory<T>& path, const CellSegment* list, const CellSegment* host,
                                        std::int64_t count, std::int64_t padded, T* starts, T* ends, bool keep,
                                        BatchProducts made) const {
  constexpr int k = Gates::state, g = Gates::gates;
  if (count == 0) return;
  const bool split = sizeof(T) == 4 && made == BatchProducts::three;
  reserve(states_, "longscan::cell::states", k * padded * D_);
  if (split) reserve(split_, "longscan::cell::states", 3 * padded * D_);
  reserve(products_, "longscan::cell::products", g * padded * D_);
  T* operand = split ? split_.data() : nullptr;
  std::int64_t longest = 0, warmest = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    longest = std::max(longest, host[j].end - host[j].begin), warmest = std::max(warmest, host[j].warm_up);
  }
  constexpr int threads = 256;
  const auto blocks = [](std::int64_t n) { return static_cast<unsigned>((n + threads - 1) / threads); };
  begin_in_step<T><<<blocks(padded * D_), threads, 0, stream()>>>(list, count, padded, D_, k, starts, ends,
                                                                  states_.data(), operand);
  const int m = g * D_, n = static_cast<int>(padded), depth = split ? 3 * D_ : D_;
  // Half of a warm-up only has to come near: what TF32 rounds off there is forgotten in the other half.
  const std::int64_t near = sizeof(T) == 4 && made == BatchProducts::plain && padded > 64 ? -warmest / 2 : -warmest;
  for (std::int64_t step = -warmest; step < longest; ++step) {
    products(m, n, depth, split ? W_split_.data() : W_.data(), split ? Factor::by_output : Factor::by_input,
             split ? operand : states_.data(), T(0), products_.data(), made != BatchProducts::plain || step < near);
    go_in_step<Gates, T><<<blocks(count * D_), threads, 0, stream()>>>(path, list, count, padded, D_, step,
                                                                       products_.data(), bias_.data(), states_.data(),
                                                                       operand, starts, ends, keep);
  }
  check_cuda(cudaGetLastError(), "running segments in step");
}

template class DenseCellCuda<RnnTanhGates, float>;
template class DenseCellCuda<RnnTanhGates, double>;
template class DenseCellCuda<RnnReluGates, float>;
template class DenseCellCuda<RnnReluGates, double>;
template class DenseCellCuda<GruGates, float>;
template class DenseCellCuda<GruGates, double>;
template class DenseCellCuda<LstmGates, float>;
template class DenseCellCuda<LstmGates, double>;

}  // namespace longscan

#endif
