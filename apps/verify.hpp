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

/// Differences of one dataset, gathered over places and ranks.
struct Difference {
  double squares = 0;  ///< of the expected values
  double errors = 0;   ///< squares of the differences
  std::int64_t values = 0;
  double worst = 0;   ///< largest |got - expected|
  std::string where;  ///< of the worst

  void add(double got, double expected, const std::function<std::string()>& place);
  /// Collective: totals, and the worst one's place.
  void reduce(Transport& ranks);
  /// The worst difference, and the root mean square of all, over the root mean square of the expected values.
  double ratio() const;
  double rms_ratio() const;
  /// "dataset '/o' at token 3, head 0 differs by 2.1e-03 of the RMS"
  std::string complaint() const;
  /// One line of result on stdout, rank 0's business.
  void print(const char* what, double limit, bool sample) const;
};

/// What may differ, in units of the RMS: set by the coarser of the arithmetic and the type stored.
double allowed_difference(DType stored, Precision arithmetic);

}  // namespace longscan
