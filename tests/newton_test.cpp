// SPDX-License-Identifier: Apache-2.0
// Nonlinear recurrences over ranks: every method beside the token loop on one rank.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/cell_reference.hpp"
#include "core/device_memory.hpp"
#include "core/half.hpp"
#include "core/random.hpp"
#include "dist/newton_layer.hpp"
#include "longscan/cells.hpp"
#include "newton_cases.hpp"

namespace longscan {
namespace {

using test::all_cells;
using test::normals;
using test::RandomCell;

Transport& world() {
  static Transport* const ranks = make_mpi_transport().release();  // MPI ends before static objects do
  return *ranks;
}

template <class T>
constexpr DType type_of = sizeof(T) == 8 ? DType::f64 : DType::f32;

/// What a solve leaves on a rank.
template <class T>
struct Result {
  TokenRange part;                  ///< the rank's tokens, of the last window
  std::vector<T> h, c;              ///< of all tokens, where this rank held them
  std::vector<char> here;           ///< the tokens that it held
  std::vector<T> h_final, c_final;  ///< [sequences][layers * directions][D], where they ended here
  std::vector<char> ended;          ///< [sequences][layers * directions]
  NewtonReport report;              ///< of the last window
};

struct Case {
  RandomCell cell;
  Sequences sequences;
  NewtonMethod method = NewtonMethod::automatic;
  std::int64_t window = 0, segment = 0, max_iterations = 100;
  double tolerance = 0;
  bool reproducible = false;
};

template <class T>
Result<T> solve(Transport& ranks, const Case& test) {
  const CellWeights weights = test::make_weights(test.cell);
  NewtonOptions options;
  options.method = test.method, options.segment = test.segment, options.max_iterations = test.max_iterations;
  options.tolerance = test.tolerance, options.reproducible = test.reproducible;
  options.precision = sizeof(T) == 8 ? Precision::f64 : Precision::f32;
  const std::int64_t tokens = test.sequences.tokens(), I = test.cell.inputs, D = test.cell.D;
  const std::int64_t L = test.cell.layers * test.cell.directions, width = test.cell.directions * D, one = L * D;
  const auto x_double = normals(tokens * I, 3, 1), h0_double = normals(test.sequences.count() * one, 3, 2),
             c0_double = normals(test.sequences.count() * one, 3, 3);
  const std::vector<T> x(x_double.begin(), x_double.end()), h0(h0_double.begin(), h0_double.end()),
      c0(c0_double.begin(), c0_double.end());
  Newton newton(ranks, weights, static_cast<int>(I), options, test.sequences);
  Result<T> r;
  r.h.resize(tokens * width), r.c.resize(tokens * width), r.here.resize(tokens);
  r.h_final.resize(h0.size()), r.c_final.resize(h0.size()), r.ended.resize(test.sequences.count() * L);
  for (const TokenRange& window : newton.windows(test.window > 0 ? test.window : std::max<std::int64_t>(1, tokens))) {
    r.part = newton.part(window);
    const std::vector<Run> runs = newton.runs(window);
    std::vector<T> h0_here(runs.size() * one), c0_here(h0_here), h_ends(h0_here), c_ends(h0_here);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      std::copy_n(&h0[runs[i].sequence * one], one, &h0_here[i * one]);
      std::copy_n(&c0[runs[i].sequence * one], one, &c0_here[i * one]);
    }
    NewtonData data{x.data() + r.part.begin * I,
                    type_of<T>,
                    h0_here.data(),
                    c0_here.data(),
                    r.h.data() + r.part.begin * width,
                    r.c.data() + r.part.begin * width,
                    h_ends.data(),
                    c_ends.data()};
    std::vector<std::byte> when_ready;
    int times_ready = 0;
    const auto outputs = [&] {
      std::vector<std::byte> all;
      const auto add = [&](const void* values, std::size_t count) {
        const auto* bytes = static_cast<const std::byte*>(values);
        all.insert(all.end(), bytes, bytes + count * sizeof(T));
      };
      for (const void* of_tokens : {data.h, data.c}) add(of_tokens, r.part.size() * width);
      add(h_ends.data(), h_ends.size()), add(c_ends.data(), c_ends.size());
      return all;
    };
    data.ready = [&] { ++times_ready, when_ready = outputs(); };
    r.report = newton.solve(window, data);
    const bool to_be_written = is_host_space<Kokkos::DefaultExecutionSpace> &&
                               static_cast<int>(r.report.status) < static_cast<int>(NewtonStatus::not_converged);
    EXPECT_EQ(times_ready, to_be_written ? 1 : 0);
    if (to_be_written) {
      EXPECT_TRUE(when_ready == outputs()) << "outputs have changed since they were ready";
    }
    std::fill(r.here.begin() + r.part.begin, r.here.begin() + r.part.end, 1);
    for (std::size_t i = 0; i < runs.size(); ++i)
      for (std::int64_t l = 0; l < L; ++l) {
        const bool backward = test.cell.directions > 1 && l % 2 == 1;
        if (!(backward ? runs[i].starts : runs[i].ends)) continue;
        const std::int64_t at = runs[i].sequence * L + l;
        r.ended[at] = 1;
        std::copy_n(&h_ends[i * one + l * D], D, &r.h_final[at * D]);
        std::copy_n(&c_ends[i * one + l * D], D, &r.c_final[at * D]);
      }
  }
  return r;
}

/// Compares what this rank holds with the token loop on one rank; limit 0: bit for bit.
template <class T>
void expect_token_loop(const Case& test, double limit, const Result<T>& got) {
  const auto alone = make_single_transport();
  Case loop = test;
  loop.method = NewtonMethod::sequential, loop.window = 0, loop.segment = 0, loop.reproducible = false;
  const bool on_device = shoots_on_device();
  shoots_on_device() = false;  // token after token
  const Result<T> expected = solve<T>(*alone, loop);
  shoots_on_device() = on_device;
  const std::int64_t D = test.cell.D, width = test.cell.directions * D;
  const bool has_c = test.cell.type == "lstm" || test.cell.type == "paralstm";
  const std::string what = std::string(test.cell.type) + " by " + std::string(name_of(test.method)) + ", " +
                           std::to_string(test.sequences.tokens()) + " tokens, segment " +
                           std::to_string(test.segment) + ", window " + std::to_string(test.window) + ", " +
                           std::string(name_of(got.report.status));
  double worst = 0;
  std::int64_t other_bits = 0, first = -1;
  const auto compare = [&](const std::vector<T>& a, const std::vector<T>& b, std::int64_t begin, std::int64_t n,
                           std::int64_t token) {
    for (std::int64_t i = begin; i < begin + n; ++i) {
      const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      worst = std::isfinite(d) ? std::max(worst, d) : HUGE_VAL;
      if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0 && other_bits++ == 0) first = token;
    }
  };
  for (std::int64_t t = 0; t < test.sequences.tokens(); ++t) {
    if (!got.here[t]) continue;
    compare(got.h, expected.h, t * width, width, t);
    if (has_c) compare(got.c, expected.c, t * width, width, t);
  }
  for (std::size_t i = 0; i < got.ended.size(); ++i) {
    if (!got.ended[i]) continue;
    compare(got.h_final, expected.h_final, static_cast<std::int64_t>(i) * D, D, -2);
    if (has_c) compare(got.c_final, expected.c_final, static_cast<std::int64_t>(i) * D, D, -2);
  }
  if (limit == 0) {
    EXPECT_EQ(other_bits, 0) << what << ", first at token " << first << ", worst " << worst;
  } else {
    EXPECT_LE(worst, limit) << what << " after " << got.report.iterations;
  }
  std::int64_t held = 0;
  for (char here : got.here) held += here;
  world().all_reduce(&held, 1, Transport::Reduction::sum);
  EXPECT_EQ(held, test.sequences.tokens());
}

