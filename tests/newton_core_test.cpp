// SPDX-License-Identifier: Apache-2.0
// Nonlinear cells on one process: their steps, their Jacobians, growth, chains of affine maps, projections, checks.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/cell_reference.hpp"
#include "core/cells.hpp"
#include "core/device_memory.hpp"
#include "local/affine_steps.hpp"
#include "local/dense_cell_kernel.hpp"
#include "local/projection.hpp"
#include "local/shooting_steps.hpp"
#include "longscan/cells.hpp"
#include "newton_cases.hpp"
#include "tolerances.hpp"

namespace longscan {
namespace {

using test::all_cells;
using test::make_weights;
using test::normals;
using test::RandomCell;

template <class T>
std::vector<T> as(const std::vector<double>& v) {
  return {v.begin(), v.end()};
}

/// The same where kernels reach it.
template <class T, class Values>
SharedVector<T> shared(const Values& v) {
  return {v.begin(), v.end()};
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0, squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i])), squares += b[i] * b[i];
  return worst == 0 ? 0 : worst / std::sqrt(squares / static_cast<double>(a.size()));
}

// --- steps

template <class T>
void token_loop_is_the_reference(const RandomCell& cell) {
  const std::int64_t tokens = 50, D = cell.D, L = cell.layers * cell.directions;
  const CellWeights weights = make_weights(cell);
  const NetworkShape shape = network_shape(weights, static_cast<int>(cell.inputs));
  const auto x = normals(tokens * cell.inputs, 7, 1), h0 = normals(L * D, 7, 2), c0 = normals(L * D, 7, 3);
  const auto expected = reference::network(weights, shape, x.data(), tokens, h0.data(), c0.data());

  NewtonOptions options;
  options.method = NewtonMethod::sequential, options.precision = sizeof(T) == 8 ? Precision::f64 : Precision::f32;
  const auto alone = make_single_transport();
  Newton newton(*alone, weights, static_cast<int>(cell.inputs), options, {{0, tokens}});
  const auto x_T = as<T>(x), h0_T = as<T>(h0), c0_T = as<T>(c0);
  std::vector<T> h(tokens * cell.directions * D), c(h.size()), h_final(L * D), c_final(L * D);
  const NewtonReport report =
      newton.solve({0, tokens}, {x_T.data(), sizeof(T) == 8 ? DType::f64 : DType::f32, h0_T.data(), c0_T.data(),
                                 h.data(), c.data(), h_final.data(), c_final.data()});
  EXPECT_EQ(report.status, NewtonStatus::converged);
  EXPECT_TRUE(report.bits_of_token_loop);
  const double limit = test::tolerance_of(sizeof(T) == 8 ? DType::f64 : DType::f32).worst;
  EXPECT_LE(worst_difference(as<double>(std::vector<double>(h.begin(), h.end())), expected.h), limit) << cell.type;
  EXPECT_LE(worst_difference({h_final.begin(), h_final.end()}, expected.h_final), limit) << cell.type;
  if (shape.state == 1) return;
  EXPECT_LE(worst_difference({c.begin(), c.end()}, expected.c), limit) << cell.type;
  EXPECT_LE(worst_difference({c_final.begin(), c_final.end()}, expected.c_final), limit) << cell.type;
}

TEST(Cells, TheTokenLoopIsTheReference) {
  for (const std::string& type : all_cells)
    for (std::int64_t D : {1, 5, 16, 33}) {
      token_loop_is_the_reference<float>({type, D, 3});
      token_loop_is_the_reference<double>({type, D, 3});
    }
}

TEST(Cells, LayersAndDirectionsToo) {
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (int layers : {1, 2, 3})
      for (int directions : {1, 2}) {
        token_loop_is_the_reference<float>({type, 6, 4, 1, layers, directions});
        token_loop_is_the_reference<double>({type, 6, 4, 1, layers, directions});
      }
}

