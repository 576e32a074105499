// SPDX-License-Identifier: Apache-2.0
#include "core/reference.hpp"

#include <cmath>
#include <vector>

namespace longscan::reference {
namespace {

double at(const TokenArray& x, std::int64_t t, int head, int i) {
  return load<double>(x.data, x.type, t * x.token_stride + head / x.heads_per_stored * x.head_stride + i);
}

/// The vectors of one token.
struct Token {
  std::vector<double> q, k, a, b, decay;
  double beta = 0, eta = 0;
};

Token read(const DeltaProblem& p, int head, std::int64_t t) {
  const int K = p.shape.d_key;
  const auto row = [&](const TokenArray& x) {
    std::vector<double> r(K, 0.0);
    if (x)
      for (int i = 0; i < K; ++i) r[i] = at(x, t, head, i);
    return r;
  };
  Token token{row(p.in.q), row(p.in.k), row(p.in.a), row(p.in.b), std::vector<double>(K, 1.0)};
  if (p.in.log_decay)
    for (int i = 0; i < K; ++i) token.decay[i] = std::exp(at(p.in.log_decay, t, head, p.shape.channel_decay ? i : 0));
  if (p.options.normalize_keys) {
    double norm = 0;
    for (double x : token.k) norm += x * x;
    norm = std::sqrt(norm);
    for (double& x : token.k) x = norm > 0 ? x / norm : 0;
  }
  if (p.options.variant == Variant::delta) {
    token.beta = at(p.in.beta, t, head, 0);
    token.eta = p.in.eta ? at(p.in.eta, t, head, 0) : token.beta;
  }
  return token;
}

/// One token on one row of S. `write` is this row's element of v.
void step(const DeltaProblem& p, const Token& token, double write, double* row) {
  const int K = p.shape.d_key;
  double read_before = 0, read_after = 0;  // of the state before and after the decay
  const bool dplr = p.options.variant == Variant::dplr;
  const auto& reader = dplr ? token.a : token.k;
  for (int i = 0; i < K; ++i) {
    read_before += row[i] * reader[i];
    row[i] *= token.decay[i];
    read_after += row[i] * reader[i];
  }
  if (dplr) {
    for (int i = 0; i < K; ++i) row[i] += read_before * token.b[i] + write * token.k[i];
  } else {
    const double read = p.options.erase == Erase::decayed ? read_after : read_before;
    const double x = token.eta * write - token.beta * read;
    for (int i = 0; i < K; ++i) row[i] += x * token.k[i];
  }
}

}  // namespace

void delta_rule(const DeltaProblem& p, int head, std::int64_t begin, std::int64_t end, int row_begin, int row_end,
                double* state, double* o) {
  const int K = p.shape.d_key, rows = row_end - row_begin;
  for (std::int64_t t = begin; t < end; ++t) {
    const Token token = read(p, head, t);
    for (int r = 0; r < rows; ++r) {
      double* row = state + static_cast<std::int64_t>(r) * K;
      step(p, token, at(p.in.v, t, head, row_begin + r), row);
      if (!o) continue;
      double sum = 0;
      for (int i = 0; i < K; ++i) sum += row[i] * token.q[i];
      o[(t - begin) * rows + r] = p.options.scale * sum;
    }
  }
}

void delta_map(const DeltaProblem& p, int head, std::int64_t begin, std::int64_t end, double* P, double* L) {
  const int K = p.shape.d_key, V = p.shape.d_value;
  for (int i = 0; i < K; ++i)
    for (int j = 0; j < K; ++j) P[i * K + j] = i == j;
  for (int i = 0; i < V * K; ++i) L[i] = 0;
  delta_rule(p, head, begin, end, 0, V, L, nullptr);
  for (std::int64_t t = begin; t < end; ++t) {
    const Token token = read(p, head, t);
    for (int i = 0; i < K; ++i) step(p, token, 0, P + static_cast<std::int64_t>(i) * K);
  }
}

}  // namespace longscan::reference
