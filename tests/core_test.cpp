// SPDX-License-Identifier: Apache-2.0
// The maths under everything: stored types, the exponential, the partition, affine maps, the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "core/affine.hpp"
#include "core/dtype.hpp"
#include "core/elementary.hpp"
#include "core/random.hpp"
#include "delta_cases.hpp"
#include "local/lanes.hpp"
#include "longscan/partition.hpp"

namespace longscan {
namespace {

using test::Case;
using test::Decay;

// --- stored types ---------------------------------------------------------------------------------------------------

/// A 16-bit float by its definition.
double decode(std::uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits));
}

struct SmallFloat {
  const char* name;
  int mantissa_bits;
  float (*from)(std::uint16_t);
  std::uint16_t (*to)(float);
  std::uint16_t infinity;
};
float call_from_f16(std::uint16_t b) { return from_f16(b); }
float call_from_bf16(std::uint16_t b) { return from_bf16(b); }
std::uint16_t call_to_f16(float x) { return to_f16(x); }
std::uint16_t call_to_bf16(float x) { return to_bf16(x); }

class SmallFloats : public ::testing::TestWithParam<SmallFloat> {};

TEST_P(SmallFloats, EveryPatternGoesThereAndBack) {
  const SmallFloat& f = GetParam();
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double value = decode(bits, f.mantissa_bits);
    const float got = f.from(bits);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(got)) << i;
      ASSERT_TRUE(std::isnan(f.from(f.to(got)))) << i;
    } else {
      ASSERT_EQ(got, value) << i;
      ASSERT_EQ(std::signbit(got), (bits & 0x8000) != 0) << i;
      ASSERT_EQ(f.to(got), bits) << i;
    }
  }
}

TEST_P(SmallFloats, RoundsToTheNearestAndTiesToEven) {
  const SmallFloat& f = GetParam();
  for (int sign : {0, 0x8000})
    for (int i = 0; i < f.infinity; ++i) {
      const auto low = static_cast<std::uint16_t>(i | sign), high = static_cast<std::uint16_t>(low + 1);
      const double a = decode(low, f.mantissa_bits), below = decode(low - 1, f.mantissa_bits);
      // the next value, had the format one more exponent: overflow is decided by rounding as well
      const double b = i + 1 < f.infinity ? decode(high, f.mantissa_bits) : a + (a - below);
      const auto middle = static_cast<float>((a + b) / 2);
      ASSERT_EQ(middle, (a + b) / 2) << "the test needs midpoints that are floats";
      ASSERT_EQ(f.to(middle), i % 2 == 0 ? low : high) << a;
      ASSERT_EQ(f.to(std::nextafter(middle, static_cast<float>(a))), low) << a;
      ASSERT_EQ(f.to(std::nextafter(middle, sign ? -HUGE_VALF : HUGE_VALF)), high) << a;
    }
}

