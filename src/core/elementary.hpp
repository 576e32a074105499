// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elementary functions, free of branches so that loops over them vectorise. On NVIDIA devices sigmoid and tanh stand on
// the chip's own exponential and reciprocal instead of polynomials: as accurate, a third of the instructions, and other
// bits than on the host.
#include <cmath>
#include <cstdint>

#include "core/portable.hpp"

namespace longscan {

/// A function that loops over channels call. On a host it is inlined whatever its size: a call in its midst, and the
/// loop is not vectorised.
#ifdef __CUDACC__
#define LONGSCAN_INLINE_FUNCTION KOKKOS_INLINE_FUNCTION
#else
#define LONGSCAN_INLINE_FUNCTION KOKKOS_FORCEINLINE_FUNCTION
#endif

/// a * b + c with one rounding where the machine has it. Cells write every product-plus-sum this way, so that the
/// compiler has no choice to make and every instantiation has the same bits.
LONGSCAN_INLINE_FUNCTION double fused(double a, double b, double c) {
#if defined(__FMA__) || defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}
LONGSCAN_INLINE_FUNCTION float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/// |x|, which costs a device nothing where it is an operand.
LONGSCAN_INLINE_FUNCTION float magnitude(float x) {
#ifdef __CUDA_ARCH__
  return fabsf(x);
#else
  return __builtin_fabsf(x);
#endif
}
LONGSCAN_INLINE_FUNCTION double magnitude(double x) {
#ifdef __CUDA_ARCH__
  return fabs(x);
#else
  return __builtin_fabs(x);
#endif
}
/// The larger one; `a`, if `b` is not a number. One instruction on a device in float.
template <class T>
LONGSCAN_INLINE_FUNCTION T larger_of(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return fmaxf(a, b);
#endif
  return b > a ? b : a;
}

/// e^x for x <= 0 (also -infinity). Results below the smallest normal number are 0. Relative error below 2 units in
/// the last place. exp_nonpositive(0) is exactly 1.
LONGSCAN_INLINE_FUNCTION float exp_nonpositive(float x) {
  const float lowest = -87.33654f;
  const float y = x < lowest ? lowest : x;
  // nearest integer of y/ln2: adding 1.5 * 2^23 leaves it in the low bits
  const float shifted = fused(y, 1.442695041f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  const float r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, y));
  float p = 1.9875691500e-4f;
  p = fused(p, r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p * r, r, r) + 1.0f;
  const auto exponent = bits_as<std::uint32_t>(shifted) << 23;
  const float result = bits_as<float>(bits_as<std::uint32_t>(p) + exponent);
  return x < lowest ? 0.0f : result;
}

LONGSCAN_INLINE_FUNCTION double exp_nonpositive(double x) {
  const double lowest = -708.396;
  const double y = x < lowest ? lowest : x;
  const double shifted = fused(y, 1.4426950408889634, 6755399441055744.0);
  const double n = shifted - 6755399441055744.0;
  const double r = fused(n, -1.90821492927058770002e-10, fused(n, -0.693147180369123816490, y));
  double p = 1.0 / 6227020800.0;
  p = fused(p, r, 1.0 / 479001600.0);
  p = fused(p, r, 1.0 / 39916800.0);
  p = fused(p, r, 1.0 / 3628800.0);
  p = fused(p, r, 1.0 / 362880.0);
  p = fused(p, r, 1.0 / 40320.0);
  p = fused(p, r, 1.0 / 5040.0);
  p = fused(p, r, 1.0 / 720.0);
  p = fused(p, r, 1.0 / 120.0);
  p = fused(p, r, 1.0 / 24.0);
  p = fused(p, r, 1.0 / 6.0);
  p = fused(p, r, 0.5);
  p = fused(p * r, r, r) + 1.0;
  const auto exponent = bits_as<std::uint64_t>(shifted) << 52;
  const double result = bits_as<double>(bits_as<std::uint64_t>(p) + exponent);
  return x < lowest ? 0.0 : result;
}

/// e^x - 1 for x <= 0, with a small relative error near 0 too. -1 below about -87 (float) or -708 (double).
LONGSCAN_INLINE_FUNCTION float expm1_nonpositive(float x) {
  const float y = x < -87.0f ? -87.0f : x;
  const float shifted = fused(y, 1.442695041f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  const float r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, y));
  float p = 1.9875691500e-4f;
  p = fused(p, r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p * r, r, r);
  const float power = bits_as<float>((bits_as<std::uint32_t>(shifted) << 23) + 0x3F800000u);  // 2^n
  return fused(power, p, power - 1.0f);
}

