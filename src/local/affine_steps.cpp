// SPDX-License-Identifier: Apache-2.0
#include "local/affine_steps.hpp"

#include <vector>

namespace longscan {
namespace {

using Space = Kokkos::DefaultExecutionSpace;
using Blocks = Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>;

/// Blocks of up to this many rows live in registers.
constexpr int small = 4;
/// Neighbouring blocks that one lane takes: on a host a cache line's worth, on a device one.
constexpr std::int64_t together = is_host_space<Space> ? 32 : 1;

template <class T, int n>
void trace_small(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out) {
  Kokkos::parallel_for(
      "longscan::affine::trace", Blocks(0, (blocks + together - 1) / together), KOKKOS_LAMBDA(const std::int64_t lane) {
        const std::int64_t first = lane * together, last = first + together < blocks ? first + together : blocks;
        for (std::int64_t t = 0; t < count; ++t)
          for (std::int64_t b = first; b < last; ++b) {
            const T* map = maps.slot(t * blocks + b);
            T next[n];
            for (int i = 0; i < n; ++i) {
              next[i] = map[i * (n + 1) + n];
              for (int j = 0; j < n; ++j) next[i] += map[i * (n + 1) + j] * y[b * n + j];
            }
            for (int i = 0; i < n; ++i) {
              y[b * n + i] = next[i];
              if (out) out[(t * blocks + b) * n + i] = next[i];
            }
          }
      });
}

template <class T, int n>
void fold_small(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, const AffineMaps<T>& folded) {
  Kokkos::parallel_for(
      "longscan::affine::fold", Blocks(0, (blocks + together - 1) / together), KOKKOS_LAMBDA(const std::int64_t lane) {
        const std::int64_t first = lane * together, last = first + together < blocks ? first + together : blocks;
        for (std::int64_t t = 0; t < count; ++t)
          for (std::int64_t b = first; b < last; ++b) {
            const T* map = maps.slot(t * blocks + b);
            T* to = folded.slot(b);
            T next[n * (n + 1)];
            for (int i = 0; i < n; ++i)
              for (int j = 0; j <= n; ++j) {
                T sum = j == n ? map[i * (n + 1) + n] : T(0);
                for (int m = 0; m < n; ++m) sum += map[i * (n + 1) + m] * to[m * (n + 1) + j];
                next[i * (n + 1) + j] = sum;
              }
            for (int i = 0; i < n * (n + 1); ++i) to[i] = next[i];
          }
      });
}

/// Large blocks, few of them: rows side by side, token by token.
template <class T>
void trace_large(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out) {
  const int n = maps.n;
  Kokkos::View<T*, typename Space::memory_space> next("longscan::affine::next", blocks * n);
  for (std::int64_t t = 0; t < count; ++t) {
    Kokkos::parallel_for(
        "longscan::affine::trace", Blocks(0, blocks * n), KOKKOS_LAMBDA(const std::int64_t i) {
          const std::int64_t b = i / n;
          const T* row = maps.slot(t * blocks + b) + i % n * (n + 1);
          T sums[8] = {};  // partial sums, so that it vectorises
          int j = 0;
          for (; j + 8 <= n; j += 8)
            for (int m = 0; m < 8; ++m) sums[m] += row[j + m] * y[b * n + j + m];
          T sum = row[n];
          for (; j < n; ++j) sum += row[j] * y[b * n + j];
          for (int m = 0; m < 8; ++m) sum += sums[m];
          next(i) = sum;
        });
    Kokkos::parallel_for(
        "longscan::affine::trace", Blocks(0, blocks * n), KOKKOS_LAMBDA(const std::int64_t i) {
          y[i] = next(i);
          if (out) out[t * blocks * n + i] = next(i);
        });
  }
}

template <class T>
void fold_large(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, const AffineMaps<T>& folded) {
  const int n = maps.n;
  const std::int64_t row = n + 1, size = n * row;
  Kokkos::View<T*, typename Space::memory_space> next("longscan::affine::next", blocks * size);
  for (std::int64_t t = 0; t < count; ++t) {
    Kokkos::parallel_for(
        "longscan::affine::fold", Blocks(0, blocks * n), KOKKOS_LAMBDA(const std::int64_t r) {
          const std::int64_t b = r / n, i = r % n;
          const T* a = maps.slot(t * blocks + b) + i * row;
          const T* from = folded.slot(b);
          T* to = next.data() + b * size + i * row;
          for (int j = 0; j < row; ++j) to[j] = j == n ? a[n] : T(0);
          for (int m = 0; m < n; ++m) {
            const T x = a[m];
            for (int j = 0; j < row; ++j) to[j] += x * from[m * row + j];
          }
        });
    Kokkos::parallel_for(
        "longscan::affine::fold", Blocks(0, blocks * size),
        KOKKOS_LAMBDA(const std::int64_t i) { folded.slot(i / size)[i % size] = next(i); });
  }
}

}  // namespace

template <class T>
void affine_trace(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out) {
  switch (maps.n) {
    case 1:
      return trace_small<T, 1>(maps, blocks, count, y, out);
    case 2:
      return trace_small<T, 2>(maps, blocks, count, y, out);
    case 3:
      return trace_small<T, 3>(maps, blocks, count, y, out);
    case small:
      return trace_small<T, small>(maps, blocks, count, y, out);
    default:
      return trace_large(maps, blocks, count, y, out);
  }
}

template <class T>
void affine_fold(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, const AffineMaps<T>& folded) {
  switch (maps.n) {
    case 1:
      return fold_small<T, 1>(maps, blocks, count, folded);
    case 2:
      return fold_small<T, 2>(maps, blocks, count, folded);
    case 3:
      return fold_small<T, 3>(maps, blocks, count, folded);
    case small:
      return fold_small<T, small>(maps, blocks, count, folded);
    default:
      return fold_large(maps, blocks, count, folded);
  }
}

template <class T>
void affine_reshape(const AffineMaps<T>& maps, std::int64_t slots, Reshape how) {
  if (how == Reshape::keep) return;
  const int n = maps.n;
  Kokkos::parallel_for(
      "longscan::affine::reshape", Blocks(0, slots), KOKKOS_LAMBDA(const std::int64_t s) {
        T* map = maps.slot(s);
        T factor = 1;
        if (how == Reshape::clamp) {
          T norm = 0;
          for (int i = 0; i < n; ++i) {
            T sum = 0;
            for (int j = 0; j < n; ++j)
              sum += map[i * (n + 1) + j] < T(0) ? -map[i * (n + 1) + j] : map[i * (n + 1) + j];
            norm = sum > norm ? sum : norm;
          }
          if (norm <= T(1)) return;
          factor = T(1) / norm;
        }
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < n; ++j) {
            T& a = map[i * (n + 1) + j];
            a = how == Reshape::clamp ? a * factor : how == Reshape::identity ? T(i == j) : T(0);
          }
      });
}

#define LONGSCAN_INSTANTIATE(T)                                                                      \
  template void affine_trace(const AffineMaps<T>&, std::int64_t, std::int64_t, T*, T*);              \
  template void affine_fold(const AffineMaps<T>&, std::int64_t, std::int64_t, const AffineMaps<T>&); \
  template void affine_reshape(const AffineMaps<T>&, std::int64_t, Reshape);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