TEST_P(SmallFloats, OverflowsToInfinityAndKeepsNaN) {
  const SmallFloat& f = GetParam();
  EXPECT_EQ(f.to(std::numeric_limits<float>::max()), f.infinity);
  EXPECT_EQ(f.to(-std::numeric_limits<float>::infinity()), f.infinity | 0x8000);
  EXPECT_EQ(f.to(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(f.to(-std::numeric_limits<float>::denorm_min()), 0x8000);
  for (std::uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu})
    EXPECT_TRUE(std::isnan(f.from(f.to(bits_as<float>(bits))))) << bits;
}

INSTANTIATE_TEST_SUITE_P(Core, SmallFloats,
                         ::testing::Values(SmallFloat{"f16", 10, call_from_f16, call_to_f16, 0x7C00},
                                           SmallFloat{"bf16", 7, call_from_bf16, call_to_bf16, 0x7F80}),
                         [](const auto& info) { return info.param.name; });

TEST(Core, RowsAreElementsOneByOne) {
  const std::vector<double> values{1.0, -2.5, 1e-3, 3e38, 0.1, -0.0, 65504};
  const int n = static_cast<int>(values.size());
  for (DType type : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> one((n + 1) * size_of(type)), row(one.size());
    for (int i = 0; i < n; ++i) store(one.data(), type, 1 + i, values[i]);
    store_row(row.data(), type, 1, n, values.data());
    EXPECT_EQ(one, row) << name_of(type);
    std::vector<double> back(n);
    load_row(row.data(), type, 1, n, back.data());
    for (int i = 0; i < n; ++i) EXPECT_EQ(back[i], load<double>(one.data(), type, 1 + i)) << name_of(type);
  }
}

TEST(Core, NonFiniteIsInfinityAndNaN) {
  for (double x : {0.0, -1.0, 5e-324, 1.7e308, -1.7e308}) EXPECT_FALSE(is_non_finite(x)) << x;
  for (float x : {0.0f, -1.0f, 1e-45f, 3.4e38f}) EXPECT_FALSE(is_non_finite(x)) << x;
  for (double x : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
    EXPECT_TRUE(is_non_finite(x)) << x;
    EXPECT_TRUE(is_non_finite(static_cast<float>(x))) << x;
  }
}

TEST(Core, ArithmeticFollowsTheWidestInput) {
  EXPECT_EQ(arithmetic_of(Precision::automatic, DType::f64), Precision::f64);
  EXPECT_EQ(arithmetic_of(Precision::automatic, DType::f32), Precision::f32);
  EXPECT_EQ(arithmetic_of(Precision::automatic, DType::f16), Precision::bf16);
  EXPECT_EQ(arithmetic_of(Precision::automatic, DType::bf16), Precision::bf16);
  for (Precision wanted : {Precision::f64, Precision::f32, Precision::bf16})
    EXPECT_EQ(arithmetic_of(wanted, DType::f64), wanted);
  EXPECT_EQ(state_type_of(Precision::f64), DType::f64);
  EXPECT_EQ(state_type_of(Precision::bf16), DType::f32);
}

// --- the exponential ------------------------------------------------------------------------------------------------

template <class T, class Wide>
double ulps(T got, Wide exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return static_cast<double>(std::abs(static_cast<Wide>(got) - exact) /
                             std::ldexp(Wide(1), exponent - std::numeric_limits<T>::digits));
}

template <class T, class Wide>
void check_exp(T x) {
  const Wide exact = std::exp(static_cast<Wide>(x));
  const T got = exp_nonpositive(x);
  if (exact < static_cast<Wide>(std::numeric_limits<T>::min()) * Wide(1.00001L)) {
    ASSERT_TRUE(got == T(0) || got >= std::numeric_limits<T>::min()) << x;
    if (exact < static_cast<Wide>(std::numeric_limits<T>::min()) * Wide(0.999L)) {
      ASSERT_EQ(got, T(0)) << x;
    }
    return;
  }
  ASSERT_LE((ulps<T, Wide>(got, exact)), test::exp_ulps) << x;
}

TEST(Core, ExponentialOfFloatsIsWithinTwoUnits) {
  const auto lowest = bits_as<std::uint32_t>(-1000.0f);
  for (std::uint32_t bits = 0x80000000u; bits <= lowest; bits += 997) check_exp<float, double>(bits_as<float>(bits));
}

TEST(Core, ExponentialOfDoublesIsWithinTwoUnits) {
  for (std::uint64_t i = 0; i < 200000; ++i) check_exp<double, long double>(-1000 * random_uniform(1, 0, i));
  for (std::uint64_t i = 0; i < 50000; ++i)
    check_exp<double, long double>(-std::pow(10, -20 * random_uniform(1, 1, i)));
}

TEST(Core, ExponentialAtTheEnds) {
  EXPECT_EQ(exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-0.0), 1.0);
  EXPECT_EQ(exp_nonpositive(-HUGE_VALF), 0.0f);
  EXPECT_EQ(exp_nonpositive(-HUGE_VAL), 0.0);
  EXPECT_EQ(exp_nonpositive(-std::numeric_limits<float>::max()), 0.0f);
  EXPECT_EQ(exp_nonpositive(-std::numeric_limits<double>::max()), 0.0);
}

TEST(Core, ExponentialNeverExceedsOne) {
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const double x = -random_uniform(2, 0, i) * std::pow(2.0, -30 * random_uniform(2, 1, i));
    ASSERT_LE(exp_nonpositive(x), 1.0) << x;
    ASSERT_LE(exp_nonpositive(static_cast<float>(x)), 1.0f) << x;
  }
}

// --- random numbers -------------------------------------------------------------------------------------------------

