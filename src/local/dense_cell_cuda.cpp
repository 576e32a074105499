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

// --- full Jacobians, D <= 64: rows and columns beyond D are zero

template <int k, int g, class T>
struct FoldShape {
  static constexpr int width = 64, rows = width * k, tile_rows = 8, tile_columns = 4;
  static constexpr int threads = rows / tile_rows * (width / tile_columns);
  static constexpr int values = k * (g + k);  ///< numbers of a token that A is made of
  static constexpr int shared_values = width * rows + rows * width + values * width;
  static constexpr int prefetched = (values * width + threads - 1) / threads;
};

/// P <- A_t P along a segment, 64 columns of P a block: A_t is made out of W_hh in shared memory, P stands beside it, a
/// thread sums up 8 x 4 elements of the product.
template <int k, int g, class T>
__global__ __launch_bounds__(FoldShape<k, g, T>::threads) void fold_segments(const T* __restrict__ tangents,
                                                                             std::int64_t from, SegmentGrid grid,
                                                                             std::int64_t first,
                                                                             const T* __restrict__ weights, int D,
                                                                             AffineMaps<T> maps) {
  using Shape = FoldShape<k, g, T>;
  constexpr int width = Shape::width, rows = Shape::rows, threads = Shape::threads, values = Shape::values;
  constexpr int tr = Shape::tile_rows, tc = Shape::tile_columns, lanes = Vector<T>::size;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* A = reinterpret_cast<T*>(shared_bytes);  // [input][row]
  T* P = A + width * rows;                    // [row][column]
  T* numbers = P + rows * width;              // [values][width]
  const int thread = threadIdx.x, row_group = thread % (rows / tr), column = thread / (rows / tr) * tc;
  const int shift = blockIdx.y;  // which of the state's values the columns belong to
  const std::int64_t slot = first + blockIdx.x;
  const SegmentRun run = grid.run_of(slot);
  const std::int64_t begin = grid.begin(run, slot), end = grid.end(run, slot);
  const std::int64_t stride = static_cast<std::int64_t>(values + k) * D;
  const auto row_of = [&](int i) { return i / 4 * (rows / 2) + row_group * 4 + i % 4; };

  for (int i = thread; i < rows * width; i += threads) P[i] = T(i / width == shift * width + i % width);
  T ahead[Shape::prefetched];
  const auto fetch = [&](std::int64_t t) {
#pragma unroll
    for (int i = 0; i < Shape::prefetched; ++i) {
      const int at = thread + i * threads, d = at % width;
      ahead[i] = at < values * width && d < D && t < end
                     ? load_once(tangents + (t - from) * stride + static_cast<std::int64_t>(at / width) * D + d)
                     : T(0);
    }
  };
  fetch(begin);
  for (std::int64_t t = begin; t < end; ++t) {
#pragma unroll
    for (int i = 0; i < Shape::prefetched; ++i)
      if (thread + i * threads < values * width) numbers[thread + i * threads] = ahead[i];
    __syncthreads();
    fetch(t + 1);
    for (int i = thread; i < width * (width / lanes); i += threads) {
      const int e = i / (width / lanes), d = i % (width / lanes) * lanes;
      Vector<T> made[k];
#pragma unroll
      for (int m = 0; m < k; ++m)
#pragma unroll
        for (int j = 0; j < lanes; ++j) made[m].v[j] = e == d + j ? numbers[(k * g + m * k) * width + d + j] : T(0);
#pragma unroll
      for (int q = 0; q < g; ++q) {
        const Vector<T> w = *reinterpret_cast<const Vector<T>*>(weights + (q * width + e) * width + d);
#pragma unroll
        for (int m = 0; m < k; ++m)
#pragma unroll
          for (int j = 0; j < lanes; ++j)
            made[m].v[j] = fused(numbers[(m * g + q) * width + d + j], w.v[j], made[m].v[j]);
      }
#pragma unroll
      for (int m = 0; m < k; ++m) *reinterpret_cast<Vector<T>*>(A + e * rows + m * width + d) = made[m];
    }
    __syncthreads();
    T sums[tr][tc] = {};
#pragma unroll 4
    for (int e = 0; e < width; ++e) {
      T a[tr], p[tc];
#pragma unroll
      for (int i = 0; i < tr; i += lanes)
        *reinterpret_cast<Vector<T>*>(a + i) = *reinterpret_cast<const Vector<T>*>(A + e * rows + row_of(i));
#pragma unroll
      for (int j = 0; j < tc; j += lanes)
        *reinterpret_cast<Vector<T>*>(p + j) = *reinterpret_cast<const Vector<T>*>(P + e * width + column + j);
#pragma unroll
      for (int i = 0; i < tr; ++i)
#pragma unroll
        for (int j = 0; j < tc; ++j) sums[i][j] = fused(a[i], p[j], sums[i][j]);
    }
#pragma unroll
    for (int other = 1; other < k; ++other)
#pragma unroll
      for (int i = 0; i < tr; ++i) {
        const int row = row_of(i), m = row / width, d = row % width;
#pragma unroll
        for (int j = 0; j < tc; ++j)
          sums[i][j] = fused(numbers[(k * g + m * k + other) * width + d], P[(other * width + d) * width + column + j],
                             sums[i][j]);
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < tr; ++i)
#pragma unroll
      for (int j = 0; j < tc; ++j) P[row_of(i) * width + column + j] = sums[i][j];
  }
  __syncthreads();
  const bool exact = slot == run.slot && run.exact;
  T* to = maps.slot(slot);
  for (int i = thread; i < rows * width; i += threads) {
    const int row = i / width, c = i % width, m = row / width, d = row % width;
    if (d < D && c < D) to[static_cast<std::int64_t>(m * D + d) * (k * D + 1) + shift * D + c] = exact ? T(0) : P[i];
  }
}