TEST(Cells, TheStackIsTheNetwork) {
  const CellWeights weights = make_weights({"lstm", 4, 3, 1, 2, 1});
  const NetworkShape shape = network_shape(weights, 3);
  const auto x = normals(20 * 3, 1, 1);
  const auto whole = reference::network(weights, shape, x.data(), 20, nullptr, nullptr);
  reference::CellStack stack(weights, shape);
  for (int t = 0; t < 20; ++t) {
    stack.step(&x[t * 3]);
    for (int d = 0; d < 4; ++d) {
      EXPECT_EQ(stack.state(1)[d], whole.h[t * 4 + d]);
      EXPECT_EQ(stack.state(1)[4 + d], whole.c[t * 4 + d]);
    }
  }
}

TEST(Elementary, SigmoidAndTangent) {
  for (double x = -100; x < 100; x += 0.0173) {
    for (double y : {x, x * 1e-4, x * 1e-9}) {
      EXPECT_NEAR(sigmoid(y) * (1 + std::exp(-y)), 1, 2e-15) << y;
      EXPECT_NEAR(hyperbolic_tangent(y), std::tanh(y), 1e-15 * std::abs(std::tanh(y))) << y;
      const auto f = static_cast<float>(y);
      EXPECT_NEAR(hyperbolic_tangent(f), std::tanh(static_cast<double>(f)), 4e-7 * std::abs(std::tanh(f))) << y;
      if (f > -80) {
        EXPECT_NEAR(sigmoid(f) * (1 + std::exp(-static_cast<double>(f))), 1, 5e-7) << y;
      }
    }
  }
  EXPECT_TRUE(std::isnan(sigmoid(std::nan(""))));
  EXPECT_TRUE(std::isnan(hyperbolic_tangent(std::nanf(""))));
}

// --- Jacobians

TEST(Jacobians, OfBlockCells) {
  for (double scale : {0.3, 1.0, 3.0}) {
    EXPECT_LT(check_cell<ParaGru>({.weights = scale}).worst, 1e-8);
    EXPECT_LT(check_cell<ParaLstm>({.weights = scale}).worst, 1e-8);
  }
}

template <class Gates>
void derivatives_are_differences() {
  constexpr int k = Gates::state, g = Gates::gates;
  for (int n = 0; n < 200; ++n) {
    auto x = normals(g, n, 1), p = normals(g, n, 2), s = normals(k, n, 3);
    double dp[k * g], ds[k * k];
    Gates::derivatives(x.data(), p.data(), s.data(), dp, ds);
    const auto difference = [&](double& at, int i) {
      const double was = at, size = 1e-5;
      std::vector<double> up = s, down = s;
      at = was + size;
      std::vector<double> from = s;
      Gates::step(x.data(), p.data(), from.data()), up = from;
      at = was - size;
      from = s;
      Gates::step(x.data(), p.data(), from.data()), down = from;
      at = was;
      return (up[i] - down[i]) / (2 * size);
    };
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < g; ++j) EXPECT_NEAR(dp[i * g + j], difference(p[j], i), 1e-8);
      for (int j = 0; j < k; ++j) EXPECT_NEAR(ds[i * k + j], difference(s[j], i), 1e-8);
    }
  }
}

TEST(Jacobians, OfDenseGates) {
  derivatives_are_differences<RnnTanhGates>();
  derivatives_are_differences<RnnReluGates>();
  derivatives_are_differences<GruGates>();
  derivatives_are_differences<LstmGates>();
}

