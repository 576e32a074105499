// SPDX-License-Identifier: Apache-2.0
// A cell of one's own, and states stored in 16 bits.
#include "core/device_memory.hpp"
#include "core/half.hpp"
#include "longscan/cells.hpp"
#include "newton_solve.hpp"
#include "some_of.hpp"

namespace longscan {
namespace {

using namespace test;

/// s' = tanh(w s + x) in its own words.
struct Squash {
  static constexpr int state = 1, inputs = 1, weights = 1;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    s[0] = hyperbolic_tangent(fused(w[0], s[0], x[0]));
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* w, const T* s, T* A) {
    const T y = hyperbolic_tangent(fused(w[0], s[0], x[0]));
    A[0] = w[0] * (T(1) - y) * (T(1) + y);
  }
};

/// This rank's states of `Squash` with the weights `w`, and the token loop's of all tokens.
struct Squashed {
  NewtonReport report;
  TokenRange part;
  std::vector<double> states, expected, final_states, expected_final;
  std::vector<Run> runs;
};
/// Tokens [begin, end) of all channels, one after the other and where kernels run: the bits of tanh are other ones on a
/// device than on the host. Starts from `state`, which becomes the last one.
std::vector<double> plain_loop(const std::vector<double>& w, const std::vector<double>& x, std::int64_t begin,
                               std::int64_t end, std::vector<double>& state) {
  const auto D = static_cast<std::int64_t>(w.size());
  const auto w_there = on_device("w", w), x_there = on_device("x", x), s = on_device("s", state);
  const DeviceArray<double> states("states", std::max<std::int64_t>(1, (end - begin) * D));
  Kokkos::parallel_for(
      "test::plain_loop", Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace>(0, D), KOKKOS_LAMBDA(const int d) {
        for (std::int64_t t = begin; t < end; ++t) {
          Squash::step(&x_there[t * D + d], &w_there[d], &s[d]);
          states[(t - begin) * D + d] = s[d];
        }
      });
  std::vector<double> host((end - begin) * D);
  copy_to_host<double>(states.data(), (end - begin) * D, host.data());
  copy_to_host<double>(s.data(), D, state.data());
  return host;
}

Squashed squash(const std::vector<double>& w, const std::vector<double>& x, const Sequences& sequences,
                const NewtonOptions& options) {
  const auto D = static_cast<std::int64_t>(w.size());
  Squashed r;
  r.part = cell_part(world(), sequences), r.runs = cell_runs(world(), sequences);
  const auto initial = normals(sequences.count() * D, 9, 9);
  std::vector<double> initial_here(r.runs.size() * D);
  for (std::size_t i = 0; i < r.runs.size(); ++i)
    std::copy_n(&initial[r.runs[i].sequence * D], D, &initial_here[i * D]);
  r.states.resize(r.part.size() * D), r.final_states.resize(r.runs.size() * D);
  const auto w_there = on_device("w", w), x_there = on_device("x", x);
  const DeviceArray<double> states("states", std::max<std::size_t>(1, r.states.size()));
  r.report = solve_cells<Squash, double>(
      world(), static_cast<int>(D), w_there.data(), sequences,
      {x_there.data() + r.part.begin * D, states.data(), initial_here.data(), r.final_states.data()}, options);
  copy_to_host<double>(states.data(), static_cast<std::int64_t>(r.states.size()), r.states.data());
  for (std::int64_t i = 0; i < sequences.count(); ++i) {
    std::vector<double> s(initial.begin() + i * D, initial.begin() + (i + 1) * D);
    const auto loop = plain_loop(w, x, sequences.offsets[i], sequences.offsets[i + 1], s);
    r.expected.insert(r.expected.end(), loop.begin(), loop.end());
    r.expected_final.insert(r.expected_final.end(), s.begin(), s.end());
  }
  return r;
}

TEST(OwnCell, BitsOfThePlainLoop) {
  const int D = 21;
  const Sequences sequences{{0, 700, 700, 703, 2001}};
  const auto w = normals(D, 1, 1, 2), x = normals(2001 * D, 1, 2);
  for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::shooting, NewtonMethod::sequential})
    for (std::int64_t segment : {0, 64, 300}) {
      NewtonOptions options;
      options.method = method, options.segment = segment;
      const Squashed r = squash(w, x, sequences, options);
      EXPECT_TRUE(r.report.bits_of_token_loop) << name_of(method) << " " << segment;
      EXPECT_TRUE(std::equal(r.states.begin(), r.states.end(), r.expected.begin() + r.part.begin * D));
      for (std::size_t i = 0; i < r.runs.size(); ++i) {
        if (!r.runs[i].ends) continue;
        EXPECT_TRUE(
            std::equal(&r.final_states[i * D], &r.final_states[i * D] + D, &r.expected_final[r.runs[i].sequence * D]));
      }
    }
}