TEST(Core, RandomNumbersAreAFunctionOfTheirPlace) {
  std::set<std::uint64_t> seen;
  double mean = 0, square = 0, normal_mean = 0, normal_square = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i) {
    for (std::uint64_t stream : {0, 1}) seen.insert(random_bits(3, stream, i));
    const double u = random_uniform(3, 0, i), z = random_normal(3, 1, i);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    mean += u / n, square += u * u / n, normal_mean += z / n, normal_square += z * z / n;
  }
  EXPECT_EQ(seen.size(), 2u * n);
  EXPECT_NEAR(mean, 0.5, 0.01);
  EXPECT_NEAR(square, 1.0 / 3, 0.01);
  EXPECT_NEAR(normal_mean, 0, 0.03);
  EXPECT_NEAR(normal_square, 1, 0.05);
  EXPECT_EQ(random_bits(3, 1, 4), random_bits(3, 1, 4));
  EXPECT_NE(random_bits(3, 1, 4), random_bits(4, 1, 4));
}

// --- partition ------------------------------------------------------------------------------------------------------

TEST(Core, PartsCoverTheTokensEvenly) {
  for (std::int64_t tokens : {0, 1, 2, 5, 16, 17, 100, 133})
    for (int ranks = 1; ranks <= 9; ++ranks)
      for (std::int64_t multiple : {1, 2, 3, 16}) {
        std::int64_t at = 0, least = tokens + 1, most = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const TokenRange part = part_of(tokens, ranks, rank, multiple);
          ASSERT_EQ(part.begin, at);
          ASSERT_GE(part.end, part.begin);
          ASSERT_TRUE(part.end == tokens || part.end % multiple == 0);
          const std::int64_t units = (part.size() + multiple - 1) / multiple;
          least = std::min(least, units), most = std::max(most, units);
          at = part.end;
        }
        ASSERT_EQ(at, tokens);
        ASSERT_LE(most - least, 1);
      }
  const TokenRange large = part_of(std::int64_t{1} << 40, 3, 2);
  EXPECT_EQ(large.end, std::int64_t{1} << 40);
  EXPECT_EQ(large.size(), (std::int64_t{1} << 40) / 3);
}

/// runs_of, one sequence and token at a time.
std::vector<Run> brute_runs(const Sequences& s, TokenRange part, bool last) {
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < s.count(); ++i) {
    const std::int64_t begin = s.offsets[i], end = s.offsets[i + 1];
    Run run{i, 0, 0, 0, end - begin, false, false};
    bool there = false;
    for (std::int64_t t = part.begin; t < part.end; ++t) {
      if (t < begin || t >= end) continue;
      if (!there) run.begin = t - part.begin, run.position = t - begin;
      there = true, run.end = t + 1 - part.begin;
      run.starts |= t == begin, run.ends |= t + 1 == end;
    }
    const bool holds = begin >= part.begin && (begin < part.end || (last && begin == part.end));
    if (begin == end && holds) run = {i, begin - part.begin, begin - part.begin, 0, 0, true, true}, there = true;
    if (there) runs.push_back(run);
  }
  return runs;
}

void expect_same(const std::vector<Run>& got, const std::vector<Run>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Run &a = got[i], &b = expected[i];
    ASSERT_EQ(std::tie(a.sequence, a.begin, a.end, a.position, a.length, a.starts, a.ends),
              std::tie(b.sequence, b.begin, b.end, b.position, b.length, b.starts, b.ends))
        << what << ", run " << i;
  }
}

TEST(Core, RunsAreWhatAPartHoldsOfEachSequence) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Sequences s;
    const std::int64_t count = static_cast<std::int64_t>(random_bits(seed, 0, 0) % 7);
    for (std::int64_t i = 0; i < count; ++i)  // every other one may be empty
      s.offsets.push_back(s.offsets.back() + static_cast<std::int64_t>(random_bits(seed, 1, i) % 9 / 2 * (i % 3)));
    const std::int64_t tokens = s.tokens();
    for (std::int64_t b = 0; b <= tokens; ++b)
      for (std::int64_t e = b; e <= tokens; ++e)
        for (bool last : {false, true})
          expect_same(runs_of(s, {b, e}, last), brute_runs(s, {b, e}, last),
                      "seed " + std::to_string(seed) + " part " + std::to_string(b) + " " + std::to_string(e));
    // over all parts every sequence starts once, ends once, and has its tokens
    for (int ranks : {1, 2, 3, 7}) {
      std::vector<std::int64_t> starts(count), ends(count), held(count);
      int holder = 0;  // the last part with tokens takes what is empty at the end
      for (int rank = 0; rank < ranks; ++rank)
        if (!part_of(tokens, ranks, rank).empty()) holder = rank;
      for (int rank = 0; rank <= holder; ++rank)
        for (const longscan::Run& run : runs_of(s, part_of(tokens, ranks, rank), rank == holder)) {
          starts[run.sequence] += run.starts, ends[run.sequence] += run.ends, held[run.sequence] += run.size();
          EXPECT_EQ(run.length, s.offsets[run.sequence + 1] - s.offsets[run.sequence]);
        }
      EXPECT_EQ(starts, std::vector<std::int64_t>(count, 1)) << seed << " " << ranks;
      EXPECT_EQ(ends, std::vector<std::int64_t>(count, 1)) << seed << " " << ranks;
      for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(held[i], s.offsets[i + 1] - s.offsets[i]);
    }
  }
}

