// SPDX-License-Identifier: Apache-2.0
#pragma once
// 16-bit numbers as types of their own, for kernels that are compiled for what arrays are stored as.
#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"

namespace longscan {

struct StoredBf16 {
  std::uint16_t bits;
};
struct StoredF16 {
  std::uint16_t bits;
};
KOKKOS_INLINE_FUNCTION float as_arithmetic(StoredBf16 x) { return from_bf16(x.bits); }
KOKKOS_INLINE_FUNCTION float as_arithmetic(StoredF16 x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return from_f16(x.bits);
#endif
}
KOKKOS_INLINE_FUNCTION float as_arithmetic(float x) { return x; }
KOKKOS_INLINE_FUNCTION double as_arithmetic(double x) { return x; }

/// x as `S` stores it.
template <class S>
KOKKOS_INLINE_FUNCTION S as_stored(double x) {
  return static_cast<S>(x);
}
template <class S>
KOKKOS_INLINE_FUNCTION S as_stored(float x) {
  if constexpr (std::is_same_v<S, StoredBf16>) {
#ifdef __CUDA_ARCH__
    StoredBf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    return {to_bf16(x)};
#endif
  } else if constexpr (std::is_same_v<S, StoredF16>) {
#ifdef __CUDA_ARCH__
    StoredF16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    return {to_f16(x)};
#endif
  } else {
    return static_cast<S>(x);
  }
}

/// load_once and store_once for them.
template <class S>
requires(sizeof(S) == 2) KOKKOS_INLINE_FUNCTION S load_once(const S* p) {
#ifdef __CUDA_ARCH__
  return {__ldcs(&p->bits)};
#else
  return *p;
#endif
}
template <class S>
requires(sizeof(S) == 2) KOKKOS_INLINE_FUNCTION void store_once(S* p, S value) {
#ifdef __CUDA_ARCH__
  __stcs(&p->bits, value.bits);
#else
  *p = value;
#endif
}

}  // namespace longscan