template <class T>
void expect_bits(const Case& test) {
  const Result<T> got = solve<T>(world(), test);
  EXPECT_TRUE(got.report.bits_of_token_loop);
  expect_token_loop(test, 0, got);
}
template <class T>
void expect_close(const Case& test, double f32 = 2e-5, double f64 = 1e-9) {
  const Result<T> got = solve<T>(world(), test);
  EXPECT_LT(static_cast<int>(got.report.status), static_cast<int>(NewtonStatus::not_converged)) << test.cell.type;
  expect_token_loop(test, sizeof(T) == 8 ? f64 : f32, got);
}

TEST(Newton, TheTokenLoopOverRanks) {
  for (const std::string& type : all_cells)
    for (std::int64_t tokens : {0, 1, 2, 6, 61}) {
      expect_bits<float>({{type}, {{0, tokens}}, NewtonMethod::sequential});
      expect_bits<double>({{type, 37}, {{0, tokens}}, NewtonMethod::sequential, 9});
    }
}

TEST(Newton, ShootingHasTheBitsOfTheTokenLoop) {
  const std::int64_t segments[] = {1, 8, 24, 40, 0}, windows[] = {0, 17, 5};
  for (std::int64_t tokens = 1; tokens <= 70; ++tokens) {
    Case test{{tokens % 2 ? "paragru" : "paralstm", 3 + tokens % 20, 2}, {{0, tokens}}};
    test.cell.scale = tokens % 7 < 4 ? 1 : 2;
    test.segment = segments[tokens % 5], test.window = windows[tokens % 3];
    test.method = tokens % 4 < 2 ? NewtonMethod::shooting : NewtonMethod::automatic;
    expect_bits<float>(test);
    test.cell.type = tokens % 2 ? "paralstm" : "paragru";
    expect_bits<double>(test);
  }
  for (std::int64_t tokens : {127, 1001, 3000})
    for (std::int64_t segment : {40, 300, 0})
      for (const char* type : {"paragru", "paralstm"}) {
        expect_bits<float>({{type, 17, 2}, {{0, tokens}}, NewtonMethod::shooting, 0, segment});
        expect_bits<double>({{type, 17, 2}, {{0, tokens}}, NewtonMethod::automatic, 301, segment});
      }
}

