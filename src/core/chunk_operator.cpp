// SPDX-License-Identifier: Apache-2.0
#include "core/chunk_operator.hpp"

#include <algorithm>
#include <cmath>

namespace longscan::reference {
namespace {

/// Tokens [begin, begin + C) of one role, [C][K]; `width` 1 is one value for all channels.
std::vector<double> rows(const TokenArray& x, int head, std::int64_t begin, int C, int K, int width) {
  std::vector<double> r(static_cast<std::size_t>(C) * K);
  for (int t = 0; t < C; ++t)
    for (int i = 0; i < K; ++i)
      r[static_cast<std::size_t>(t) * K + i] =
          load<double>(x.data, x.type,
                       (begin + t) * x.token_stride + head / x.heads_per_stored * x.head_stride + (width > 1 ? i : 0));
  return r;
}

}  // namespace

std::vector<double> chunk_matrix(const DeltaProblem& p, int head, std::int64_t begin, int C) {
  const int K = p.shape.d_key;
  const bool dplr = p.options.variant == Variant::dplr;
  std::vector<double> b = rows(dplr ? p.in.b : p.in.k, head, begin, C, K, K), a;
  if (p.options.normalize_keys && !dplr)
    for (int t = 0; t < C; ++t) {
      double* k = &b[static_cast<std::size_t>(t) * K];
      double norm = 0;
      for (int i = 0; i < K; ++i) norm += k[i] * k[i];
      for (int i = 0; i < K; ++i) k[i] = norm > 0 ? k[i] / std::sqrt(norm) : 0;
    }
  if (dplr) {
    a = rows(p.in.a, head, begin, C, K, K);
  } else {
    const std::vector<double> beta = rows(p.in.beta, head, begin, C, 1, 1);
    a = b;
    for (int t = 0; t < C; ++t)
      for (int i = 0; i < K; ++i) a[static_cast<std::size_t>(t) * K + i] *= -beta[t];
  }
  std::vector<double> decay;
  if (p.in.log_decay) {
    decay = rows(p.in.log_decay, head, begin, C, K, p.shape.channel_decay ? K : 1);
    for (double& d : decay) d = std::exp(d);
  }
  const bool reads_before = dplr || p.options.erase == Erase::undecayed;  // t' = t - 1
  std::vector<double> A(static_cast<std::size_t>(C) * C, 0.0), w(K);
  for (int s = 0; s < C; ++s) {
    std::copy_n(&b[static_cast<std::size_t>(s) * K], K, w.begin());  // Gamma(s..t) b_s
    for (int t = s + 1; t < C; ++t) {
      const double* row = &a[static_cast<std::size_t>(t) * K];
      const auto dot = [&] {
        double sum = 0;
        for (int i = 0; i < K; ++i) sum += w[i] * row[i];
        return sum;
      };
      double entry = reads_before ? dot() : 0;
      if (!decay.empty())
        for (int i = 0; i < K; ++i) w[i] *= decay[static_cast<std::size_t>(t) * K + i];
      if (!reads_before) entry = dot();
      A[static_cast<std::size_t>(t) * C + s] = entry;
    }
  }
  return A;
}

std::vector<double> propagation(const std::vector<double>& A, int C) {
  std::vector<double> T(A.size(), 0.0);
  for (int t = 0; t < C; ++t) {
    double* row = &T[static_cast<std::size_t>(t) * C];
    row[t] = 1;
    for (int m = 0; m < t; ++m)
      for (int s = 0; s <= m; ++s)
        row[s] += A[static_cast<std::size_t>(t) * C + m] * T[static_cast<std::size_t>(m) * C + s];
  }
  return T;
}

std::vector<double> output_map(const DeltaProblem& p, int head, std::int64_t begin, int C) {
  const std::size_t first = static_cast<std::size_t>(begin) * C;
  std::vector<double> identity(first + static_cast<std::size_t>(C) * C, 0.0), M(static_cast<std::size_t>(C) * C);
  for (int t = 0; t < C; ++t) identity[first + static_cast<std::size_t>(t) * C + t] = 1;
  DeltaProblem q = p;
  q.shape.d_value = C;
  q.in.v = {identity.data(), DType::f64, C, 0, 1};
  std::vector<double> state(static_cast<std::size_t>(C) * p.shape.d_key, 0.0);
  delta_rule(q, head, begin, begin + C, 0, C, state.data(), M.data());
  return M;
}

std::vector<double> lower_product(const std::vector<double>& X, const std::vector<double>& Y, int C) {
  std::vector<double> Z(X.size(), 0.0);
  for (int t = 0; t < C; ++t)
    for (int m = 0; m <= t; ++m) {
      const double x = X[static_cast<std::size_t>(t) * C + m];
      if (x == 0) continue;
      for (int s = 0; s <= m; ++s) Z[static_cast<std::size_t>(t) * C + s] += x * Y[static_cast<std::size_t>(m) * C + s];
    }
  return Z;
}

double norm_bound(const std::vector<double>& A, int C) {
  double largest = 0, squares = 0;
  for (int t = 0; t < C; ++t) {
    double sum = 0;
    for (int s = 0; s < t; ++s) {
      const double x = A[static_cast<std::size_t>(t) * C + s];
      sum += std::abs(x), squares += x * x;
    }
    largest = std::max(largest, sum);
  }
  return std::min(largest, std::sqrt(squares));
}

int series_terms(double norm, int C, double tolerance) {
  if (norm <= 0) return 0;
  if (!(norm < 1)) return std::max(0, C - 1);
  const double needed = std::ceil(std::log(tolerance * (1 - norm)) / std::log(norm)) - 1;
  return static_cast<int>(std::min<double>(std::max(1.0, needed), std::max(0, C - 1)));
}

}  // namespace longscan::reference
