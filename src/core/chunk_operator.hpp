// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one chunk of the delta rule does, as matrices over its tokens, in double precision and from the definitions: to
// look at, and to measure how hard a sequence is. Nothing here is used to solve.
#include <vector>

#include "core/reference.hpp"

namespace longscan::reference {

/// A [C][C] of tokens [begin, begin + C) of a head, strictly lower: X = A X + U + A^ S_0 (see core/delta_chunk.hpp), so
/// A_ts = b_s^T Gamma(s..t') a_t; without decay -beta_t k_t^T k_s. Cost: C^2 K multiplications.
std::vector<double> chunk_matrix(const DeltaProblem& problem, int head, std::int64_t begin, int C);

/// T = (I - A)^-1 by forward substitution: T_ts is how much of what token s writes is in what token t writes.
std::vector<double> propagation(const std::vector<double>& A, int C);

/// M [C][C], lower: o_t = sum_s M_ts v_s + what comes from before the chunk. Found by giving the recurrence v = I.
std::vector<double> output_map(const DeltaProblem& problem, int head, std::int64_t begin, int C);

/// X Y for lower triangular [C][C].
std::vector<double> lower_product(const std::vector<double>& X, const std::vector<double>& Y, int C);

/// A bound on |A| that holds for every leading block: the smaller of the largest row sum and the Frobenius norm; what
/// the solver takes (Inverse::neumann).
double norm_bound(const std::vector<double>& A, int C);

/// Terms of I + A + A^2 + ... that leave less than `tolerance`, by the bound: |A|^(N+1) / (1 - |A|) <= tolerance. A is
/// nilpotent, so never more than C - 1.
int series_terms(double norm, int C, double tolerance);

}  // namespace longscan::reference
