// SPDX-License-Identifier: Apache-2.0
#pragma once
// Points through one map after another on a device: y <- A y + b, float, A of up to 128 rows, 16 columns of y a team of
// 256 threads. A thread has a row and a slice of its products; y is in shared memory, and a row's numbers of the map
// that is next are on their way while those of the one at hand are used. A column's bits do not depend on the others.
#include <cstddef>

#include "core/affine.hpp"

namespace longscan {

struct AffineRows {
  static constexpr int team = 256, width = 16;
  static constexpr int leading = 20;  ///< of y in shared memory: slices of it lie in different banks
  static constexpr int quads = 16;    ///< fours of a row that a thread has

  /// Threads to a row: a power of two.
  KOKKOS_INLINE_FUNCTION static int slices(int n) {
    int s = 1;
    while (2 * s * n <= team && n / 4 % (2 * s) == 0 && s < 8) s *= 2;
    return s;
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static bool takes(const AffineMaps<T>& maps) {
    if constexpr (sizeof(T) != 4) return false;
    return maps.padded && maps.n % 4 == 0 && maps.n * slices(maps.n) <= team && maps.n / 4 / slices(maps.n) <= quads;
  }
  template <class T>
  static std::size_t scratch_bytes(const AffineMaps<T>& maps) {
    return takes(maps) ? sizeof(float) * 2 * maps.n * leading + 16 : 0;
  }

#ifdef __CUDACC__
  /// Columns [begin, begin + 16) of `from`, rows `from_leading` apart as in all targets, through `count` maps; map(j),
  /// target(j): the j-th, and where its result goes.
  template <class Member, class Map, class Target>
  __device__ static void run(const Member& member, const AffineMaps<float>& shape, const float* from, int from_leading,
                             int begin, std::int64_t count, const Map& map, const Target& target) {
#ifdef __CUDA_ARCH__
    if (count == 0) return;
    const int n = shape.n, s = slices(n), row = member.team_rank() / s, slice = member.team_rank() % s;
    const int fours = n / 4 / s;
    const bool active = row < n;
    float* y = static_cast<float*>(member.team_scratch(0).get_shmem_aligned(sizeof(float) * 2 * n * leading, 16));
    float* next_y = y + n * leading;
    for (int i = member.team_rank(); i < n * width; i += team)
      y[i / width * leading + i % width] = from[i / width * from_leading + begin + i % width];

    float4 A[quads];
    float b[width];
    const auto load_four = [&](const float* m, int i) {
      return *reinterpret_cast<const float4*>(m + row * shape.leading + 4 * (slice + s * i));
    };
    const auto mine = [&](int c) { return active && c * s / width == slice; };
    const auto load_constants = [&](const float* m) {
#pragma unroll
      for (int c = 0; c < width; ++c)
        b[c] = mine(c) && begin + c < shape.m ? m[row * shape.leading + n + begin + c] : 0.f;
    };
    const float* at = map(0);
#pragma unroll
    for (int i = 0; i < quads; ++i)
      if (active && i < fours) A[i] = load_four(at, i);
    load_constants(at);
    member.team_barrier();
    for (std::int64_t j = 0; j < count; ++j) {
      const float* next = j + 1 < count ? map(j + 1) : nullptr;
      float sum[width] = {};
#pragma unroll
      for (int i = 0; i < quads; ++i) {
        if (!active || i >= fours) continue;
        const float a[4] = {A[i].x, A[i].y, A[i].z, A[i].w};
        if (next) A[i] = load_four(next, i);
        const float* rows = y + 4 * (slice + s * i) * leading;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int c = 0; c < width; c += 4) {
            const float4 x = *reinterpret_cast<const float4*>(rows + e * leading + c);
            sum[c] += a[e] * x.x, sum[c + 1] += a[e] * x.y, sum[c + 2] += a[e] * x.z, sum[c + 3] += a[e] * x.w;
          }
        }
      }
      for (int other = 1; other < s; other *= 2) {
#pragma unroll
        for (int c = 0; c < width; ++c) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], other);
      }
      float* to = target(j);
#pragma unroll
      for (int c = 0; c < width; ++c)
        if (mine(c)) to[row * from_leading + begin + c] = next_y[row * leading + c] = sum[c] + b[c];
      if (next) load_constants(next);
      float* const old = y;
      y = next_y, next_y = old;
      member.team_barrier();
    }
#endif
  }
#endif
};

}  // namespace longscan
