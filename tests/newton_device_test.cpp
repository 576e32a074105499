// SPDX-License-Identifier: Apache-2.0
// Shooting and sweeps the way that devices take, on whatever kernels run on.
#include "core/device_memory.hpp"
#include "core/random.hpp"
#include "longscan/cells.hpp"
#include "newton_solve.hpp"
#include "some_of.hpp"

namespace longscan {
namespace {

using namespace test;

TEST(DeviceSegments, FillTheDeviceAndWarmUp) {
  const auto plan = [](std::int64_t tokens, std::int64_t longest, std::int64_t side_by_side) {
    const SegmentPlan p = plan_device_segments(tokens, longest, side_by_side, 128, 0);
    EXPECT_EQ(p.tokens % 8, 0);  // kernels read eight tokens together
    EXPECT_LE(p.warm_up, 128);
    return p;
  };
  EXPECT_EQ(plan(262144, 262144, 66).tokens, 3976);  // 66 segments
  EXPECT_EQ(plan(262144, 262144, 1056).tokens, 256);
  EXPECT_EQ(plan(262144, 262144, 1056).warm_up, 96);
  EXPECT_EQ(plan(262144, 262144, 100000).tokens, 256);  // none shorter than two warm-ups
  EXPECT_EQ(plan(66 * 4000, 4000, 66).tokens, 4000);    // one a sequence, not one and a bit
  EXPECT_GE(plan(5000, 5000, 1).tokens, 5000);
  EXPECT_EQ(plan(0, 0, 66).tokens, 8);
  EXPECT_EQ(plan_device_segments(1000, 1000, 66, 128, 40).tokens, 40);
  EXPECT_EQ(plan_device_segments(1000, 1000, 66, 128, 40).warm_up, 40);
}

TEST_F(AsOnADevice, AnyLength) {
  std::vector<std::int64_t> lengths = {1, 2, 31, 33, 4095, 4097};
  if (!is_host_space<Kokkos::DefaultExecutionSpace>) lengths.push_back((1 << 21) + 1);
  for (const std::string& type : all_cells)
    for (std::int64_t tokens : lengths) {
      const Case test{{type, 3, 2, 0.5}, {{0, tokens}}};
      if (type.substr(0, 4) == "para") {
        expect_bits<float>(test);
        expect_bits<float>({test.cell, test.sequences, NewtonMethod::sequential});
      } else {
        expect_close<float>(test);
      }
      if (tokens > 4095) continue;
      expect_close<double>(test);
      for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi})
        expect_close<float>({test.cell, test.sequences, method});
    }
}

/// More than 2^31 values: inputs and states that a host's test has no room for.
void expect_many_values() {
  constexpr std::int64_t D = 1024, tokens = (std::int64_t{1} << 21) + 1, values = tokens * D;
  using Values = Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  const auto alone = make_single_transport();
  const auto kernel = make_cell_kernel<float>(test::make_weights({"paragru", D, 2, 0.5}));
  DeviceArray<float> x, expected, h;
  reserve(x, "x", 3 * values), reserve(expected, "expected", values), reserve(h, "h", values);
  Kokkos::parallel_for(
      "test::fill", Values(0, 3 * values), KOKKOS_LAMBDA(const std::int64_t i) {
        x(i) = static_cast<float>(random_normal(1, 1, static_cast<std::uint64_t>(i)));
      });
  NewtonOptions options;
  options.method = NewtonMethod::sequential;
  solve_cell_kernel<float>(*alone, *kernel, {{0, tokens}}, {x.data(), expected.data()}, options);
  for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::newton}) {
    options.method = method;
    Kokkos::deep_copy(h, std::nanf(""));
    const NewtonReport report = solve_cell_kernel<float>(*alone, *kernel, {{0, tokens}}, {x.data(), h.data()}, options);
    EXPECT_EQ(report.status, NewtonStatus::converged) << name_of(method);
    double worst = 0;
    std::int64_t others = 0;
    Kokkos::parallel_reduce(
        "test::compare", Values(0, values),
        KOKKOS_LAMBDA(const std::int64_t i, double& most, std::int64_t& count) {
          const double d = static_cast<double>(h(i)) - static_cast<double>(expected(i)), size = d < 0 ? -d : d;
          if (!(size == 0)) ++count;
          most = !(size <= 1e300) ? 1e300 : size > most ? size : most;
        },
        Kokkos::Max<double>(worst), Kokkos::Sum<std::int64_t>(others));
    if (method == NewtonMethod::automatic) {
      EXPECT_EQ(others, 0) << worst;
    }
    EXPECT_LE(worst, 2e-5) << name_of(method);
  }
}

TEST(OnADevice, MoreValuesThanThirtyTwoBitsCount) {
  if (is_host_space<Kokkos::DefaultExecutionSpace> || free_device_memory() < (std::int64_t{48} << 30))
    GTEST_SKIP() << "needs 48 GiB on a device";
  expect_many_values();
}

