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

/// Maps that a lane of a device reads before it uses the first of them.
template <int n>
constexpr int ahead_of = is_host_space<Space> ? 1
                         : n <= 2             ? 8
                                              : 2;

template <class T, int n>
void trace_small(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out) {
  constexpr int ahead = ahead_of<n>;
  Kokkos::parallel_for(
      "longscan::affine::trace", Blocks(0, (blocks + together - 1) / together), KOKKOS_LAMBDA(const std::int64_t lane) {
        const std::int64_t first = lane * together, last = first + together < blocks ? first + together : blocks;
        std::int64_t t = 0;
        if (ahead > 1) {  // maps are read ahead of the values, which wait for one another
          T now[n];
          for (int i = 0; i < n; ++i) now[i] = y[first * n + i];
          for (; t + ahead <= count; t += ahead) {
            T read[ahead][n * (n + 1)];
            LONGSCAN_UNROLL
            for (int a = 0; a < ahead; ++a) {
              LONGSCAN_UNROLL
              for (int i = 0; i < n * (n + 1); ++i) read[a][i] = maps.slot((t + a) * blocks + first)[i];
            }
            LONGSCAN_UNROLL
            for (int a = 0; a < ahead; ++a) {
              T next[n];
              LONGSCAN_UNROLL
              for (int i = 0; i < n; ++i) {
                next[i] = read[a][i * (n + 1) + n];
                LONGSCAN_UNROLL
                for (int j = 0; j < n; ++j) next[i] += read[a][i * (n + 1) + j] * now[j];
              }
              LONGSCAN_UNROLL
              for (int i = 0; i < n; ++i) {
                now[i] = next[i];
                if (out) out[((t + a) * blocks + first) * n + i] = next[i];
              }
            }
          }
          for (int i = 0; i < n; ++i) y[first * n + i] = now[i];
        }
        for (; t < count; ++t)
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

#ifdef KOKKOS_ENABLE_CUDA
/// Blocks of at most 32 * side rows, a team each: a warp takes rows 32 apart, a lane columns 32 apart; the next map is
/// on its way while one is applied.
template <class T, int side>
void trace_in_teams(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out) {
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::LaunchBounds<1024, 1>>;
  const int n = maps.n;
  const auto policy = Policy(static_cast<int>(blocks), 1024).set_scratch_size(0, Kokkos::PerTeam(2 * 32 * side * 8));
  Kokkos::parallel_for(
      "longscan::affine::trace", policy, KOKKOS_LAMBDA(const typename Policy::member_type& member) {
        const std::int64_t b = member.league_rank();
        const int lane = member.team_rank() % 32, warp = member.team_rank() / 32;
        T* now = static_cast<T*>(member.team_scratch(0).get_shmem(2 * 32 * side * 8));
        T* next = now + 32 * side;
        if (member.team_rank() < n) now[member.team_rank()] = y[b * n + member.team_rank()];
        T read[side][side], constants[side];
        const auto load = [&](std::int64_t t) {
          LONGSCAN_UNROLL
          for (int r = 0; r < side; ++r) {
            const int i = warp + 32 * r;
            const T* row = maps.slot(t * blocks + b) + i * (n + 1);
            const bool there = i < n && t < count;
            constants[r] = there && lane == 0 ? row[n] : T(0);
            LONGSCAN_UNROLL
            for (int c = 0; c < side; ++c) read[r][c] = there && lane + 32 * c < n ? row[lane + 32 * c] : T(0);
          }
        };
        load(0);
        member.team_barrier();
        for (std::int64_t t = 0; t < count; ++t) {
          T sums[side];
          LONGSCAN_UNROLL
          for (int r = 0; r < side; ++r) {
            sums[r] = constants[r];
            LONGSCAN_UNROLL
            for (int c = 0; c < side; ++c)
              if (lane + 32 * c < n) sums[r] += read[r][c] * now[lane + 32 * c];
          }
          load(t + 1);
#ifdef __CUDA_ARCH__
          LONGSCAN_UNROLL
          for (int r = 0; r < side; ++r)
            for (int other = 16; other > 0; other /= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], other);
#endif
          LONGSCAN_UNROLL
          for (int r = 0; r < side; ++r) {
            const int i = warp + 32 * r;
            if (lane != 0 || i >= n) continue;
            next[i] = sums[r];
            if (out) out[(t * blocks + b) * n + i] = sums[r];
          }
          member.team_barrier();
          T* const other = now;
          now = next, next = other;
        }
        if (member.team_rank() < n) y[b * n + member.team_rank()] = now[member.team_rank()];
      });
}
#endif

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
#ifdef KOKKOS_ENABLE_CUDA
      if (maps.n <= 64) return trace_in_teams<T, 2>(maps, blocks, count, y, out);
      if (maps.n <= 128) return trace_in_teams<T, 4>(maps, blocks, count, y, out);
#endif
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