// --- affine maps ----------------------------------------------------------------------------------------------------

/// A map [A | b] of n values and m columns, as dense numbers in a padded or unpadded slot.
struct Affine {
  AffineMaps<double> shape;
  std::vector<double> values;
  Affine(int n, int m, bool padded_rows, std::uint64_t seed) {
    const int unit = padded_rows ? 8 : 1;
    shape = {nullptr, n, m, (n + m + unit - 1) / unit * unit, 0, padded_rows};
    values.resize(static_cast<std::size_t>(n) * shape.leading);
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n + m; ++j) values[i * shape.leading + j] = random_normal(seed, 0, i * (n + m) + j) / 2;
  }
};

Affine after(const Affine& second, const Affine& first) {
  Affine out = first;
  affine_compose(HostLanes<double>{}, first.shape, first.values.data(), second.values.data(), out.values.data());
  return out;
}

std::vector<double> apply(const Affine& map, const std::vector<double>& x, int leading) {
  std::vector<double> out(x.size());
  affine_apply(HostLanes<double>{}, map.shape, map.values.data(), x.data(), out.data(), leading);
  return out;
}

class AffineMapsOf : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};

TEST_P(AffineMapsOf, ComposeAssociativelyAndAsTheyApply) {
  const auto [n, m, padded_rows] = GetParam();
  const Affine f(n, m, padded_rows, 1), g(n, m, padded_rows, 2), h(n, m, padded_rows, 3);
  const int leading = padded_rows ? (m + 7) / 8 * 8 : m;
  std::vector<double> x(static_cast<std::size_t>(n) * leading);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < m; ++j) x[i * leading + j] = random_normal(4, 0, i * m + j);

  const auto once = apply(after(g, f), x, leading), twice = apply(g, apply(f, x, leading), leading);
  EXPECT_LE(test::difference(once, twice).worst, 1e-13);
  const Affine left = after(h, after(g, f)), right = after(after(h, g), f);
  EXPECT_LE(test::difference(left.values, right.values).worst, 1e-13);
  EXPECT_GT(test::difference(after(g, f).values, after(f, g).values).worst, 0.1) << "they do not commute";

  // and by the definition
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < m; ++j) {
      double sum = f.values[i * f.shape.leading + n + j];
      for (int k = 0; k < n; ++k) sum += f.values[i * f.shape.leading + k] * x[k * leading + j];
      EXPECT_NEAR(apply(f, x, leading)[i * leading + j], sum, 1e-13 * (n + 1));
    }
  for (int i = 0; i < n; ++i) {  // what is beyond the columns stays zero
    for (int j = m; j < leading; ++j) EXPECT_EQ(once[i * leading + j], 0);
    for (int j = n + m; j < f.shape.leading; ++j) EXPECT_EQ(left.values[i * f.shape.leading + j], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Core, AffineMapsOf,
                         ::testing::Combine(::testing::Values(1, 2, 3, 16, 21), ::testing::Values(1, 4, 8, 11),
                                            ::testing::Bool()));

// --- the reference --------------------------------------------------------------------------------------------------

using Matrix = std::vector<std::vector<double>>;

Matrix zeros(int rows, int cols) { return Matrix(rows, std::vector<double>(cols, 0.0)); }

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c = zeros(static_cast<int>(a.size()), static_cast<int>(b[0].size()));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < b[0].size(); ++j)
      for (std::size_t k = 0; k < b.size(); ++k) c[i][j] += a[i][k] * b[k][j];
  return c;
}

