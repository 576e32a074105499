// SPDX-License-Identifier: Apache-2.0
#pragma once
// Points through one map after another on a CUDA device: y <- A y + b, float, A of 32, 64, 96 or 128 rows, 16 columns
// of y a team of 256 threads. Eight threads share four rows, a slice of the products each; y is in shared memory, and
// the numbers of the map that is next are on their way while those of the one at hand are used. A column's bits do not
// depend on the others.
#include <cstddef>

#include "core/affine.hpp"

namespace longscan {

struct AffineRows {
  static constexpr int team = 256, width = 16;
  static constexpr int slices = 8, rows = 4;
  static constexpr int most = 128 / (4 * slices);  ///< fours of a row that a thread has

  template <class T>
  KOKKOS_INLINE_FUNCTION static bool takes(const AffineMaps<T>& maps) {
    return sizeof(T) == 4 && maps.padded && maps.n % (4 * slices) == 0 && maps.n <= 4 * slices * most;
  }
  template <class T>
  static std::size_t scratch_bytes(const AffineMaps<T>& maps) {
    return takes(maps) ? sizeof(float) * 2 * maps.n * width + 16 : 0;
  }

#ifdef __CUDACC__
  /// Where four columns of row k of y lie: the eight rows that the slices read at once are in different banks.
  __device__ static int place(int k, int column) {
    return width * (k ^ (k / 16 & 1)) + 4 * ((column / 4 + k / 4) & 3) + column % 4;
  }
  /// The sums of all slices, of which each thread keeps a part: half of the `n` at a time.
  template <int n, int bit>
  __device__ static void share(float* sum, int slice) {
    const bool upper = slice & bit;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + n / 2], bit);
      sum[i] = (upper ? sum[i + n / 2] : sum[i]) + other;
    }
  }

  /// Columns [begin, begin + 16) of `from`, rows `leading` apart as in all targets, through `count` maps; map(j),
  /// target(j): the j-th, and where its result goes.
  template <class Member, class Map, class Target>
  __device__ static void run(const Member& member, const AffineMaps<float>& shape, const float* from, int leading,
                             int begin, std::int64_t count, const Map& map, const Target& target) {
#ifdef __CUDA_ARCH__
    if (count == 0) return;
    const int n = shape.n, fours = n / (4 * slices), first = member.team_rank() / slices * rows;
    const int slice = member.team_rank() % slices;
    const bool active = first < n;
    float* y = static_cast<float*>(member.team_scratch(0).get_shmem_aligned(sizeof(float) * 2 * n * width, 16));
    float* next_y = y + n * width;
    for (int i = member.team_rank(); i < n * width; i += team)
      y[place(i / width, i % width)] = from[i / width * leading + begin + i % width];

    // of the results a thread has eight columns of a row
    const int row = first + slice / 2, column = slice % 2 * (width / 2);
    float4 A[rows][most], b[2];
    const auto load_four = [&](const float* m, int r, int i) {
      return *reinterpret_cast<const float4*>(m + (first + r) * shape.leading + 4 * (slice + slices * i));
    };
    const auto load_constants = [&](const float* m) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        b[c] = *reinterpret_cast<const float4*>(m + row * shape.leading + n + begin + column + 4 * c);
    };
    if (active) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int i = 0; i < most; ++i)
          if (i < fours) A[r][i] = load_four(map(0), r, i);
      }
      load_constants(map(0));
    }
    member.team_barrier();
    for (std::int64_t j = 0; j < count; ++j) {
      const float* next = j + 1 < count ? map(j + 1) : nullptr;
      float sum[rows * width] = {};
#pragma unroll
      for (int i = 0; i < most; ++i) {
        if (!active || i >= fours) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int c = 0; c < width; c += 4) {
            const float4 x = *reinterpret_cast<const float4*>(y + place(4 * (slice + slices * i) + e, c));
#pragma unroll
            for (int r = 0; r < rows; ++r) {
              const float a = e == 0 ? A[r][i].x : e == 1 ? A[r][i].y : e == 2 ? A[r][i].z : A[r][i].w;
              float* s = sum + r * width + c;
              s[0] += a * x.x, s[1] += a * x.y, s[2] += a * x.z, s[3] += a * x.w;
            }
          }
        }
#pragma unroll
        for (int r = 0; r < rows; ++r)
          if (next) A[r][i] = load_four(next, r, i);
      }
      share<64, 4>(sum, slice), share<32, 2>(sum, slice), share<16, 1>(sum, slice);
      if (active) {
        float* to = target(j) + row * leading + begin + column;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float4 x = {sum[4 * c] + b[c].x, sum[4 * c + 1] + b[c].y, sum[4 * c + 2] + b[c].z,
                            sum[4 * c + 3] + b[c].w};
          *reinterpret_cast<float4*>(next_y + place(row, column + 4 * c)) = x;
          *reinterpret_cast<float4*>(to + 4 * c) = x;
        }
        if (next) load_constants(next);
      }
      float* const old = y;
      y = next_y, next_y = old;
      member.team_barrier();
    }
#endif
  }
#endif
};

}  // namespace longscan