/// [A | -r] of a kernel beside differences of its own run.
void linearization_is_a_difference(const CellKernel<double>& kernel) {
  const std::int64_t size = kernel.state_size(), D = kernel.channels(), tokens = 3;
  const auto x = shared<double>(normals(tokens * kernel.inputs() * D, 5, 1));
  auto h = shared<double>(normals(tokens * size, 5, 2)), before = shared<double>(normals(size, 5, 3));
  using Values = SharedVector<double>;
  const CellTrajectory<double> path{x.data(), kernel.inputs() * D, h.data(), size};
  const auto f = [&](Values state, std::int64_t t) {
    Values end(size);
    kernel.run(path, {{t, t + 1, 0, 0, -1, 0, static_cast<int>(D)}}, state.data(), end.data(), false);
    return end;
  };
  for (bool diagonal : {false, true}) {
    const std::int64_t n = diagonal ? 1 : kernel.block(), blocks = diagonal ? size : kernel.blocks();
    AffineMaps<double> maps{nullptr, static_cast<int>(n), 1, static_cast<int>(n) + 1, n * (n + 1), false};
    Values memory(tokens * blocks * maps.stride, 99);
    maps.data = memory.data();
    kernel.linearize(path, 0, tokens, before.data(), maps, diagonal);
    Kokkos::fence();
    for (std::int64_t t = 0; t < tokens; ++t) {
      const Values from = t == 0 ? before : Values(&h[(t - 1) * size], &h[t * size]);
      const Values now = f(from, t);
      for (std::int64_t j = 0; j < size; ++j) {
        Values up = from, down = from;
        up[j] += 1e-5, down[j] -= 1e-5;
        const Values f_up = f(up, t), f_down = f(down, t);
        for (std::int64_t i = 0; i < size; ++i) {
          // value i / D of channel i % D; blocks of a channel, of all, or of one value
          const bool channel = !kernel.mixes() && !diagonal;
          if (channel ? i % D != j % D : diagonal && i != j) continue;
          const std::int64_t block = diagonal ? i : channel ? i % D : 0;
          const std::int64_t row = diagonal ? 0 : channel ? i / D : i, column = diagonal ? 0 : channel ? j / D : j;
          const double* map = maps.slot(t * blocks + block) + row * (n + 1);
          EXPECT_NEAR(map[column], (f_up[i] - f_down[i]) / 2e-5, 1e-8);
          EXPECT_NEAR(map[n], now[i] - h[t * size + i], 1e-14);
        }
      }
    }
  }
}

TEST(Jacobians, OfKernels) {
  const auto gru = shared<double>(normals(3 * 5, 1, 9)), lstm = shared<double>(normals(5 * 5, 1, 9));
  linearization_is_a_difference(BlockCellKernel<ParaGru, double>(5, gru.data()));
  linearization_is_a_difference(BlockCellKernel<ParaLstm, double>(5, lstm.data()));
  for (const auto& [cell, gates] : {std::pair{DenseCell::rnn_tanh, 1}, std::pair{DenseCell::rnn_relu, 1},
                                    std::pair{DenseCell::gru, 3}, std::pair{DenseCell::lstm, 4}})
    linearization_is_a_difference(
        *make_dense_cell_kernel<double>(cell, 5, normals(gates * 25, 2, 1, 0.5), normals(gates * 5, 2, 2, 0.1)));
}

// --- growth

/// The largest sum over consecutive tokens, by trying them all.
double brute_force(const std::vector<double>& growth) {
  double best = 0;
  for (std::size_t i = 0; i < growth.size(); ++i) {
    double sum = 0;
    for (std::size_t j = i; j < growth.size(); ++j) best = std::max(best, sum += growth[j]);
  }
  return best;
}

GrowthSums sums_of(const std::vector<double>& growth, std::size_t begin, std::size_t end) {
  GrowthSums s;
  for (std::size_t i = begin; i < end; ++i) s.add(growth[i], std::abs(growth[i]));
  s.error = s.error_most = begin == end ? 0 : 1e-3;
  return s;
}

