// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <functional>

#include "apps/options.hpp"
#include "apps/sources.hpp"

namespace longscan {

/// Collective. Recomputes and compares; throws Error(numerical) if they differ.
void verify_delta(Transport& ranks, const VerifyCommand& command);
void verify_newton(Transport& ranks, const VerifyCommand& command);

/// Throws Error(bad_input) if the output was made from another input than these sources of `input`.
void require_same_input(const VerifyCommand& command, const InputFile& input, const InputFile& output,
                        const std::vector<const Source*>& sources);

/// Throws Error(bad_input) if a dataset of the output is not there or has another shape.
void require_shape(const VerifyCommand& command, const InputFile& output, const std::string& path,
                   const std::vector<std::int64_t>& shape);

/// What may differ, set by the coarser of the arithmetic and the type stored.
struct Allowance {
  double of_rms = 0;   ///< of the RMS of all expected values
  double of_size = 0;  ///< besides, of the size of the values around one
};
/// `tolerance`, where it is positive, is what the user wants.
Allowance allowed_difference(DType stored, Precision arithmetic, double tolerance);

/// Differences of one dataset, gathered over places and ranks.
struct Difference {
  Allowance allowed;
  double squares = 0;  ///< of the expected values
  double errors = 0;   ///< squares of the differences
  std::int64_t values = 0;
  std::int64_t not_finite = 0;  ///< got or expected; in neither sum
  double worst = 0;             ///< largest |got - expected| beyond what its size allows; infinity: got is not finite
  std::string where;            ///< of the worst

  /// `size`: of the expected values around, this one among them.
  void add(double got, double expected, double size, const std::function<std::string()>& place);
  /// Collective: totals, and the worst one's place.
  void reduce(Transport& ranks);
  /// The worst difference, and the root mean square of all, over the root mean square of the expected values.
  double ratio() const;
  double rms_ratio() const;
  bool passes() const { return not_finite == 0 && ratio() <= allowed.of_rms; }
  /// "dataset '/o' at token 3, head 0 differs by 2.1e-03 of the RMS"
  std::string complaint() const;
  /// One line of result on stdout, rank 0's business.
  void print(const char* what, bool sample) const;
};

}  // namespace longscan