TEST(Newton, MethodsAreTheTokenLoopToRounding) {
  for (const std::string& type : all_cells)
    for (NewtonMethod method :
         {NewtonMethod::automatic, NewtonMethod::newton, NewtonMethod::quasi, NewtonMethod::elk}) {
      expect_close<float>({{type, 5, 3, 0.7}, {{0, 61}}, method});
      expect_close<double>({{type, 5, 3, 0.7}, {{0, 43}}, method, method == NewtonMethod::newton ? 7 : 0});
    }
  for (const std::string& type : all_cells) {
    expect_close<float>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::picard});
    expect_close<double>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::jacobi});
  }
}

TEST(Newton, ShootingOfCellsThatMix) {
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (std::int64_t segment : {24, 300, 0}) {
      expect_close<float>({{type, 16, 3, 0.5}, {{0, 1501}}, NewtonMethod::automatic, 0, segment});
      expect_close<double>({{type, 16, 3, 0.5}, {{0, 1501}}, NewtonMethod::automatic, 333, segment});
    }
}

TEST(Newton, PackedSequencesAndEmptyOnes) {
  const Sequences sequences{{0, 0, 20, 21, 21, 21, 64, 90, 90}}, nothing{{0, 0, 0, 0}};
  for (const std::string& type : all_cells) {
    Case test;
    test.cell = {type, 5, 3, 0.7}, test.sequences = sequences, test.method = NewtonMethod::elk;
    expect_close<double>(test);
    for (std::int64_t window : {0, 5}) {
      test.window = window, test.method = NewtonMethod::sequential;
      expect_bits<double>(test);
      test.method = NewtonMethod::newton;
      expect_close<float>(test);
      test.method = NewtonMethod::automatic, test.segment = 8;
      expect_close<double>(test);
    }
    test.sequences = nothing, test.method = NewtonMethod::newton;
    expect_close<double>(test);
  }
  for (const char* type : {"paragru", "paralstm"})
    for (std::int64_t window : {0, 5, 33})
      expect_bits<float>({{type, 9}, sequences, NewtonMethod::shooting, window, 8});
}

