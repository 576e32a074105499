// SPDX-License-Identifier: Apache-2.0
#pragma once
// What may differ from the float64 reference, by the type of the arithmetic: one table for all tests.
#include "longscan/types.hpp"

namespace longscan::test {

/// Differences in units of the root mean square of what is expected.
struct Tolerance {
  double rms;    ///< root mean square of the differences, keys of length one
  double worst;  ///< the largest difference
};

/// f64 1e-12, f32 2e-6 (the README's promise); the largest of many normal differences is some six times their RMS, and
/// rows of small values near large ones add to it.
constexpr Tolerance tolerance_of(DType arithmetic) {
  return arithmetic == DType::f64 ? Tolerance{1e-12, 1e-11} : Tolerance{2e-6, 2e-5};
}

/// Rounding to a stored type, relative.
constexpr double rounding_of(DType stored) {
  return stored == DType::f64 ? 0x1p-53 : stored == DType::f32 ? 0x1p-24 : stored == DType::f16 ? 0x1p-11 : 0x1p-8;
}

/// Units in the last place that exp_nonpositive may be off by.
inline constexpr double exp_ulps = 2;

}  // namespace longscan::test