/// Scales the numbers of tokens whose largest row sum of |A| is above 1; a thread a row.
template <int k, int g, class T>
__global__ __launch_bounds__(64 * k) void clamp_tokens(T* tangents, std::int64_t tokens, const T* __restrict__ weights,
                                                       int D) {
  constexpr int width = 64, values = k * (g + k), together = 4;
  __shared__ T largest[together][2 * k];
  const int row = threadIdx.x, m = row / width, d = row % width;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * together;
  const std::int64_t stride = static_cast<std::int64_t>(values + k) * D;
  T dp[together][g], ds[together][k], sums[together] = {};
#pragma unroll
  for (int i = 0; i < together; ++i) {
    const bool there = d < D && first + i < tokens;
    const T* from = tangents + (first + i) * stride + d;
#pragma unroll
    for (int q = 0; q < g; ++q) dp[i][q] = there ? from[(m * g + q) * D] : T(0);
#pragma unroll
    for (int j = 0; j < k; ++j) ds[i][j] = there ? from[(k * g + m * k + j) * D] : T(0);
  }
  for (int e = 0; e < D; ++e) {
    T w[g];
#pragma unroll
    for (int q = 0; q < g; ++q) w[q] = weights[(q * width + e) * width + d];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      T a = e == d ? ds[i][0] : T(0);
#pragma unroll
      for (int q = 0; q < g; ++q) a = fused(dp[i][q], w[q], a);
      sums[i] += a < T(0) ? -a : a;
    }
  }
#pragma unroll
  for (int i = 0; i < together; ++i) {
#pragma unroll
    for (int j = 1; j < k; ++j) sums[i] += ds[i][j] < T(0) ? -ds[i][j] : ds[i][j];
    for (int other = 16; other > 0; other /= 2) {
      const T there = __shfl_xor_sync(0xffffffffu, sums[i], other);
      sums[i] = there > sums[i] ? there : sums[i];
    }
    if (row % 32 == 0) largest[i][row / 32] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < together; ++i) {
    T norm = 0;
#pragma unroll
    for (int j = 0; j < 2 * k; ++j) norm = largest[i][j] > norm ? largest[i][j] : norm;
    if (norm <= T(1) || d >= D || first + i >= tokens) continue;
    const T factor = T(1) / norm;
    T* to = tangents + (first + i) * stride + d;
#pragma unroll
    for (int q = 0; q < g; ++q) to[(m * g + q) * D] = dp[i][q] * factor;
#pragma unroll
    for (int j = 0; j < k; ++j) to[(k * g + m * k + j) * D] = ds[i][j] * factor;
  }
}