LONGSCAN_INLINE_FUNCTION double expm1_nonpositive(double x) {
  const double y = x < -708.0 ? -708.0 : x;
  const double shifted = fused(y, 1.4426950408889634, 6755399441055744.0);
  const double n = shifted - 6755399441055744.0;
  const double r = fused(n, -1.90821492927058770002e-10, fused(n, -0.693147180369123816490, y));
  double p = 1.0 / 6227020800.0;
  p = fused(p, r, 1.0 / 479001600.0);
  p = fused(p, r, 1.0 / 39916800.0);
  p = fused(p, r, 1.0 / 3628800.0);
  p = fused(p, r, 1.0 / 362880.0);
  p = fused(p, r, 1.0 / 40320.0);
  p = fused(p, r, 1.0 / 5040.0);
  p = fused(p, r, 1.0 / 720.0);
  p = fused(p, r, 1.0 / 120.0);
  p = fused(p, r, 1.0 / 24.0);
  p = fused(p, r, 1.0 / 6.0);
  p = fused(p, r, 0.5);
  p = fused(p * r, r, r);
  const double power = bits_as<double>((bits_as<std::uint64_t>(shifted) << 52) + 0x3FF0000000000000ull);
  return fused(power, p, power - 1.0);
}

#ifdef __CUDA_ARCH__
namespace device {
/// 2^x (relative error 2^-22) and 1 / x (one unit in the last place); results below the normal range are 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x for 1 <= x <= 4: from 20 good bits, two steps of Newton.
__device__ __forceinline__ double reciprocal(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  double e = fused(-x, y, 1.0);
  y = fused(y, fused(e, e, e), y);
  e = fused(-x, y, 1.0);
  return fused(y, e, y);
}
}  // namespace device
#endif

/// 1 / (1 + e^-x)
template <class T>
LONGSCAN_INLINE_FUNCTION T sigmoid(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {  // 2^x may be infinite: its reciprocal is the right limit
    return device::reciprocal(1.0f + device::power_of_two(-1.442695041f * x));
  } else {
    const T e = exp_nonpositive(x < T(0) ? x : -x);
    const T s = device::reciprocal(T(1) + e);
    return x < T(0) ? e * s : s;
  }
#else
  const T e = exp_nonpositive(x < T(0) ? x : -x);
  const T s = T(1) / (T(1) + e);
  return x < T(0) ? e * s : s;
#endif
}

/// Hyperbolic tangent, relative error of a few units in the last place everywhere. (A polynomial of exp(2x) - 1 rather
/// than of exp(2x): near 0 the difference to 1 keeps its digits.)
template <class T>
LONGSCAN_INLINE_FUNCTION T hyperbolic_tangent(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    // 1 - 2 / (1 + e^2|x|) has a small absolute error; below 0.4 five terms of the series keep the relative one small
    const float w = x * x;
    float q = fused(w, 0.0088632f, -0.0218695f);
    q = fused(q, w, 0.0539683f), q = fused(q, w, -0.1333333f), q = fused(q, w, 0.3333333f);
    const float near = fused(x * w, -q, x);
    const float far =
        copysignf(fused(-2.0f, device::reciprocal(1.0f + device::power_of_two(2.885390082f * fabsf(x))), 1.0f), x);
    return fabsf(x) < 0.4f ? near : far;
  } else {
    const T m = expm1_nonpositive(T(-2) * (x < T(0) ? -x : x));
    const T t = -m * device::reciprocal(T(2) + m);
    return x < T(0) ? -t : t;
  }
#else
  const T m = expm1_nonpositive(T(-2) * (x < T(0) ? -x : x));
  const T t = -m / (T(2) + m);
  return x < T(0) ? -t : t;
#endif
}

}  // namespace longscan