TEST_F(AsOnADevice, BitsOfTheTokenLoop) {
  for (std::int64_t tokens = 1; tokens <= 70; tokens += 1 + tokens % 3) expect_bits_of_so_many(tokens);
  for (const char* type : {"paragru", "paralstm"}) {
    for (std::int64_t window : {0, 5, 33})
      expect_bits<float>({{type, 9}, {{0, 0, 20, 21, 21, 21, 64, 90, 90}}, NewtonMethod::shooting, window, 8});
    for (double scale : {1.0, 2.0, 5.0}) {  // the last is chaotic
      Case test{{type, 24, 4, scale}, {{0, 1500, 1501, 6000}}};
      test.segment = 200;
      const Result<float> got = solve<float>(world(), test);
      EXPECT_TRUE(got.report.bits_of_token_loop);
      EXPECT_EQ(got.report.converged_prefix, 6000);
      expect_token_loop(test, 0, got);
      test.segment = 0;
      expect_bits<double>(test);
    }
  }
}

TEST_F(AsOnADevice, LongMemoryTakesNewtonSteps) {
  for (const char* type : {"paragru", "paralstm"}) {
    Case test{{type, 24, 2, 0.5}, {{0, 12000}}, NewtonMethod::shooting};
    test.segment = 100;
    test.cell.long_memory = true;
    const Result<double> got = solve<double>(world(), test);
    EXPECT_TRUE(got.report.bits_of_token_loop) << type;
    EXPECT_LT(got.report.iterations, 60) << type;  // plain hand-over takes a pass a segment
    if (got.report.bits_of_token_loop) expect_token_loop(test, 0, got);
    shoots_on_device() = false;
    EXPECT_NEAR(got.report.iterations, solve<double>(world(), test).report.iterations, 5) << type;
    shoots_on_device() = true;
  }
}

/// What took several passes is not worth its segments in short sequences; the next solve with the cell knows, and tries
/// again now and then.
TEST_F(AsOnADevice, AutoRemembersPasses) {
  constexpr std::int64_t D = 64, longest = 20000;
  const auto alone = make_single_transport();
  const auto kernel = make_cell_kernel<double>(test::make_weights({"paragru", D, 2, 2.5}));
  const auto x = on_device("x", normals(longest * kernel->inputs() * D, 6, 6)),
             h = on_device("h", normals(longest * D, 1, 1));
  std::vector<double> forgetting(longest * kernel->inputs() * D, 0);  // z is nearly 1
  for (std::int64_t t = 0; t < longest; ++t) std::fill_n(forgetting.begin() + t * kernel->inputs() * D, D, 30);
  const auto easy = on_device("easy", forgetting);
  const auto solve = [&](std::int64_t tokens, const double* inputs = nullptr) {
    return solve_cell_kernel<double>(*alone, *kernel, {{0, tokens}}, {inputs ? inputs : x.data(), h.data()}, {});
  };
  const NewtonReport first = solve(1500), second = solve(1500), many = solve(longest);
  EXPECT_EQ(first.method_used, NewtonMethod::shooting);
  ASSERT_GT(first.iterations, 1);
  EXPECT_EQ(second.method_used, NewtonMethod::sequential) << first.iterations;
  EXPECT_EQ(many.method_used, NewtonMethod::shooting);
  int loops = 0;
  while (loops < 64 && solve(1500, easy.data()).method_used == NewtonMethod::sequential) ++loops;
  EXPECT_GT(loops, 5);
  EXPECT_LT(loops, 64);
  EXPECT_EQ(solve(1500, easy.data()).method_used, NewtonMethod::shooting);
}

/// Ranks whose tokens make other numbers of segments give up after the same pass. Chaotic, so that they do.
TEST_F(AsOnADevice, RanksWithOtherSegmentsGiveUpTogether) {
  Case test{{"gru", 24, 2, 4}, {}};
  test.sequences.offsets.clear();
  for (std::int64_t at = 0; at <= 2004; at += 12) test.sequences.offsets.push_back(at);
  test.sequences.offsets.push_back(4008);
  test.segment = 8;
  const Result<double> got = solve<double>(world(), test);
  EXPECT_EQ(got.report.status, NewtonStatus::fell_back);
  expect_token_loop(test, 1e-6, got);
}

/// Longer warm-ups that save passes are kept: now and then a solve tries without, and finds that it takes more.
TEST_F(AsOnADevice, AutoKeepsWarmUpsThatSavePasses) {
  constexpr std::int64_t D = 64, tokens = 20000;
  const auto alone = make_single_transport();
  const auto kernel = make_cell_kernel<double>(test::make_weights({"paragru", D, 2, 3}));
  const auto x = on_device("x", normals(tokens * kernel->inputs() * D, 6, 6)),
             h = on_device("h", normals(tokens * D, 1, 1));
  std::vector<std::int64_t> passes;
  for (int i = 0; i < 80; ++i)
    passes.push_back(solve_cell_kernel<double>(*alone, *kernel, {{0, tokens}}, {x.data(), h.data()}, {}).iterations);
  const std::int64_t usual = passes[8],
                     more = std::count_if(passes.begin() + 8, passes.end(), [&](auto n) { return n > usual; });
  EXPECT_LE(more, 3) << "in 80 solves";
  if (is_host_space<Kokkos::DefaultExecutionSpace>) {  // a device has other segments
    EXPECT_LT(usual, passes[0]);
    EXPECT_GE(more, 1);
  }
}

