// SPDX-License-Identifier: Apache-2.0
// A solve of random numbers by the ranks of a test, and what the token loop on one rank says of it.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "dist/newton_layer.hpp"
#include "newton_cases.hpp"

namespace longscan::test {

inline Transport& world() {
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

/// Of both cells whose channels do not mix, in both types; segments, windows, widths and methods go by the number.
inline void expect_bits_of_so_many(std::int64_t tokens) {
  const std::int64_t segments[] = {1, 8, 24, 40, 0}, windows[] = {0, 17, 5};
  Case test{{tokens % 2 ? "paragru" : "paralstm", 3 + tokens % 20, 2}, {{0, tokens}}};
  test.cell.scale = tokens % 7 < 4 ? 1 : 2;
  test.segment = segments[tokens % 5], test.window = windows[tokens % 3];
  test.method = tokens % 4 < 2 ? NewtonMethod::shooting : NewtonMethod::automatic;
  expect_bits<float>(test);
  test.cell.type = tokens % 2 ? "paralstm" : "paragru";
  expect_bits<double>(test);
}

/// The way of shooting that devices take, on whatever kernels run on.
class AsOnADevice : public ::testing::Test {
 protected:
  void SetUp() override { shoots_on_device() = true; }
  void TearDown() override { shoots_on_device() = was_; }

 private:
  bool was_ = shoots_on_device();
};

}  // namespace longscan::test