TEST(Newton, LayersAndDirections) {
  const Sequences sequences{{0, 30, 30, 31, 75}};
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (int directions : {1, 2}) {
      const RandomCell cell{type, 6, 3, 0.7, 2, directions};
      expect_bits<double>({cell, sequences, NewtonMethod::sequential, directions == 1 ? 11 : 0});
      expect_close<float>({cell, sequences, NewtonMethod::automatic, 0, 8}, 5e-5);
      expect_close<double>({cell, sequences, NewtonMethod::newton});
      expect_close<double>({cell, {{0, 3}}, NewtonMethod::quasi});
    }
}

TEST(Newton, ReproducibleIsTheTokenLoop) {
  for (const std::string& type : all_cells)
    for (std::int64_t window : {0, 70}) {
      Case test{{type, 9, 3, 1}, {{0, 800}}, NewtonMethod::automatic, window};
      test.reproducible = true;
      expect_bits<float>(test);
    }
  NewtonOptions options;
  options.method = NewtonMethod::quasi, options.reproducible = true;
  EXPECT_THROW(Newton(world(), test::make_weights({"gru"}), 3, options, {{0, 4}}), Error);
}

TEST(Newton, HardAndChaoticByAuto) {
  for (double scale : {1.0, 2.0, 3.0, 5.0})
    for (const char* type : {"paragru", "paralstm"}) {
      Case test{{type, 24, 4, scale}, {{0, 6000}}};
      test.segment = 200;
      const Result<float> got = solve<float>(world(), test);
      EXPECT_TRUE(got.report.bits_of_token_loop);
      EXPECT_EQ(got.report.converged_prefix, 6000);
      expect_token_loop(test, 0, got);
      test.segment = 0, test.window = 700;
      expect_bits<double>(test);
    }
  for (double scale : {2.0, 4.0})
    for (const char* type : {"rnn_tanh", "gru", "lstm"}) {
      Case test{{type, 24, 4, scale}, {{0, 3000}}};
      test.segment = 200;
      const Result<double> got = solve<double>(world(), test);
      if (scale > 3 && type[0] != 'l') {
        EXPECT_EQ(got.report.status, NewtonStatus::fell_back) << type;
        EXPECT_GT(got.report.lyapunov, 0) << type;
      }
      expect_token_loop(test, got.report.bits_of_token_loop ? 0 : 1e-9, got);
    }
}

void expect_overflow_found() {
  // h' = relu(3 h + …) grows threefold a token
  const std::int64_t tokens = 300;
  CellWeights weights = test::make_weights({"rnn_relu", 2, 1});
  weights.tensors["weight_hh_l0"].values = {3, 0, 0, 3};
  weights.tensors["weight_ih_l0"].values = {1, 1};
  std::vector<float> x(tokens, 1.0f), h(tokens * 2);
  float state = 0;
  std::int64_t bad = 0;
  const auto bias = weights.tensors["bias_ih_l0"].values[0] + weights.tensors["bias_hh_l0"].values[0];
  for (; std::isfinite(state); ++bad) state = 3 * state + 1 + static_cast<float>(bias);
  for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::sequential, NewtonMethod::newton,
                              NewtonMethod::quasi, NewtonMethod::jacobi}) {
    NewtonOptions options;
    options.method = method, options.segment = 20, options.max_iterations = 2 * tokens;
    Newton newton(world(), weights, 1, options, {{0, tokens}});
    NewtonData data;
    data.x = x.data(), data.h = h.data();
    const NewtonReport report = newton.solve({0, tokens}, data);
    EXPECT_EQ(report.status, NewtonStatus::non_finite) << name_of(method);
    EXPECT_NEAR(static_cast<double>(report.first_bad_token), static_cast<double>(bad - 1), 1) << name_of(method);
  }
}
TEST(Newton, OverflowIsFound) { expect_overflow_found(); }