TEST(Growth, CombinesAsBruteForceSays) {
  for (int n = 0; n < 60; ++n) {
    auto growth = normals(n, n, 1);
    for (double& g : growth) g -= 0.1;
    for (std::size_t i = 0; i <= growth.size(); ++i)
      for (std::size_t j = i; j <= growth.size(); j += 3) {
        const GrowthSums a = sums_of(growth, 0, i), b = sums_of(growth, i, j), c = sums_of(growth, j, growth.size());
        const GrowthSums left = combine(combine(a, b), c), right = combine(a, combine(b, c));
        EXPECT_NEAR(left.best, brute_force(growth), 1e-12);
        EXPECT_NEAR(right.best, left.best, 1e-12);
        EXPECT_NEAR(right.total, left.total, 1e-12);
        EXPECT_NEAR(right.prefix, left.prefix, 1e-12);
        EXPECT_NEAR(right.suffix, left.suffix, 1e-12);
        EXPECT_NEAR(right.error, left.error, 1e-9 * (1 + left.error));
        EXPECT_LE(left.error_most, right.error_most * (1 + 1e-9));
        EXPECT_EQ(left.tokens, n);
        const GrowthSums neutral = combine(a, GrowthSums{});
        EXPECT_EQ(neutral.best, a.best);
        EXPECT_EQ(neutral.error, a.error);
      }
  }
}

// --- chains of affine maps

template <class T>
void trace_and_fold(int n, std::int64_t blocks, std::int64_t count, double limit) {
  const std::int64_t stride = static_cast<std::int64_t>(n) * (n + 1), slots = blocks * count;
  auto memory = shared<T>(normals(slots * stride, n, 1, 1 / std::sqrt(n)));
  const AffineMaps<T> maps{memory.data(), n, 1, n + 1, stride, false};
  const std::vector<double> start = normals(blocks * n, n, 2);
  // the loop
  std::vector<double> y = start, path;
  for (std::int64_t t = 0; t < count; ++t) {
    std::vector<double> next(blocks * n);
    for (std::int64_t b = 0; b < blocks; ++b)
      for (int i = 0; i < n; ++i) {
        const T* row = maps.slot(t * blocks + b) + i * (n + 1);
        double sum = row[n];
        for (int j = 0; j < n; ++j) sum += static_cast<double>(row[j]) * y[b * n + j];
        next[b * n + i] = sum;
      }
    y = next;
    path.insert(path.end(), y.begin(), y.end());
  }
  auto traced = shared<T>(start);
  SharedVector<T> out(count * blocks * n);
  affine_trace(maps, blocks, count, traced.data(), out.data());
  Kokkos::fence();
  EXPECT_LE(worst_difference({out.begin(), out.end()}, path), limit) << n;
  EXPECT_LE(worst_difference({traced.begin(), traced.end()}, y), limit) << n;
  auto again = shared<T>(start);
  affine_trace(maps, blocks, count, again.data(), static_cast<T*>(nullptr));
  Kokkos::fence();
  EXPECT_EQ(again, traced);
  // folded into one map in two parts, then applied
  SharedVector<T> folded(blocks * stride, T(0));
  AffineMaps<T> one = maps;
  one.data = folded.data();
  for (std::int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < n; ++i) one.slot(b)[i * (n + 1) + i] = T(1);
  const std::int64_t first = count / 3;
  AffineMaps<T> rest = maps;
  rest.data = maps.slot(first * blocks);
  affine_fold(maps, blocks, first, one);
  affine_fold(rest, blocks, count - first, one);
  auto applied = shared<T>(start);
  affine_trace(one, blocks, 1, applied.data(), static_cast<T*>(nullptr));
  Kokkos::fence();
  EXPECT_LE(worst_difference({applied.begin(), applied.end()}, y), limit) << n;
}

TEST(AffineSteps, TraceAndFoldAreTheLoop) {
  for (int n : {1, 2, 3, 4, 5, 8, 9, 37, 70})
    for (std::int64_t blocks : {1, 2, 33})
      for (std::int64_t count : {1, 2, 17}) {
        if (n > 8 && blocks > 2) continue;
        trace_and_fold<double>(n, blocks, count, 1e-11);
        trace_and_fold<float>(n, blocks, count, 1e-3);
      }
}