/// A tangent vector along tokens [begin, end) of a path, D <= 64: a thread a row of W_hh, which it keeps in registers.
template <class Gates, class T>
__global__ __launch_bounds__(64 * Gates::gates) void look_along_tokens(CellTrajectory<T> path, std::int64_t begin,
                                                                       std::int64_t end, const T* before,
                                                                       const T* __restrict__ weights,
                                                                       const T* __restrict__ bias, int D,
                                                                       GrowthSums* out) {
  constexpr int k = Gates::state, g = Gates::gates, width = 64;
  __shared__ T state[width], tangent[width], p[g * width], turned[g * width], sums_of_warps[2];
  const int thread = threadIdx.x, q = thread / width, d = thread % width;
  const bool real = d < D, owner = thread < width;
  T w[width];
#pragma unroll
  for (int e = 0; e < width; ++e) w[e] = weights[(q * width + e) * width + d];  // zero beyond D
  const T b = real ? bias[q * D + d] : T(0);
  const T even = T(1) / T(sqrt(static_cast<double>(k * D)));
  T v[k], h[k], xs[g] = {};
#pragma unroll
  for (int i = 0; i < k; ++i) {
    v[i] = real ? ((i * D + d) % 3 == 1 ? -even : even) : T(0);
    h[i] = owner && real ? before[i * D + d] : T(0);
  }
  GrowthSums sums;
  for (std::int64_t t = begin; t < end; ++t) {
    if (owner && real) {
#pragma unroll
      for (int i = 0; i < g; ++i) xs[i] = path.x[t * path.x_stride + i * D + d];
    }
    if (owner) state[d] = h[0], tangent[d] = v[0];
    __syncthreads();
    T sum[2] = {b}, moved[2] = {};
#pragma unroll
    for (int e = 0; e < width; ++e) {
      sum[e % 2] = fused(w[e], state[e], sum[e % 2]);
      moved[e % 2] = fused(w[e], tangent[e], moved[e % 2]);
    }
    p[thread] = sum[0] + sum[1], turned[thread] = moved[0] + moved[1];
    __syncthreads();
    T next[k] = {}, squares = 0;
    if (owner && real) {
      T ps[g], dp[k * g], ds[k * k];
#pragma unroll
      for (int i = 0; i < g; ++i) ps[i] = p[i * width + d];
      Gates::derivatives(xs, ps, h, dp, ds);
      Gates::step(xs, ps, h);
#pragma unroll
      for (int i = 0; i < k; ++i) {
#pragma unroll
        for (int j = 0; j < g; ++j) next[i] = fused(dp[i * g + j], turned[j * width + d], next[i]);
#pragma unroll
        for (int j = 0; j < k; ++j) next[i] = fused(ds[i * k + j], v[j], next[i]);
        squares = fused(next[i], next[i], squares);
      }
    }
    if (owner) {
      for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, other);
      if (thread % 32 == 0) sums_of_warps[thread / 32] = squares;
    }
    __syncthreads();
    const T size = sums_of_warps[0] + sums_of_warps[1];
    if (thread == 0) {
      const double growth = size > T(0) ? 0.5 * log(static_cast<double>(size)) : -700;
      sums.add(growth, growth);
    }
    const T scale = size > T(0) ? T(1) / T(sqrt(size)) : T(0);
#pragma unroll
    for (int i = 0; i < k; ++i) v[i] = size > T(0) ? next[i] * scale : real ? even : T(0);
  }
  if (thread == 0) *out = sums;
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

/// `count` neighbours in one access.
template <class T, int count>
struct alignas(count * sizeof(T)) Pack {
  T v[count];
};
template <class T, int count>
__device__ __forceinline__ Pack<T, count> load_pack(const T* p) {
  if constexpr (count * sizeof(T) == 16)
    return bits_as<Pack<T, count>>(__ldcs(reinterpret_cast<const int4*>(p)));
  else
    return *reinterpret_cast<const Pack<T, count>*>(p);
}
template <class T, int count>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, count>& values) {
  if constexpr (count * sizeof(T) == 16)
    __stcs(reinterpret_cast<int4*>(p), bits_as<int4>(values));
  else
    *reinterpret_cast<Pack<T, count>*>(p) = values;
}