/// The transition M_t of S_t = S_{t-1} M_t + w v k^T as a K x K matrix, straight from design: D (I - beta k k^T),
/// D - beta k k^T, D + a b^T.
Matrix transition(const Case& c, std::int64_t t, int h, const std::vector<double>& k) {
  const int K = c.shape.d_key;
  Matrix decay = zeros(K, K), rest = zeros(K, K);
  for (int i = 0; i < K; ++i) {
    const double log_decay = c.log_decay.present() ? c.log_decay.get(t, h, c.shape.channel_decay ? i : 0) : 0;
    decay[i][i] = std::exp(log_decay);
  }
  if (c.options.variant == Variant::dplr) {
    for (int i = 0; i < K; ++i)
      for (int j = 0; j < K; ++j) decay[i][j] += c.a.get(t, h, i) * c.b.get(t, h, j);
    return decay;
  }
  const double beta = c.beta.get(t, h, 0);
  if (c.options.erase == Erase::undecayed) {
    for (int i = 0; i < K; ++i)
      for (int j = 0; j < K; ++j) decay[i][j] -= beta * k[i] * k[j];
    return decay;
  }
  for (int i = 0; i < K; ++i)
    for (int j = 0; j < K; ++j) rest[i][j] = (i == j) - beta * k[i] * k[j];
  return product(decay, rest);
}

struct Dense {
  std::vector<double> o;
  Matrix S, P;  ///< the last state, and the product of all transitions
};

Dense dense_solve(const Case& c, int h, Matrix S) {
  const int K = c.shape.d_key, V = c.shape.d_value;
  Dense out;
  out.P = zeros(K, K);
  for (int i = 0; i < K; ++i) out.P[i][i] = 1;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    std::vector<double> k(K);
    double norm = 0;
    for (int i = 0; i < K; ++i) k[i] = c.k.get(t, h, i), norm += k[i] * k[i];
    if (c.options.normalize_keys)
      for (double& x : k) x = norm > 0 ? x / std::sqrt(norm) : 0;
    const Matrix M = transition(c, t, h, k);
    S = product(S, M), out.P = product(out.P, M);
    const double write = c.options.variant == Variant::dplr ? 1
                         : c.eta.present()                  ? c.eta.get(t, h, 0)
                                                            : c.beta.get(t, h, 0);
    for (int v = 0; v < V; ++v)
      for (int i = 0; i < K; ++i) S[v][i] += write * c.v.get(t, h, v) * k[i];
    for (int v = 0; v < V; ++v) {
      double sum = 0;
      for (int i = 0; i < K; ++i) sum += S[v][i] * c.q.get(t, h, i);
      out.o.push_back(c.options.scale * sum);
    }
  }
  out.S = S;
  return out;
}

std::vector<double> flat(const Matrix& m) {
  std::vector<double> all;
  for (const auto& row : m) all.insert(all.end(), row.begin(), row.end());
  return all;
}

TEST(Core, ReferenceIsTheDefinition) {
  for (const test::Rule& rule : test::all_rules)
    for (Decay decay : test::all_decays)
      for (bool eta : {false, true})
        for (bool normalize : {false, true}) {
          test::Recipe recipe;
          recipe.tokens = 9, recipe.d_key = 4, recipe.d_value = 3;
          recipe.rule = rule, recipe.decay = decay, recipe.eta = eta, recipe.log_decay_mean = -0.5;
          Case c = test::make_case(recipe);
          c.options.scale = 0.7, c.options.normalize_keys = normalize;
          for (int i = 0; i < 4; ++i) c.k.set(2, 1, i, normalize ? 0 : 1.5);  // a zero key, or a long one
          const reference::DeltaProblem problem = c.problem();
          for (int h = 0; h < 2; ++h) {
            Matrix S = zeros(3, 4);
            for (int i = 0; i < 12; ++i) S[i / 4][i % 4] = random_normal(5, h, i);
            std::vector<double> state = flat(S), o(c.tokens * 3), P(16), L(12);
            reference::delta_rule(problem, h, 0, c.tokens, 0, 3, state.data(), o.data());
            reference::delta_map(problem, h, 0, c.tokens, P.data(), L.data());
            const Dense dense = dense_solve(c, h, S);
            EXPECT_LE(test::difference(o, dense.o).worst, 1e-13) << test::describe(c);
            EXPECT_LE(test::difference(state, flat(dense.S)).worst, 1e-13) << test::describe(c);
            EXPECT_LE(test::difference(P, flat(dense.P)).worst, 1e-13) << test::describe(c);
            EXPECT_LE(test::difference(L, flat(dense_solve(c, h, zeros(3, 4)).S)).worst, 1e-13) << test::describe(c);
            // S P + L is the state after
            Matrix Pm = zeros(4, 4);
            for (int i = 0; i < 16; ++i) Pm[i / 4][i % 4] = P[i];
            auto mapped = flat(product(S, Pm));
            for (int i = 0; i < 12; ++i) mapped[i] += L[i];
            EXPECT_LE(test::difference(mapped, state).worst, 1e-13) << test::describe(c);
          }
        }
}