TEST(AffineSteps, Reshape) {
  const int n = 3;
  const auto start = shared<double>(normals(2 * n * (n + 1), 1, 1));
  const auto reshaped = [&](Reshape how) {
    auto memory = start;
    affine_reshape(AffineMaps<double>{memory.data(), n, 1, n + 1, n * (n + 1), false}, 2, how);
    Kokkos::fence();
    return memory;
  };
  EXPECT_EQ(reshaped(Reshape::keep), start);
  for (int row = 0; row < 2 * n; ++row) {
    double sum = 0;
    for (int j = 0; j < n; ++j) {
      sum += std::abs(reshaped(Reshape::clamp)[row * (n + 1) + j]);
      EXPECT_EQ(reshaped(Reshape::identity)[row * (n + 1) + j], row % n == j ? 1 : 0);
      EXPECT_EQ(reshaped(Reshape::zero)[row * (n + 1) + j], 0);
    }
    EXPECT_LE(sum, 1 + 1e-14);
    for (Reshape how : {Reshape::clamp, Reshape::identity, Reshape::zero})
      EXPECT_EQ(reshaped(how)[row * (n + 1) + n], start[row * (n + 1) + n]);
  }
}

// --- projections

template <class T>
void projection_is_the_loop(int rows, int columns, std::int64_t tokens, double limit) {
  const auto W = normals(rows * columns, 1, 1), b = normals(rows, 1, 2), x = normals(tokens * columns, 1, 3);
  const Projection<T> projection(rows, columns, as<T>(W), as<T>(b));
  std::vector<double> expected;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int i = 0; i < rows; ++i) {
      double sum = b[i];
      for (int j = 0; j < columns; ++j) sum += W[i * columns + j] * x[t * columns + j];
      expected.push_back(sum);
    }
  const auto x_T = shared<T>(x);
  SharedVector<T> y(tokens * rows), later(y.size());
  projection.apply(x_T.data(), tokens, y.data());
  Kokkos::fence();
  EXPECT_LE(worst_difference({y.begin(), y.end()}, expected), limit);
  // the bits of a token do not depend on its neighbours
  for (std::int64_t t = 0; t < tokens; ++t) projection.apply(&x_T[t * columns], 1, &later[t * rows]);
  Kokkos::fence();
  EXPECT_EQ(later, y);
}

TEST(Projection, IsTheLoop) {
  for (int rows : {1, 15, 48, 129})
    for (int columns : {1, 7, 32})
      for (std::int64_t tokens : {0, 1, 63, 64, 65, 130}) {
        projection_is_the_loop<double>(rows, columns, tokens, 1e-13);
        projection_is_the_loop<float>(rows, columns, tokens, 1e-5);
      }
}

TEST(ShootingSteps, WhatOverflowsEndsAtAProductThatIsLeftOut) {
  SegmentGrid grid;
  grid.slots = 5, grid.runs = 1, grid.first = {0, 5, 0, true};
  auto starts = shared<float>(std::vector<float>(5, 0)),
       products = shared<float>(std::vector<float>{0, 30, 1000, .5, 1});
  const auto jumps = shared<float>(std::vector<float>{0, 3e38F, 0, 2, 0}), in = shared<float>(std::vector<float>{0});
  auto active = shared<unsigned char>(std::vector<unsigned char>(5, 0));
  ShootingArrays<float> lanes;
  lanes.starts = starts.data(), lanes.products = products.data(), lanes.active = active.data();

  auto map = shared<float>(std::vector<float>{7, 7}), constants = shared<float>(std::vector<float>{7});
  AffineMaps<float> maps;
  maps.data = map.data();
  newton_maps(grid, 1, 1, lanes, jumps.data(), 30, maps, constants.data());
  newton_lanes(grid, 1, 1, lanes, jumps.data(), in.data(), 30);
  Kokkos::fence();
  EXPECT_EQ(map[0], 0);
  EXPECT_EQ(map[1], 1);  // 0.5 of the jump of 2
  EXPECT_EQ(constants[0], 1);
  EXPECT_EQ(starts[4], 1);
  EXPECT_EQ(active[4], 1);
}

}  // namespace
}  // namespace longscan