/// What is left of token begin + step once W_hh h is there; a thread takes `count` channels of a segment.
template <class Gates, class T, int count>
__global__ void go_in_step(CellTrajectory<T> path, const CellSegment* list, std::int64_t padded, int D,
                           std::int64_t step, const T* __restrict__ products, const T* __restrict__ bias, T* states,
                           T* split, T* starts, T* ends, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates;
  using Values = Pack<T, count>;
  const std::int64_t j = blockIdx.x;
  const int d = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * count;
  if (d >= D) return;
  const CellSegment s = list[j];
  const std::int64_t t = s.begin + step, at = j * D + d;
  if (step < -s.warm_up || t >= s.end) return;
  const T* from = path.x + t * path.x_stride + d;
  Values xs[g], ps[g], bs[g], hs[k];
#pragma unroll
  for (int q = 0; q < g; ++q) {
    xs[q] = load_pack<T, count>(from + static_cast<std::int64_t>(q) * D);
    ps[q] = load_pack<T, count>(products + (j * g + q) * D + d);
    bs[q] = *reinterpret_cast<const Values*>(bias + q * D + d);
  }
#pragma unroll
  for (int m = 0; m < k; ++m) hs[m] = *reinterpret_cast<const Values*>(states + m * padded * D + at);
  if (threadIdx.x % (128 / sizeof(Values)) == 0 && t + 1 < s.end) {  // a line of the next token's inputs
#pragma unroll
    for (int q = 0; q < g; ++q)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + path.x_stride + static_cast<std::int64_t>(q) * D));
  }
  if (step == 0 && s.warm_up > 0)
    for (int m = 0; m < k; ++m) *reinterpret_cast<Values*>(starts + (s.slot * k + m) * D + d) = hs[m];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    T x[g], p[g], h[k];
#pragma unroll
    for (int q = 0; q < g; ++q) x[q] = xs[q].v[i], p[q] = ps[q].v[i] + bs[q].v[i];
#pragma unroll
    for (int m = 0; m < k; ++m) h[m] = hs[m].v[i];
    Gates::step(x, p, h);
#pragma unroll
    for (int m = 0; m < k; ++m) hs[m].v[i] = h[m];
    if (split) put_operand(states, split, j, D, d + i, h[0]);
  }