void expect_k_states_exact(std::int64_t segment) {
  const int D = 4;
  const std::int64_t tokens = 60;
  const auto w = normals(D, 2, 1, 5), x = normals(tokens * D, 2, 2);  // hard: most of it is far from right
  for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi, NewtonMethod::picard, NewtonMethod::jacobi})
    for (std::int64_t k : {1, 2, 3, 7, 20}) {
      NewtonOptions options;
      options.method = method, options.max_iterations = k, options.tolerance = 1e-15, options.segment = segment;
      const Squashed r = squash(w, x, {{0, tokens}}, options);
      EXPECT_GE(r.report.converged_prefix, k) << name_of(method);
      for (std::int64_t t = r.part.begin; t < std::min(k, r.part.end); ++t)
        for (int d = 0; d < D; ++d)
          EXPECT_NEAR(r.states[(t - r.part.begin) * D + d], r.expected[t * D + d], 1e-14) << name_of(method) << k;
    }
}

/// Iterates of picard are hundreds of times larger than the states on their way: a token's first step from a right
/// state has rounded to them. The next step takes that off: the bits are those of the loop, and the residual is zero.
void expect_no_trace_of_large_iterates(std::int64_t segment) {
  const int D = 21;
  std::vector<double> w(D);
  for (int d = 0; d < D; ++d) w[d] = -0.3 - 0.03 * d;  // forgets, while I - A grows
  for (std::int64_t tokens = 1; tokens <= 24; ++tokens) {
    const auto x = normals(tokens * D, 5, 5, 0.5);
    for (NewtonMethod method : {NewtonMethod::picard, NewtonMethod::jacobi}) {
      NewtonOptions options;
      options.method = method, options.tolerance = 1e-300, options.segment = segment;
      const Squashed r = squash(w, x, {{0, tokens}}, options);
      EXPECT_EQ(r.report.status, NewtonStatus::converged) << name_of(method) << tokens;
      EXPECT_LE(r.report.iterations, tokens + 1) << name_of(method) << tokens;
      EXPECT_TRUE(std::equal(r.states.begin(), r.states.end(), r.expected.begin() + r.part.begin * D))
          << name_of(method) << ", " << tokens << " tokens";
    }
  }
}
TEST(OwnCell, LargeIteratesLeaveNoTrace) { expect_no_trace_of_large_iterates(0); }