/// The way of shooting that devices take, on whatever kernels run on.
class AsOnADevice : public ::testing::Test {
 protected:
  void SetUp() override { shoots_on_device() = true; }
  void TearDown() override { shoots_on_device() = was_; }

 private:
  bool was_ = shoots_on_device();
};

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
  const std::int64_t segments[] = {1, 8, 24, 40, 0}, windows[] = {0, 17, 5};
  for (std::int64_t tokens = 1; tokens <= 70; tokens += 1 + tokens % 3) {
    Case test{{tokens % 2 ? "paragru" : "paralstm", 3 + tokens % 20, 2}, {{0, tokens}}};
    test.cell.scale = tokens % 7 < 4 ? 1 : 2;
    test.segment = segments[tokens % 5], test.window = windows[tokens % 3];
    test.method = tokens % 4 < 2 ? NewtonMethod::shooting : NewtonMethod::automatic;
    expect_bits<float>(test);
    test.cell.type = tokens % 2 ? "paralstm" : "paragru";
    expect_bits<double>(test);
  }
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

// --- a cell of one's own

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
  for (std::int64_t planted : {0, 1, 37, 150, 199})
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

// --- full-trajectory methods by sweeps over segments

TEST_F(AsOnADevice, SweepsAreTheTokenLoopToRounding) {
  const Sequences one{{0, 61}}, several{{0, 0, 20, 21, 21, 21, 64, 90, 90}}, nothing{{0, 0, 0, 0}};
  for (const std::string& type : all_cells)
    for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi})
      for (std::int64_t segment : {0, 1, 7, 16}) {
        expect_close<float>({{type, 5, 3, 0.7}, one, method, 0, segment});
        expect_close<double>({{type, 35, 3, 0.7}, several, method, segment == 7 ? 33 : 0, segment});
        expect_close<double>({{type, 5, 3, 0.7}, nothing, method, 0, segment});
      }
  for (const std::string& type : all_cells) {
    expect_close<float>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::picard, 0, 8});
    expect_close<double>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::jacobi, 0, 8});
    if (type.substr(0, 4) == "para") continue;
    expect_close<float>({{type, 6, 3, 0.7, 2, 2}, {{0, 30, 30, 31, 75}}, NewtonMethod::newton, 0, 9}, 5e-5);
  }
}

TEST_F(AsOnADevice, SweepsTakeAsManyStepsAsTheStreamedMethod) {
  for (const char* type : {"paragru", "paralstm", "gru"})
    for (NewtonMethod method : {NewtonMethod::newton, NewtonMethod::quasi})
      for (double scale : {0.7, 1.5, 4.0}) {  // the last blows up: far tokens start anew
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

TEST_F(AsOnADevice, LargeIteratesLeaveNoTrace) {
  for (std::int64_t segment : {0, 5}) expect_no_trace_of_large_iterates(segment);
}
TEST_F(AsOnADevice, OverflowIsFound) { expect_overflow_found(); }
TEST_F(AsOnADevice, KIterationsMakeKStatesExact) {
  for (std::int64_t segment : {0, 7}) expect_k_states_exact(segment);
}
TEST_F(AsOnADevice, ANaNLeavesEarlierTokensAlone) { expect_nan_leaves_earlier_tokens_alone(); }

}  // namespace
}  // namespace longscan