#pragma unroll
  for (int m = 0; m < k; ++m) {
    if (m > 0 || !split) *reinterpret_cast<Values*>(states + m * padded * D + at) = hs[m];
    if (keep && step >= 0) store_pack<T, count>(path.h + t * path.h_stride + m * D + d, hs[m]);
    if (t + 1 == s.end) *reinterpret_cast<Values*>(ends + (s.slot * k + m) * D + d) = hs[m];
  }
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
  if (folds()) {
    std::vector<T> padded(static_cast<std::size_t>(g) * fold_width * fold_width, T(0));
    for (int q = 0; q < g; ++q)
      for (int d = 0; d < D; ++d)
        for (int e = 0; e < D; ++e)
          padded[(static_cast<std::size_t>(q) * fold_width + e) * fold_width + d] =
              W[(static_cast<std::size_t>(q) * D + d) * D + e];
    by_input_ = on_device("longscan::cell::weights", padded);
    no_bias_ = on_device("longscan::cell::bias", std::vector<T>(static_cast<std::size_t>(g) * D, T(0)));
  }
  if (in_registers_) return;
  std::vector<T> by_input(W.size());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D; ++i)
    for (std::int64_t e = 0; e < D; ++e) by_input[e * g * D + i] = W[i * D + e];
  W_ = on_device("longscan::cell::weights", by_input);
  W_by_output_ = on_device("longscan::cell::weights", W);
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
  std::int64_t segments = 0;
  with_layouts<T, Gates::gates>(D_, [&](auto layouts) {
    using L = typename decltype(layouts)::Many;
    segments = processors() * L::segments_of_block * L::blocks_of_processor;
  });
  if (segments > 0) return segments;
  // in step: as many rows as leave the fewest multiprocessors without a tile of the product, in cuBLAS's usual sizes
  const bool tf32 = sizeof(T) == 4 && batch_products() != BatchProducts::plain;
  const std::int64_t tall = tf32 ? 128 : 256, wide = tf32 ? 128 : 64;
  const std::int64_t across = (Gates::gates * D_ + tall - 1) / tall;
  double most = 0;
  for (std::int64_t rows = 256; rows <= 1024; rows += wide) {
    const std::int64_t tiles = across * rows / wide, waves = (tiles + processors() - 1) / processors();
    const double busy = static_cast<double>(tiles) / static_cast<double>(waves * processors());
    if (busy > most + 0.02) most = busy, segments = rows;
  }
  return segments;
}

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
void DenseCellCuda<Gates, T>::look(cudaStream_t on, const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                                   const T* before, GrowthSums* out) const {
  look_along_tokens<Gates, T>
      <<<1, 64 * Gates::gates, 0, on>>>(path, begin, end, before, by_input_.data(), bias_.data(), D_, out);
  check_cuda(cudaGetLastError(), "looking along a path");
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::clamp(T* tangents, std::int64_t tokens) const {
  constexpr int k = Gates::state;
  if (tokens == 0) return;
  clamp_tokens<k, Gates::gates, T>
      <<<static_cast<unsigned>((tokens + 3) / 4), 64 * k, 0, stream()>>>(tangents, tokens, by_input_.data(), D_);
  check_cuda(cudaGetLastError(), "clamping Jacobians");
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::fold(const T* tangents, std::int64_t from, const SegmentGrid& grid, std::int64_t first,
                                   std::int64_t last, AffineMaps<T> maps) const {
  constexpr int k = Gates::state, g = Gates::gates;
  using Shape = FoldShape<k, g, T>;
  if (first == last) return;
  const auto bytes = static_cast<int>(Shape::shared_values * sizeof(T));
  check_cuda(cudaFuncSetAttribute(fold_segments<k, g, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "folding segments");
  fold_segments<k, g, T><<<dim3(static_cast<unsigned>(last - first), k), Shape::threads, bytes, stream()>>>(
      tangents, from, grid, first, by_input_.data(), D_, maps);
  check_cuda(cudaGetLastError(), "folding segments");
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

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run_in_step(const CellTrajectory<T>& path, const CellSegment* list,
                                          const std::vector<CellSegment>& segments, T* starts, T* ends, bool keep,
                                          bool alone) const {
  const auto count = static_cast<std::int64_t>(segments.size());
  if (!alone) {
    run_group(path, list, segments.data(), count, (count + 63) / 64 * 64, starts, ends, keep, batch_products());
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
  const bool batch = padded > 16;
  const int m = g * D_, n = static_cast<int>(padded), depth = split ? 3 * D_ : D_;
  const T* W = split ? W_split_.data() : batch ? W_by_output_.data() : W_.data();
  // Half of a warm-up only has to come near: what TF32 rounds off there is forgotten in the other half.
  const std::int64_t near = sizeof(T) == 4 && made == BatchProducts::plain && batch ? -warmest / 2 : -warmest;
  constexpr int pack = 16 / sizeof(T);
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool packs = D_ % pack == 0 && path.x_stride % pack == 0 && path.h_stride % pack == 0 && aligned(path.x) &&
                     aligned(path.h) && aligned(starts) && aligned(ends);
  const auto go = [&](auto size, std::int64_t step) {
    constexpr int channels = decltype(size)::value;
    const int block = D_ >= threads * channels ? threads : 64;
    const dim3 grid(static_cast<unsigned>(count),
                    static_cast<unsigned>((D_ + block * channels - 1) / (block * channels)));
    go_in_step<Gates, T, channels><<<grid, block, 0, stream()>>>(
        path, list, padded, D_, step, products_.data(), bias_.data(), states_.data(), operand, starts, ends, keep);
  };
  for (std::int64_t step = -warmest; step < longest; ++step) {
    products(m, n, depth, W, split || batch ? Factor::by_output : Factor::by_input, split ? operand : states_.data(),
             T(0), products_.data(), made != BatchProducts::plain || step < near);
    if (packs)
      go(std::integral_constant<int, pack>(), step);
    else
      go(std::integral_constant<int, 1>(), step);
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