TEST(Core, ReferenceByHand) {
  // K = V = 1: s <- s d (1 - beta k^2) + eta v k, or s (d - beta k^2) + eta v k
  test::Recipe recipe;
  recipe.tokens = 1, recipe.heads = recipe.d_key = recipe.d_value = 1, recipe.decay = Decay::head, recipe.eta = true;
  Case c = test::make_case(recipe);
  c.q.set(0, 0, 0, 10), c.k.set(0, 0, 0, 2), c.v.set(0, 0, 0, 7), c.beta.set(0, 0, 0, 0.25), c.eta.set(0, 0, 0, 0.5);
  c.log_decay.set(0, 0, 0, std::log(0.5));
  double s = 3, o = 0;
  reference::delta_rule(c.problem(), 0, 0, 1, 0, 1, &s, &o);
  EXPECT_DOUBLE_EQ(s, 3 * 0.5 * (1 - 0.25 * 4) + 0.5 * 7 * 2);
  EXPECT_DOUBLE_EQ(o, 10 * s);
  c.options.erase = Erase::undecayed;
  s = 3;
  reference::delta_rule(c.problem(), 0, 0, 1, 0, 1, &s, &o);
  EXPECT_DOUBLE_EQ(s, 3 * (0.5 - 0.25 * 4) + 0.5 * 7 * 2);
}

TEST(Core, ReferenceFollowsRowsAlone) {
  test::Recipe recipe;
  recipe.tokens = 20, recipe.decay = Decay::channel;
  const Case c = test::make_case(recipe);
  const int V = recipe.d_value, K = recipe.d_key;
  std::vector<double> all(V * K), o(c.tokens * V), row(2 * K), o_row(c.tokens * 2);
  reference::delta_rule(c.problem(), 1, 0, c.tokens, 0, V, all.data(), o.data());
  reference::delta_rule(c.problem(), 1, 0, c.tokens, 5, 7, row.data(), o_row.data());
  EXPECT_TRUE(std::equal(row.begin(), row.end(), all.begin() + 5 * K));
  for (std::int64_t t = 0; t < c.tokens; ++t) EXPECT_EQ(o_row[2 * t + 1], o[t * V + 6]);
}

TEST(Core, ErasesAgreeForOneDecayAHead) {
  // undecayed with beta' = exp(log_decay) beta is decayed with beta
  test::Recipe recipe;
  recipe.decay = Decay::head, recipe.eta = true, recipe.initial_states = true;
  Case decayed = test::make_case(recipe), undecayed = decayed;
  undecayed.options.erase = Erase::undecayed;
  for (std::int64_t t = 0; t < decayed.tokens; ++t)
    for (int h = 0; h < recipe.heads; ++h)
      undecayed.beta.set(t, h, 0, decayed.beta.get(t, h, 0) * std::exp(decayed.log_decay.get(t, h, 0)));
  EXPECT_EQ(test::too_far(test::expected(undecayed), test::expected(decayed), DType::f64), "");
}

TEST(Core, GroupedHeadsShareNeighbours) {
  test::Recipe recipe;
  recipe.heads = 4, recipe.key_heads = 2;
  const Case grouped = test::make_case(recipe);
  Case repeated = grouped;
  for (test::Numbers Case::*x : {&Case::q, &Case::k}) {
    repeated.*x = test::Numbers(DType::f64, grouped.tokens, 4, recipe.d_key);
    for (std::int64_t t = 0; t < grouped.tokens; ++t)
      for (int h = 0; h < 4; ++h)
        for (int i = 0; i < recipe.d_key; ++i) (repeated.*x).set(t, h, i, (grouped.*x).get(t, h / 2, i));
  }
  EXPECT_TRUE(test::expected(grouped) == test::expected(repeated));
}

}  // namespace
}  // namespace longscan
