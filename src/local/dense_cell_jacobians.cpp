// SPDX-License-Identifier: Apache-2.0
// Full Jacobians of small cells: their products, their norms, and a tangent vector.
#include "local/dense_cell_layouts.hpp"

namespace longscan {

using namespace dense;

namespace {

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

}  // namespace

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
void DenseCellCuda<Gates, T>::look(cudaStream_t on, const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                                   const T* before, GrowthSums* out) const {
  look_along_tokens<Gates, T>
      <<<1, 64 * Gates::gates, 0, on>>>(path, begin, end, before, by_input_.data(), bias_.data(), D_, out);
  check_cuda(cudaGetLastError(), "looking along a path");
}

#define LONGSCAN_INSTANTIATE(Gates, T)                                                                                \
  template void DenseCellCuda<Gates, T>::clamp(T*, std::int64_t) const;                                               \
  template void DenseCellCuda<Gates, T>::fold(const T*, std::int64_t, const SegmentGrid&, std::int64_t, std::int64_t, \
                                              AffineMaps<T>) const;                                                   \
  template void DenseCellCuda<Gates, T>::look(cudaStream_t, const CellTrajectory<T>&, std::int64_t, std::int64_t,     \
                                              const T*, GrowthSums*) const;
LONGSCAN_FOR_DENSE_CELLS(LONGSCAN_INSTANTIATE)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