void expect_same_verdict(const std::string& type, const Sequences& sequences) {
  Case test{{type, 8, 2, 0.7}, sequences, NewtonMethod::shooting, 0, 100};
  const NewtonReport device = solve<double>(world(), test).report;
  shoots_on_device() = false;
  const NewtonReport host = solve<double>(world(), test).report;
  shoots_on_device() = true;
  EXPECT_FALSE(device.sampled);
  EXPECT_GT(device.error_bound, 0) << type;
  EXPECT_LT(device.lyapunov, -0.1) << type;
  if (host.sampled) return;  // where kernels run on a device it is from a part of the tokens
  EXPECT_NEAR(device.lyapunov, host.lyapunov, 0.03 * std::abs(host.lyapunov)) << type;
  EXPECT_NEAR(device.log_amplification, host.log_amplification, 1.0) << type;
  // over ranks the host multiplies norms of 2 x 2 blocks, the device takes the norm of their product; of many the host
  // may find no bound
  if (world().size() == 1 || type == "paragru") {
    EXPECT_GT(host.error_bound, 0) << type;
    EXPECT_GT(device.error_bound, 0.2 * host.error_bound) << type;
  }
  if (host.error_bound > 0) {
    EXPECT_LT(device.error_bound, 5 * host.error_bound) << type;
  }
}
TEST_F(AsOnADevice, TheSameVerdict) {
  for (const char* type : {"paragru", "paralstm"}) expect_same_verdict(type, {{0, 900, 1000}});
}
TEST_F(AsOnADevice, TheSameVerdictOfOneSequence) {
  for (const char* type : {"paragru", "paralstm"}) expect_same_verdict(type, {{0, 1000}});
}

TEST_F(AsOnADevice, CellsThatMix) {
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (std::int64_t segment : {24, 300, 0}) {
      expect_close<float>({{type, 16, 3, 0.5}, {{0, 1501}}, NewtonMethod::automatic, 0, segment});
      expect_close<double>({{type, 16, 3, 0.5}, {{0, 700, 700, 1501}}, NewtonMethod::automatic, 333, segment});
    }
  for (double scale : {2.0, 4.0})
    for (const char* type : {"rnn_tanh", "gru"}) {
      Case test{{type, 24, 4, scale}, {{0, 3000}}};
      test.segment = 200;
      const Result<double> got = solve<double>(world(), test);
      if (scale > 3) {
        EXPECT_EQ(got.report.status, NewtonStatus::fell_back) << type;
      }
      expect_token_loop(test, 1e-9, got);
    }
}

// --- full-trajectory methods by sweeps over segments

class SweepsOf : public AsOnADevice, public ::testing::WithParamInterface<std::string> {};

TEST_P(SweepsOf, AreTheTokenLoopToRounding) {
  const Sequences one{{0, 61}}, several{{0, 0, 20, 21, 21, 21, 64, 90, 90}}, nothing{{0, 0, 0, 0}};
  const std::string& type = GetParam();
  for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi})
    for (int segment : some_of({0, 1, 7, 16})) {
      expect_close<float>({{type, 5, 3, 0.7}, one, method, 0, segment});
      expect_close<double>({{type, 35, 3, 0.7}, several, method, segment == 7 ? 33 : 0, segment});
      expect_close<double>({{type, 5, 3, 0.7}, nothing, method, 0, segment});
    }
  expect_close<float>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::picard, 0, 8});
  expect_close<double>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::jacobi, 0, 8});
  if (type.substr(0, 4) == "para") return;
  expect_close<float>({{type, 6, 3, 0.7, 2, 2}, {{0, 30, 30, 31, 75}}, NewtonMethod::newton, 0, 9}, 5e-5);
}

TEST_P(SweepsOf, TakeAsManyStepsAsTheStreamedMethod) {
  const std::string& type = GetParam();
  for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi})
    for (double scale : some_of({0.7, 1.5, 4.0})) {  // the last blows up: far tokens start anew
      Case test{{type, 9, 3, scale}, {{0, 300, 700}}, method, 0, 40, 40};
      const Result<double> got = solve<double>(world(), test);
      if (got.report.status < NewtonStatus::not_converged) expect_token_loop(test, 1e-8, got);
      shoots_on_device() = false;
      const NewtonReport streamed = solve<double>(world(), test).report;
      shoots_on_device() = true;
      const auto steps = static_cast<double>(streamed.iterations);
      EXPECT_NEAR(static_cast<double>(got.report.iterations), steps, 1 + 0.1 * steps) << type << scale;
      EXPECT_EQ(got.report.status, streamed.status) << type << scale;
    }
}

INSTANTIATE_TEST_SUITE_P(Cells, SweepsOf, ::testing::ValuesIn(all_cells), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace longscan