template <class S>
void expect_states_stored(Stored stored, const std::string& type) {
  const Sequences sequences{{0, 700, 700, 703, 2001}};
  constexpr std::int64_t D = 9;
  const auto kernel = make_cell_kernel<float>(test::make_weights({type, D, 2, 0.7}));
  const TokenRange part = cell_part(world(), sequences);
  const std::int64_t inputs = kernel->inputs() * D, size = kernel->state_size();
  const auto all = normals(2001 * inputs, 4, 4);
  std::vector<S> x16;
  std::vector<float> x;
  for (std::int64_t i = part.begin * inputs; i < part.end * inputs; ++i) {
    x16.push_back(as_stored<S>(static_cast<float>(all[i])));
    x.push_back(as_arithmetic(x16.back()));
  }
  const auto x_there = on_device("x", x), h_there = on_device("h", std::vector<float>(part.size() * size));
  const auto x16_there = on_device("x", x16), h16_there = on_device("h", std::vector<S>(part.size() * size));
  for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::sequential, NewtonMethod::quasi}) {
    NewtonOptions options;
    options.method = method, options.segment = 64;
    solve_cell_kernel<float>(world(), *kernel, sequences, {x_there.data(), h_there.data()}, options);
    CellArrays<float> arrays{reinterpret_cast<const float*>(x16_there.data()),
                             reinterpret_cast<float*>(h16_there.data())};
    arrays.stored = stored;
    solve_cell_kernel<float>(world(), *kernel, sequences, arrays, options);
    std::vector<float> expected(part.size() * size);
    std::vector<S> got(part.size() * size);
    copy_to_host<float>(h_there.data(), part.size() * size, expected.data());
    copy_to_host<S>(h16_there.data(), part.size() * size, got.data());
    std::int64_t others = 0;
    for (std::size_t i = 0; i < got.size(); ++i) others += got[i].bits != as_stored<S>(expected[i]).bits;
    EXPECT_EQ(others, 0) << type << " by " << name_of(method);
  }
}
TEST(Stored, StatesOfSixteenBitsAreRoundedOnesOfThirtyTwo) {
  for (const char* type : {"paragru", "paralstm", "gru"}) {
    expect_states_stored<StoredBf16>(Stored::bf16, type);
    expect_states_stored<StoredF16>(Stored::f16, type);
  }
}

TEST(OwnCell, KIterationsMakeKStatesExact) { expect_k_states_exact(0); }

void expect_nan_leaves_earlier_tokens_alone() {
  const int D = 3;
  const std::int64_t tokens = 200;
  const auto w = normals(D, 1, 1);
  for (std::int64_t planted : some_of({0, 1, 37, 150, 199}))
    for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::sequential, NewtonMethod::shooting,
                                NewtonMethod::newton, NewtonMethod::quasi, NewtonMethod::elk, NewtonMethod::jacobi}) {
      auto x = normals(tokens * D, 1, 2);
      x[planted * D + 1] = std::nan("");
      NewtonOptions options;
      options.method = method, options.segment = 16, options.max_iterations = tokens + 1;
      const Squashed r = squash(w, x, {{0, tokens}}, options);
      EXPECT_EQ(r.report.status, NewtonStatus::non_finite) << name_of(method);
      EXPECT_EQ(r.report.first_bad_token, planted) << name_of(method);
      for (std::int64_t t = r.part.begin; t < std::min(planted, r.part.end); ++t)
        for (int d = 0; d < D; ++d) {
          const double got = r.states[(t - r.part.begin) * D + d], expected = r.expected[t * D + d];
          // shooting without its token loop and elk stop unsettled: earlier tokens are as good as they had become
          const bool settles = method != NewtonMethod::shooting && method != NewtonMethod::elk;
          EXPECT_LE(std::abs(got - expected), settles ? 1e-9 : 2) << name_of(method) << ", " << t << " of " << planted;
        }
    }
}

TEST(OwnCell, ANaNLeavesEarlierTokensAlone) { expect_nan_leaves_earlier_tokens_alone(); }

TEST_F(AsOnADevice, LargeIteratesLeaveNoTrace) {
  for (std::int64_t segment : {0, 5}) expect_no_trace_of_large_iterates(segment);
}
TEST_F(AsOnADevice, KIterationsMakeKStatesExact) {
  for (std::int64_t segment : {0, 7}) expect_k_states_exact(segment);
}
TEST_F(AsOnADevice, ANaNLeavesEarlierTokensAlone) { expect_nan_leaves_earlier_tokens_alone(); }

}  // namespace
}  // namespace longscan
