// SPDX-License-Identifier: Apache-2.0
// The operator of a chunk against the recurrence, token by token.
#include "core/chunk_operator.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/random.hpp"

namespace longscan::reference {
namespace {

constexpr int T = 15, begin = 3, C = 12, K = 5, V = 2;

/// Random numbers for T tokens of one head; the chunk is the last C of them.
struct Case {
  explicit Case(Variant variant, Erase erase, int decay_width) {
    problem.shape = {1, K, V, decay_width > 1};
    problem.options.variant = variant, problem.options.erase = erase, problem.options.scale = 0.5;
    problem.in.q = array(0, K), problem.in.k = array(1, K), problem.in.v = array(2, V);
    if (variant == Variant::dplr)
      problem.in.a = array(3, K), problem.in.b = array(4, K);
    else
      problem.in.beta = array(5, 1), problem.in.eta = array(6, 1);
    if (decay_width > 0) {
      problem.in.log_decay = array(7, decay_width);
      for (double& g : values[7]) g = -std::abs(g);
    }
  }
  TokenArray array(int stream, int width) {
    values[stream].resize(T * width);
    for (int i = 0; i < T * width; ++i) values[stream][i] = 0.6 * random_normal(1, stream, i);
    return {values[stream].data(), DType::f64, width, 0, 1};
  }
  double at(int stream, int t, int width, int i) const { return values[stream][t * width + i]; }

  std::vector<double> values[8];
  DeltaProblem problem;
};

TEST(ChunkOperator, OutputMapGivesTheOutputs) {
  for (Variant variant : {Variant::delta, Variant::dplr})
    for (Erase erase : {Erase::decayed, Erase::undecayed})
      for (int decay : {0, 1, K}) {
        const Case c(variant, erase, decay);
        const auto M = output_map(c.problem, 0, begin, C);
        std::vector<double> state(V * K, 0.0), o(C * V);
        delta_rule(c.problem, 0, begin, begin + C, 0, V, state.data(), o.data());
        for (int t = 0; t < C; ++t)
          for (int j = 0; j < V; ++j) {
            double sum = 0;
            for (int s = 0; s <= t; ++s) sum += M[t * C + s] * c.at(2, begin + s, V, j);
            EXPECT_NEAR(sum, o[t * V + j], 1e-12);
          }
      }
}

// S_t = S_{t-1} D_t + x_t k_t^T: what is written, x, is T times what is asked to be written, eta v.
TEST(ChunkOperator, PropagationGivesWhatIsWritten) {
  for (Erase erase : {Erase::decayed, Erase::undecayed})
    for (int decay : {0, 1, K}) {
      const Case c(Variant::delta, erase, decay);
      const auto A = chunk_matrix(c.problem, 0, begin, C), P = propagation(A, C);
      std::vector<double> state(V * K, 0.0);
      for (int t = 0; t < C; ++t) {
        std::vector<double> before = state;
        delta_rule(c.problem, 0, begin + t, begin + t + 1, 0, V, state.data(), nullptr);
        for (int j = 0; j < V; ++j) {
          double written = 0, norm = 0, expected = 0;
          for (int i = 0; i < K; ++i) {
            const double k = c.at(1, begin + t, K, i);
            const double d = decay == 0 ? 1 : std::exp(c.at(7, begin + t, decay, decay > 1 ? i : 0));
            written += (state[j * K + i] - before[j * K + i] * d) * k, norm += k * k;
          }
          for (int s = 0; s <= t; ++s) expected += P[t * C + s] * c.at(6, begin + s, 1, 0) * c.at(2, begin + s, V, j);
          EXPECT_NEAR(written / norm, expected, 1e-10);
        }
      }
    }
}

TEST(ChunkOperator, PathsAddUpToTheOperator) {
  const Case c(Variant::dplr, Erase::decayed, 1);
  const auto A = chunk_matrix(c.problem, 0, begin, C), P = propagation(A, C);
  std::vector<double> sum(C * C, 0.0), power = A;
  for (int i = 0; i < C; ++i) sum[i * C + i] = 1;
  for (int n = 1; n < C; ++n) {
    for (int i = 0; i < C * C; ++i) sum[i] += power[i];
    power = lower_product(power, A, C);
  }
  for (int i = 0; i < C * C; ++i) EXPECT_NEAR(sum[i], P[i], 1e-10);
  for (double x : power) EXPECT_EQ(x, 0);  // A is nilpotent
}

TEST(ChunkOperator, SeriesTerms) {
  EXPECT_EQ(series_terms(0, 64, 1e-7), 0);
  EXPECT_EQ(series_terms(2, 64, 1e-7), 63);
  EXPECT_EQ(series_terms(1e-9, 64, 1e-7), 1);
  for (double m : {0.1, 0.5, 0.7}) {
    const int n = series_terms(m, 1000, 1e-7);
    EXPECT_LE(std::pow(m, n + 1) / (1 - m), 1e-7);
    EXPECT_GT(std::pow(m, n) / (1 - m), 1e-7);
  }
}

}  // namespace
}  // namespace longscan::reference
