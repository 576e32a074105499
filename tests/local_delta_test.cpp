// SPDX-License-Identifier: Apache-2.0
// Launches on one rank, each against the reference: passes over tokens, maps, small products, checks of inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/random.hpp"
#include "delta_cases.hpp"
#include "local/affine_scan.hpp"
#include "local/check_inputs.hpp"
#include "local/delta_pass.hpp"
#include "local/small_gemm.hpp"
#include "longscan/error.hpp"
#include "some_of.hpp"

namespace longscan {
namespace {

using test::all_decays;
using test::all_inverses;
using test::all_rules;
using test::Case;
using test::Decay;
using test::Difference;
using test::Memory;
using test::Recipe;
using test::some_of;
using test::tolerance_of;

/// Not a constant: there is no device before Kokkos::initialize.
Kokkos::DefaultExecutionSpace space() { return {}; }

// --- one pass over all tokens ---------------------------------------------------------------------------------------

struct Pass {
  std::vector<double> o;      ///< [T,H,V]
  std::vector<double> state;  ///< [H,V,K]
  std::vector<double> map;    ///< [H,K,K], P; with a map
  DeltaCounts counts;         ///< of all heads: sums, and the most terms
};

DeltaRules rules_of(const Case& c) {
  DeltaRules r;
  r.chunk = c.options.chunk, r.d_key = c.shape.d_key, r.d_value = c.shape.d_value;
  r.dplr = c.options.variant == Variant::dplr, r.undecayed = c.options.erase == Erase::undecayed;
  r.channel_decay = c.shape.channel_decay, r.normalize_keys = c.options.normalize_keys;
  r.inverse = c.options.inverse, r.scale = c.options.scale;
  return r;
}

/// All heads from the initial states (zero with a map), one task a head.
template <class T>
Pass run(const Case& c, bool map = false) {
  const std::int64_t H = c.shape.heads, V = c.shape.d_value, K = c.shape.d_key, columns = map ? K + V : V;
  constexpr DType type = sizeof(T) == 8 ? DType::f64 : DType::f32;
  Memory memory;
  const DeltaInputs in = memory.inputs(c, 0, c.tokens);
  DeltaPass<T> pass;
  pass.rules = rules_of(c);
  pass.rules.map = map, pass.rules.outputs = pass.rules.count_breaches = !map;
  pass.in = {in.q, in.k, in.v, in.beta, in.eta, in.log_decay, in.a, in.b};
  const std::vector<T> start(c.initial_states.begin(), c.initial_states.end());
  const T* from = start.empty() || map ? nullptr : memory.copy(start);
  T* to = memory.room_for<T>(H * K * columns);  // [H][K][columns]
  std::vector<DeltaTask<T>> tasks(H);
  for (int h = 0; h < H; ++h) {
    tasks[h].end = c.tokens, tasks[h].head = h;
    if (from) tasks[h].from = {from + h * V * K, 1, K};
    tasks[h].to = {to + h * K * columns, columns, 1};
  }
  pass.tasks = memory.copy(tasks), pass.task_count = H, pass.heads = c.shape.heads;
  T* const o = memory.room_for<T>(std::max<std::int64_t>(1, c.tokens * H * V));
  pass.out = {o, type, H * V, V};
  pass.counts = memory.room_for<DeltaCounts>(H);
  delta_pass(space(), pass);
  space().fence();

  Pass result;
  if (!map) {
    const auto values = memory.fetch(o, c.tokens * H * V);
    result.o.assign(values.begin(), values.end());
  }
  const auto states = memory.fetch(to, H * K * columns);
  const std::int64_t first = columns - V;
  for (std::int64_t h = 0; h < H; ++h)
    for (std::int64_t v = 0; v < V; ++v)
      for (std::int64_t k = 0; k < K; ++k) result.state.push_back(states[(h * K + k) * columns + first + v]);
  for (std::int64_t h = 0; h < H && map; ++h)
    for (std::int64_t i = 0; i < K; ++i)
      for (std::int64_t j = 0; j < K; ++j) result.map.push_back(states[(h * K + j) * columns + i]);  // P^T -> P
  result.counts = {};
  for (const DeltaCounts& counts : memory.fetch(pass.counts, H)) {
    if (counts.first_bad >= 0) result.counts.first_bad = counts.first_bad;
    result.counts.breaches += counts.breaches, result.counts.fallbacks += counts.fallbacks;
    result.counts.terms = std::max(result.counts.terms, counts.terms);
  }
  return result;
}

Pass run(const Case& c) { return c.options.precision == Precision::f64 ? run<double>(c) : run<float>(c); }
Pass run_map(const Case& c) {
  return c.options.precision == Precision::f64 ? run<double>(c, true) : run<float>(c, true);
}

void expect_close(const Case& c, const Pass& got, const test::Solution& expected, double factor = 1) {
  test::Solution s;
  s.o = got.o, s.final_states = got.state;
  EXPECT_EQ(test::too_far(s, expected, c.state_type(), factor), "") << test::describe(c);
}

void expect_right(const Case& c, double factor = 1) { expect_close(c, run(c), test::expected(c), factor); }

// --- against the reference ------------------------------------------------------------------------------------------

class DeltaPassOf : public ::testing::TestWithParam<std::tuple<test::Rule, Decay, DType>> {
 protected:
  Recipe recipe() const {
    Recipe r;
    std::tie(r.rule, r.decay, r.type) = GetParam();
    return r;
  }
};

TEST_P(DeltaPassOf, AnyChunkAndInverseGivesTheReference) {
  Recipe r = recipe();
  r.tokens = 100, r.d_key = 24, r.d_value = 20, r.heads = 1, r.initial_states = true;
  r.eta = r.rule.variant == Variant::delta;
  Case c = test::make_case(r);
  c.options.scale = 0.5;
  const test::Solution expected = test::expected(c);
  for (Inverse inverse : all_inverses)
    for (int chunk : some_of({1, 3, 16, 17, 64, 256})) {
      c.options.inverse = inverse, c.options.chunk = chunk;
      expect_close(c, run(c), expected);
    }
}

TEST_P(DeltaPassOf, AnySizesGiveTheReference) {
  const std::pair<int, int> sizes[] = {{1, 1},    {1, 8},    {3, 40},  {8, 3},  {24, 1},
                                       {40, 130}, {130, 24}, {257, 8}, {3, 257}};
  for (const auto& [K, V] : some_of(sizes)) {
    Recipe r = recipe();
    r.tokens = 70, r.heads = 1, r.d_key = K, r.d_value = V, r.beta_high = K == 1 ? 0.9 : 1;
    Case c = test::make_case(r);
    c.options.chunk = 32;
    expect_right(c);
  }
}

TEST_P(DeltaPassOf, EveryTokenCountOfAChunk) {
  for (int tokens : some_of(0, 2 * 16 + 2)) {  // every T mod C, no token, less than a chunk, more
    Recipe r = recipe();
    r.tokens = tokens, r.heads = 3, r.initial_states = true;
    Case c = test::make_case(r);
    c.options.chunk = 16;
    expect_right(c);
  }
}

TEST_P(DeltaPassOf, MapsAreTheReferencesMaps) {
  for (int chunk : {1, 17, 64})
    for (const auto& [K, V] : some_of({std::pair(1, 3), std::pair(24, 8), std::pair(7, 40)})) {
      Recipe r = recipe();
      r.tokens = 100, r.d_key = K, r.d_value = V, r.beta_high = K == 1 ? 0.02 : 0.5;
      r.log_decay_mean = -0.01;
      Case c = test::make_case(r);
      c.options.chunk = chunk;
      const Pass got = run_map(c);
      std::vector<double> P(r.heads * K * K), L(r.heads * V * K);
      for (int h = 0; h < r.heads; ++h)
        reference::delta_map(c.problem(), h, 0, c.tokens, P.data() + h * K * K, L.data() + h * V * K);
      const double allowed = tolerance_of(c.state_type()).worst;
      EXPECT_LE(test::difference(got.map, P).worst, allowed) << test::describe(c);
      EXPECT_LE(test::difference(got.state, L).worst, allowed) << test::describe(c);
      EXPECT_EQ(got.counts.first_bad, -1);
    }
}

TEST_P(DeltaPassOf, LaterTokensChangeNoEarlierBit) {
  Recipe r = recipe();
  r.tokens = 90, r.heads = 1, r.eta = r.rule.variant == Variant::delta, r.beta_high = 0.3;
  Case c = test::make_case(r);
  for (Inverse inverse : all_inverses) {
    c.options.inverse = inverse, c.options.chunk = 64;
    const Pass whole = run(c);
    for (int t : some_of({1, 5, 16, 17, 40, 63, 64, 80})) {
      Case other = c;
      for (test::Numbers Case::*x : {&Case::q, &Case::k, &Case::v, &Case::beta, &Case::eta, &Case::a, &Case::b})
        for (std::int64_t s = t; s < c.tokens; ++s)  // far larger values, and the other sign
          for (int i = 0; i < (other.*x).width; ++i) (other.*x).set(s, 0, i, -3 * (c.*x).get(s, 0, i) - 1);
      if (c.log_decay.present())
        for (std::int64_t s = t; s < c.tokens; ++s)
          for (int i = 0; i < other.log_decay.width; ++i)
            other.log_decay.set(s, 0, i, s % 3 ? -HUGE_VAL : 40 * c.log_decay.get(s, 0, i));
      const Pass changed = run(other);
      const auto same = static_cast<std::size_t>(t * r.d_value);
      EXPECT_EQ(std::memcmp(whole.o.data(), changed.o.data(), same * sizeof(double)), 0)
          << test::describe(c) << " " << t;
      EXPECT_NE(std::memcmp(whole.o.data() + same, changed.o.data() + same, r.d_value * sizeof(double)), 0);
    }
  }
}

TEST_P(DeltaPassOf, ShorterSequenceHasTheSameBits) {
  Recipe r = recipe();
  r.tokens = 90, r.heads = 1, r.beta_high = 0.3;
  Case c = test::make_case(r);
  for (Inverse inverse : all_inverses) {
    c.options.inverse = inverse;
    const Pass whole = run(c);
    for (int tokens : some_of({1, 15, 16, 63, 70})) {
      Case head = c;
      head.tokens = tokens, head.sequences.offsets = {0, tokens};
      const Pass part = run(head);
      EXPECT_EQ(std::memcmp(whole.o.data(), part.o.data(), part.o.size() * sizeof(double)), 0) << test::describe(head);
    }
  }
}

std::string name_of_pass(const ::testing::TestParamInfo<std::tuple<test::Rule, Decay, DType>>& info) {
  const auto& [rule, decay, type] = info.param;
  const char* decays[] = {"none", "head", "channel"};
  return std::string(rule.variant == Variant::dplr ? "dplr" : name_of(rule.erase)) + "_" +
         decays[static_cast<int>(decay)] + "_" + std::string(name_of(type));
}

INSTANTIATE_TEST_SUITE_P(Local, DeltaPassOf,
                         ::testing::Combine(::testing::ValuesIn(all_rules), ::testing::ValuesIn(all_decays),
                                            ::testing::Values(DType::f64, DType::f32)),
                         name_of_pass);

TEST(LocalDelta, SixteenBitInputsAreReadExactly) {
  for (DType type : {DType::f16, DType::bf16})
    for (DType gates : {DType::f16, DType::bf16, DType::f32})
      for (const test::Rule& rule : all_rules)
        for (Decay decay : all_decays) {
          Recipe r;
          r.type = type, r.gate_type = gates, r.rule = rule, r.decay = decay, r.d_key = 16, r.tokens = 100;
          r.eta = rule.variant == Variant::delta;
          expect_right(test::make_case(r));
        }
}

/// Whether float sums of products of 16-bit numbers, which a device may round within as it likes, are the same.
void expect_same_sums(const test::Solution& a, const test::Solution& b, const Case& c) {
  if constexpr (is_host_space<Kokkos::DefaultExecutionSpace>)
    EXPECT_TRUE(a == b) << test::describe(c);
  else
    EXPECT_LE(test::difference(a.o, b.o).rms, 3e-3) << test::describe(c);
}

TEST(LocalDelta, BrainFloatArithmeticRoundsItsOperands) {
  // the same bits as float32 arithmetic on operands that were rounded before; beta and decays are not rounded
  for (const test::Rule& rule : all_rules) {
    Recipe r;
    r.type = DType::f32, r.rule = rule, r.decay = Decay::head;
    const Case c = test::make_case(r);
    Case rounded = c;
    for (test::Numbers Case::*x : {&Case::q, &Case::k, &Case::v, &Case::a, &Case::b})
      for (std::int64_t t = 0; t < c.tokens; ++t)
        for (int h = 0; h < r.heads; ++h)
          for (int i = 0; i < (c.*x).width; ++i)
            (rounded.*x).set(t, h, i, from_bf16(to_bf16(static_cast<float>((c.*x).get(t, h, i)))));
    Case brain = c;
    brain.options.precision = Precision::bf16;
    const auto ranks = make_single_transport();
    expect_same_sums(test::solve(*ranks, brain), test::solve(*ranks, rounded), c);
    EXPECT_FALSE(test::solve(*ranks, brain) == test::solve(*ranks, c)) << test::describe(c);
  }
}

TEST(LocalDelta, SixteenBitOperandsAreTakenAsTheyAre) {
  for (DType type : {DType::f16, DType::bf16}) {
    Recipe r;
    r.type = type;
    const Case c = test::make_case(r);
    Case brain = c;
    brain.options.precision = Precision::bf16;
    const auto ranks = make_single_transport();
    expect_same_sums(test::solve(*ranks, brain), test::solve(*ranks, c), c);
  }
}

TEST(LocalDelta, OutputsRoundToTheirType) {
  Recipe r;
  r.type = DType::f32;
  const Case c = test::make_case(r);
  const Pass exact = run(c);
  for (DType type : {DType::f64, DType::f16, DType::bf16}) {
    const auto ranks = make_single_transport();
    DeltaRule rule(*ranks, c.shape, c.options, c.sequences);
    Memory memory;
    const std::int64_t n = c.tokens * r.heads * r.d_value;
    DeltaOutputs out;
    out.o = {memory.room(n * size_of(type)), type, std::int64_t{r.heads} * r.d_value, r.d_value};
    rule.solve({0, c.tokens}, memory.inputs(c, 0, c.tokens), out);
    std::vector<std::byte> bytes(n * size_of(type)), expected(bytes);
    memory.fetch(bytes.data(), out.o.data, bytes.size());
    for (std::int64_t i = 0; i < n; ++i) store(expected.data(), type, i, static_cast<float>(exact.o[i]));
    EXPECT_EQ(bytes, expected) << name_of(type);
  }
}

TEST(LocalDelta, LayoutsAndSharedHeadsAreStrides) {
  // [T,H,width] against [H,T,width], and heads stored once for two
  Recipe r;
  r.heads = 4, r.key_heads = 2, r.decay = Decay::channel;
  const Case c = test::make_case(r);
  expect_right(c);
  const auto ranks = make_single_transport();
  const test::Solution expected = test::solve(*ranks, c);
  Memory memory;
  DeltaInputs in = memory.inputs(c, 0, c.tokens);
  for (auto [x, view] : {std::pair(&c.q, &in.q), std::pair(&c.k, &in.k), std::pair(&c.v, &in.v),
                         std::pair(&c.log_decay, &in.log_decay)}) {
    std::vector<double> moved(c.tokens * x->heads * x->width);
    for (std::int64_t t = 0; t < c.tokens; ++t)
      for (int h = 0; h < x->heads; ++h)
        for (int i = 0; i < x->width; ++i) moved[(h * c.tokens + t) * x->width + i] = x->get(t, h, i);
    view->data = memory.copy(moved), view->token_stride = x->width, view->head_stride = c.tokens * x->width;
  }
  const std::int64_t V = r.d_value;
  DeltaOutputs out;
  double* const o = memory.room_for<double>(4 * c.tokens * V);
  out.o = {o, DType::f64, V, c.tokens * V};
  DeltaRule(*ranks, c.shape, c.options, c.sequences).solve({0, c.tokens}, in, out);
  const auto got = memory.fetch(o, 4 * c.tokens * V);
  for (std::int64_t t = 0; t < c.tokens; ++t)
    for (int h = 0; h < 4; ++h)
      for (int i = 0; i < V; ++i) ASSERT_EQ(got[(h * c.tokens + t) * V + i], expected.o[(t * 4 + h) * V + i]);
}

TEST(LocalDelta, KeysAreNormalised) {
  for (DType type : {DType::f64, DType::f32}) {
    Recipe r;
    r.type = type;
    Case c = test::make_case(r);
    for (std::int64_t t = 0; t < c.tokens; ++t)
      for (int i = 0; i < r.d_key; ++i) c.k.set(t, 0, i, 20 * c.k.get(t, 0, i));
    for (int i = 0; i < r.d_key; ++i) c.k.set(33, 1, i, 0);  // a zero key stays zero
    c.options.normalize_keys = true;
    expect_right(c);
  }
}

TEST(LocalDelta, StatesAreRecordedWhereTheyAreDue) {
  for (std::int64_t every : {1, 7, 16, 50, 64, 150, 151}) {
    Recipe r;
    r.decay = Decay::head, r.initial_states = true;
    Case c = test::make_case(r);
    c.options.state_every = every;
    const auto ranks = make_single_transport();
    EXPECT_EQ(test::too_far(test::solve(*ranks, c), test::expected(c), DType::f64), "") << every;
  }
}

// --- decays: only factors that are at most 1 ------------------------------------------------------------------------

TEST(LocalDelta, ZeroLogDecayIsAsAccurateAsNone) {
  for (DType type : {DType::f64, DType::f32})
    for (const test::Rule& rule : all_rules) {
      Recipe r;
      r.type = type, r.rule = rule, r.tokens = 500, r.heads = 1;
      const Case plain = test::make_case(r);
      const test::Solution expected = test::expected(plain);
      const double without = test::difference(run(plain).o, expected.o).rms;
      for (Decay decay : {Decay::head, Decay::channel}) {
        r.decay = decay;
        Case c = test::make_case(r);
        c.log_decay.fill(0);
        const Pass got = run(c);
        EXPECT_LE(test::difference(got.o, expected.o).rms, 1.5 * without) << test::describe(c);
        expect_close(c, got, expected);
      }
    }
}

TEST(LocalDelta, AnyDecayGivesNumbers) {
  const double infinite = HUGE_VAL;
  // decays that sum far below what exp() can hold, forget everything, and are none at all, in many mixtures
  const std::vector<std::vector<double>> mixtures = {{0, -200},
                                                     {-1000},
                                                     {-infinite},
                                                     {0, 0, 0, -infinite},
                                                     {-200, -1000, -infinite, 0, -0.1},
                                                     {-1e-8, -80, -90, -100},
                                                     {-0.5},
                                                     {-3e38},
                                                     {-745, -708.5, -708.3, -87.5, -87.2, -103}};
  for (DType type : {DType::f64, DType::f32})
    for (const test::Rule& rule : all_rules)
      for (Decay decay : {Decay::head, Decay::channel})
        for (int m : some_of(0, static_cast<int>(mixtures.size()))) {
          Recipe r;
          r.type = type, r.rule = rule, r.decay = decay, r.heads = 1, r.initial_states = true, r.tokens = 100;
          Case c = test::make_case(r);
          const auto& values = mixtures[m];
          for (std::int64_t t = 0; t < c.tokens; ++t)
            for (int i = 0; i < c.log_decay.width; ++i) {
              const std::uint64_t place = t * c.log_decay.width + i;
              c.log_decay.set(t, 0, i, values[random_bits(m, 3, place) % values.size()]);
            }
          const test::Solution expected = test::expected(c);
          for (Inverse inverse : all_inverses) {
            c.options.inverse = inverse;
            const Pass got = run(c);
            EXPECT_EQ(got.counts.first_bad, -1) << test::describe(c) << ", mixture " << m;
            expect_close(c, got, expected);
          }
        }
}

TEST(LocalDelta, TotalForgettingIsExact) {
  // after log_decay = -200 or -infinity nothing of the old state is left: the same bits as a start from zero
  for (DType type : {DType::f64, DType::f32})
    for (double decay : {-200.0, -HUGE_VAL})
      for (Decay kind : {Decay::head, Decay::channel}) {
        if (type == DType::f64 && decay == -200.0) continue;  // e^-200 is a double
        Recipe r;
        r.type = type, r.decay = kind, r.heads = 1, r.initial_states = true;
        Case c = test::make_case(r);
        for (int i = 0; i < c.log_decay.width; ++i) c.log_decay.set(0, 0, i, decay);
        const Pass with = run(c);
        c.initial_states.clear();
        const Pass without = run(c);
        EXPECT_EQ(with.o, without.o) << test::describe(c);
        EXPECT_EQ(with.state, without.state) << test::describe(c);
      }
}

// --- the triangular system ------------------------------------------------------------------------------------------

TEST(LocalDelta, NearlyEqualKeysStayAccurate) {
  // powers of A grow to 1e5 and beyond here: a product of (I + A)(I + A^2)(I + A^4)… would be wrong
  for (DType type : {DType::f64, DType::f32})
    for (double noise : {0.0, 1e-3}) {
      Recipe r;
      r.type = type, r.key_noise = noise, r.tokens = 256, r.heads = 1, r.d_key = r.d_value = 16;
      Case c = test::make_case(r);
      c.beta.fill(0.999);
      const test::Solution expected = test::expected(c);
      for (Inverse inverse : all_inverses)
        for (int chunk : {16, 64, 256}) {
          c.options.chunk = chunk, c.options.inverse = inverse;
          const Pass got = run(c);
          expect_close(c, got, expected, 4);
          if (inverse == Inverse::forward) {
            EXPECT_EQ(got.counts.fallbacks, 0);
            EXPECT_EQ(got.counts.terms, 0);
          } else {
            EXPECT_EQ(got.counts.fallbacks, 256 / chunk) << "every chunk falls back, and says so";
          }
        }
    }
}

TEST(LocalDelta, SeriesAreShortWhereTheNormIsSmall) {
  // beta <= 1/(2 (C - 1)) and unit keys: |A| <= 1/2, so about log2(1/eps) terms are enough, whatever the keys
  for (DType type : {DType::f64, DType::f32})
    for (int chunk : {128, 256}) {
      Recipe r;
      r.type = type, r.tokens = 256, r.heads = 1, r.d_value = 3, r.key_noise = 0;
      Case c = test::make_case(r);
      c.beta.fill(0.5 / (chunk - 1));
      c.options.chunk = chunk;
      const test::Solution expected = test::expected(c);
      std::int64_t terms[3] = {};
      for (Inverse inverse : all_inverses) {
        c.options.inverse = inverse;
        const Pass got = run(c);
        expect_close(c, got, expected);
        EXPECT_EQ(got.counts.fallbacks, 0) << test::describe(c);
        terms[static_cast<int>(inverse)] = got.counts.terms;
      }
      EXPECT_EQ(terms[0], 0);
      for (int i : {1, 2}) {
        EXPECT_GT(terms[i], 0);
        EXPECT_LT(2 * terms[i], chunk);
      }
      EXPECT_LE(terms[2], terms[1]) << "richardson stops by itself";
      EXPECT_LE(terms[1], type == DType::f64 ? 55 : 26);
    }
}

TEST(LocalDelta, BoundsGoWithTheChunkNotWithTheKeys) {
  // A is C x C: with the same tokens, a longer chunk has a larger norm; the sizes of keys do not matter
  for (int K : {3, 100}) {
    Recipe r;
    r.type = DType::f32, r.tokens = 256, r.heads = 1, r.d_key = K, r.d_value = 5, r.key_noise = 0;
    Case c = test::make_case(r);
    c.beta.fill(0.5 / 63);
    c.options.inverse = Inverse::neumann;
    c.options.chunk = 64;
    const Pass small = run(c);
    EXPECT_EQ(small.counts.fallbacks, 0);
    EXPECT_LT(2 * small.counts.terms, 64);
    c.options.chunk = 256;
    const Pass large = run(c);
    EXPECT_EQ(large.counts.fallbacks, 1);
    expect_right(c);
  }
}

TEST(LocalDelta, SeriesHaveNoMoreTermsThanTheNilpotentNeeds) {
  // one pair of equal keys in a chunk, all others orthogonal to everything: A^2 = 0
  Recipe r;
  r.tokens = 20, r.heads = 1, r.d_key = 20;
  Case c = test::make_case(r);
  for (std::int64_t t = 0; t < 20; ++t)
    for (int i = 0; i < 20; ++i) c.k.set(t, 0, i, i == (t == 7 ? 3 : t));
  c.options.inverse = Inverse::richardson, c.options.chunk = 256;
  c.beta.fill(0.5);
  const Pass got = run(c);
  EXPECT_LE(got.counts.terms, 3);
  EXPECT_EQ(got.counts.fallbacks, 0);
  expect_right(c);
}

// --- strengths ------------------------------------------------------------------------------------------------------

TEST(LocalDelta, EraseAndWriteStrengthsAreSeparate) {
  for (DType type : {DType::f64, DType::f32})
    for (Decay decay : all_decays) {
      Recipe r;
      r.type = type, r.eta = true, r.decay = decay, r.initial_states = true;
      const Case both = test::make_case(r);
      expect_right(both);
      Case no_erase = both, no_write = both, nothing = both;
      no_erase.beta.fill(0), no_write.eta.fill(0), nothing.beta.fill(0), nothing.eta.fill(0);
      expect_right(no_erase);     // linear attention
      expect_right(no_write, 4);  // nothing but a product of 150 rounded factors
      expect_right(nothing);
      Case zero = both;
      zero.eta = {}, zero.beta.fill(0);  // eta defaults to beta
      const Pass got = run(zero);
      EXPECT_EQ(got.o, run(nothing).o);
      EXPECT_EQ(got.state, run(nothing).state);
      if (decay != Decay::none) continue;
      EXPECT_EQ(got.state, both.initial_states) << "the state passes through";
    }
}

TEST(LocalDelta, ReflectionsAreWithinTheBound) {
  for (DType type : {DType::f64, DType::f32}) {
    Recipe r;
    r.type = type, r.beta_low = 1, r.beta_high = 2, r.tokens = 400;
    const Case c = test::make_case(r);
    expect_right(c, 4);
    EXPECT_EQ(run(c).counts.breaches, 0);
  }
}

TEST(LocalDelta, BreachesOfTheStabilityBoundAreCounted) {
  for (DType type : {DType::f64, DType::f32}) {
    Recipe r;
    r.type = type, r.tokens = 40, r.decay = Decay::channel, r.heads = 1;
    Case c = test::make_case(r);
    c.log_decay.fill(std::log(0.5));
    c.log_decay.set(9, 0, 3, std::log(0.25));
    c.beta.fill(1);
    c.beta.set(5, 0, 0, 2.1), c.beta.set(6, 0, 0, 1.9), c.beta.set(7, 0, 0, -0.1), c.beta.set(8, 0, 0, 1.45);
    c.beta.set(9, 0, 0, 1.3);
    EXPECT_EQ(run(c).counts.breaches, 2) << "beta |k|^2 <= 2: tokens 5 and 7";
    c.options.erase = Erase::undecayed;
    EXPECT_EQ(run(c).counts.breaches, 4) << "beta |k|^2 <= 1 + min D: tokens 5, 6, 7 and 9";
    for (int i = 0; i < r.d_key; ++i) c.k.set(20, 0, i, 2 * c.k.get(20, 0, i));
    EXPECT_EQ(run(c).counts.breaches, 5) << "a key of length two";
    expect_right(c, 10);  // solved all the same
    c.options.normalize_keys = true;
    EXPECT_EQ(run(c).counts.breaches, 4);
    const auto ranks = make_single_transport();
    EXPECT_EQ(test::solve(*ranks, c).report.stability_breaches, 4);
  }
}

// --- overflow -------------------------------------------------------------------------------------------------------

/// s <- s (1 - 1025) on one channel of head 1, from three tokens before token n on: finite, at 0.6 of the largest
/// number, before token n, and not after it. So steep that no sum in between is much larger than the state.
Case growing(DType type, std::int64_t n, std::int64_t tokens = 200) {
  Recipe r;
  r.tokens = tokens, r.type = type, r.eta = true, r.initial_states = true;
  Case c = test::make_case(r);
  c.eta.fill(0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    c.beta.set(t, 1, 0, t < n - 3 ? 0 : 1025);
    for (int i = 0; i < r.d_key; ++i) c.k.set(t, 1, i, i == 2), c.q.set(t, 1, i, 1);
  }
  const double largest = type == DType::f64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double start = std::ldexp(0.6 * largest, -10 * static_cast<int>(std::min<std::int64_t>(n, 3)));
  const std::int64_t one = std::int64_t{r.d_value} * r.d_key;
  for (std::int64_t i = 0; i < one; ++i) c.initial_states[one + i] = i % r.d_key == 2 ? start : 0;
  return c;
}

TEST(LocalDelta, FirstTokenThatOverflowsIsNamed) {
  for (DType type : {DType::f64, DType::f32})
    for (int n : some_of({0, 1, 15, 16, 40, 63, 64, 100, 127, 128, 190}))
      for (std::int64_t every : {0, 50})
        for (bool reproducible : {false, true}) {
          Case c = growing(type, n);
          c.options.state_every = every, c.options.reproducible = reproducible;
          const auto ranks = make_single_transport();
          try {
            test::solve(*ranks, c);
            ADD_FAILURE() << "no error: " << test::describe(c) << " " << n;
          } catch (const NonFinite& e) {
            EXPECT_EQ(e.token, n) << test::describe(c) << " every " << every;
            EXPECT_EQ(e.head, 1) << test::describe(c);
            EXPECT_EQ(e.code(), ExitCode::numerical);
            EXPECT_EQ(e.arithmetic, type == DType::f64 ? "float64" : "float32");
            EXPECT_NE(std::string(e.what()).find("token " + std::to_string(n)), std::string::npos) << e.what();
          }
        }
}

/// The final states alone, as --state-only asks for them.
DeltaReport solve_state_only(const Case& c) {
  const auto ranks = make_single_transport();
  Memory memory;
  DeltaInputs in = memory.inputs(c, 0, c.tokens);
  in.q = {};
  std::vector<std::byte> start(c.state_size() * size_of(c.state_type()));
  for (std::int64_t i = 0; i < c.state_size() && !c.initial_states.empty(); ++i)
    store(start.data(), c.state_type(), i, c.initial_states[i]);
  in.initial_states = memory.copy(start);
  DeltaOutputs out;
  out.final_states = memory.room(start.size());
  const DeltaReport report = DeltaRule(*ranks, c.shape, c.options, c.sequences).solve({0, c.tokens}, in, out);
  const test::Solution expected = test::expected(c);
  std::vector<double> got(c.state_size());
  memory.fetch(start.data(), out.final_states, start.size());
  load_row(start.data(), c.state_type(), 0, static_cast<int>(got.size()), got.data());
  EXPECT_LE(test::difference(got, expected.final_states).rms, tolerance_of(c.state_type()).rms) << test::describe(c);
  return report;
}

TEST(LocalDelta, StatesAloneHaveTheSameChecks) {
  for (bool reproducible : {false, true}) {
    Recipe r;
    r.tokens = 3000, r.initial_states = true, r.beta_high = 2.01;
    Case c = test::make_case(r);
    c.options.reproducible = reproducible;
    EXPECT_EQ(solve_state_only(c).stability_breaches, run(c).counts.breaches) << reproducible;
    EXPECT_GT(run(c).counts.breaches, 0);
    for (int n : some_of({0, 50, 63, 64, 100, 900})) {
      Case bad = growing(n < 120 ? DType::f32 : DType::f64, n, 1500);
      bad.options.reproducible = reproducible;
      std::int64_t token = -1, head = -1;
      try {
        solve_state_only(bad);
      } catch (const NonFinite& e) {
        token = e.token, head = e.head;
      }
      EXPECT_EQ(token, n) << test::describe(bad);
      EXPECT_EQ(head, 1) << test::describe(bad);
    }
  }
}

TEST(LocalDelta, StatesThatOverflowUnseenAreNamed) {
  // q does not look at the channel that overflows
  for (bool reproducible : {false, true}) {
    Case c = growing(DType::f32, 90);
    for (std::int64_t t = 0; t < c.tokens; ++t)
      for (int i = 0; i < c.shape.d_key; ++i) c.q.set(t, 1, i, i == 5);
    c.options.reproducible = reproducible;
    const auto ranks = make_single_transport();
    std::int64_t token = -1;
    try {
      test::solve(*ranks, c);
    } catch (const NonFinite& e) {
      token = e.token;
    }
    // the product with q sees 0 * infinity one token after the state is infinite, at the latest
    EXPECT_TRUE(token == 90 || token == 91) << token << " " << reproducible;
  }
}

TEST(LocalDelta, LargeButFiniteStatesAreNoOverflow) {
  Case c = growing(DType::f32, 100, 100);
  const auto ranks = make_single_transport();
  EXPECT_NO_THROW(test::solve(*ranks, c));
}

// --- small products -------------------------------------------------------------------------------------------------

template <class T>
void check_small_gemm() {
  constexpr int unit = 64 / sizeof(T);
  for (int m : {1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 33, 64})
    for (int n : {1, 2, 3, 5})  // in units of 64 bytes
      for (int k : {0, 1, 2, 7, 16, 61})
        for (bool accumulate : {false, true}) {
          const int columns = n * unit, lda = k + 3, ldb = columns + unit, ldc = columns + 2 * unit;
          const auto make = [&](int rows, int ld, std::uint64_t stream) {
            std::vector<T> x(static_cast<std::size_t>(rows) * ld + 1);
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(random_normal(1, stream, i));
            return x;
          };
          const std::vector<T> a = make(m, lda, 1), b = make(k, ldb, 2), before = make(m, ldc, 3);
          std::vector<T> c = before;
          small_gemm(m, columns, k, a.data(), lda, b.data(), ldb, c.data(), ldc, accumulate);
          const double allowed = (k + 2) * 4 * static_cast<double>(std::numeric_limits<T>::epsilon());
          for (int i = 0; i < m; ++i)
            for (int j = 0; j < ldc; ++j) {
              double sum = accumulate || j >= columns ? before[i * ldc + j] : 0, size = 1;
              for (int p = 0; p < k && j < columns; ++p) {
                sum += double(a[i * lda + p]) * b[p * ldb + j];
                size += std::abs(double(a[i * lda + p]) * b[p * ldb + j]);
              }
              ASSERT_NEAR(c[i * ldc + j], sum, j < columns ? allowed * size : 0)
                  << m << "x" << columns << "x" << k << " at " << i << ", " << j;
            }
          // any rows and columns alone have the same bits
          for (int rows : {1, 2, 4, 5, m}) {
            if (rows > m) continue;
            for (int first = 0; first + rows <= m; first += rows)
              for (int strip = 0; strip < n; ++strip) {
                std::vector<T> part(before.begin() + first * ldc, before.begin() + (first + rows) * ldc);
                small_gemm(rows, unit, k, a.data() + first * lda, lda, b.data() + strip * unit, ldb,
                           part.data() + strip * unit, ldc, accumulate);
                for (int i = 0; i < rows; ++i)
                  ASSERT_EQ(std::memcmp(part.data() + i * ldc + strip * unit,
                                        c.data() + (first + i) * ldc + strip * unit, unit * sizeof(T)),
                            0)
                      << m << "x" << columns << "x" << k << ", rows " << first << " of " << rows;
              }
          }
        }
}

TEST(SmallGemm, IsTheProductAndItsBitsDoNotDependOnTheShapeFloat) { check_small_gemm<float>(); }
TEST(SmallGemm, IsTheProductAndItsBitsDoNotDependOnTheShapeDouble) { check_small_gemm<double>(); }

// --- affine scans ---------------------------------------------------------------------------------------------------

template <class T>
void check_affine_scan() {
  constexpr int n = 5, m = 7, leading = 16, points_leading = 8, length = 9;
  constexpr int map_size = n * leading, point_size = n * points_leading;
  Memory memory;
  std::vector<T> maps(length * map_size), points(2 * (length + 1) * point_size);
  for (int s = 0; s < length; ++s)
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n + m; ++j)
        maps[s * map_size + i * leading + j] = static_cast<T>(0.4 * random_normal(s, 0, i * (n + m) + j));
  for (int chain : {0, 1})
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < m; ++j)
        points[chain * (length + 1) * point_size + i * points_leading + j] =
            static_cast<T>(random_normal(99, chain, i * m + j));
  AffineMaps<T> device{memory.copy(maps), n, m, leading, map_size, sizeof(T) == 8};
  const auto norm = [&](int s, int from, int to) {
    double sum = 0;
    for (int i = 0; i < n; ++i)
      for (int j = from; j < to; ++j) sum += std::pow(double(maps[s * map_size + i * leading + j]), 2);
    return std::sqrt(sum);
  };

  // two chains side by side, the second through the maps backwards
  AffinePoints<T> all{memory.copy(points), points_leading, point_size};
  const std::vector<AffineChain> chains = {{0, 1, 0, 1, length}, {length - 1, -1, length + 1, 1, length}};
  affine_scan(space(), device, all, memory.copy(chains), 2);
  space().fence();
  const auto scanned = memory.fetch(all.data, points.size());
  for (int chain : {0, 1})
    for (int s = 0; s < length; ++s) {
      const int map = chain == 0 ? s : length - 1 - s;
      const T* x = scanned.data() + (chain * (length + 1) + s) * point_size;
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < m; ++j) {
          double sum = maps[map * map_size + i * leading + n + j];
          for (int k = 0; k < n; ++k) sum += double(maps[map * map_size + i * leading + k]) * x[k * points_leading + j];
          ASSERT_NEAR(x[point_size + i * points_leading + j], sum, 32 * std::numeric_limits<T>::epsilon());
        }
    }

  // a chain in two halves has the bits of the whole
  AffinePoints<T> halves{memory.copy(points), points_leading, point_size};
  for (const AffineChain& half : {AffineChain{0, 1, 0, 1, 4}, AffineChain{4, 1, 4, 1, length - 4}}) {
    affine_scan(space(), device, halves, memory.copy(std::vector{half}), 1);
    space().fence();
  }
  const auto twice = memory.fetch(halves.data, (length + 1) * point_size);
  EXPECT_TRUE(std::equal(twice.begin(), twice.end(), scanned.begin()));

  // composed pairs, then applied, are two steps
  std::vector<AffineTask> pairs;
  for (std::int64_t s = 0; s + 1 < length; s += 2) pairs.push_back({s + 1, s, s / 2});
  AffineMaps<T> composed = device;
  composed.data = memory.room_for<T>(pairs.size() * map_size);
  affine_compose(space(), device, device, composed, memory.copy(pairs), static_cast<std::int64_t>(pairs.size()));
  std::vector<AffineTask> applications;
  for (std::int64_t s = 0; s < static_cast<std::int64_t>(pairs.size()); ++s) applications.push_back({s, 2 * s, s});
  AffinePoints<T> out{memory.room_for<T>(pairs.size() * point_size), points_leading, point_size};
  affine_apply(space(), composed, AffinePoints<const T>{all.data, points_leading, point_size}, out,
               memory.copy(applications), static_cast<std::int64_t>(applications.size()));
  std::vector<double> norms(2 * length);
  double* const device_norms = memory.copy(norms);
  affine_norms(space(), device, device_norms, length);
  space().fence();
  const auto applied = memory.fetch(out.data, pairs.size() * point_size);
  for (std::size_t s = 0; s < pairs.size(); ++s)
    for (int i = 0; i < point_size; ++i)
      EXPECT_NEAR(applied[s * point_size + i], scanned[(2 * s + 2) * point_size + i],
                  64 * std::numeric_limits<T>::epsilon());
  norms = memory.fetch(device_norms, 2 * length);
  for (int s = 0; s < length; ++s) {
    EXPECT_NEAR(norms[2 * s], norm(s, 0, n), 1e-12);
    EXPECT_NEAR(norms[2 * s + 1], norm(s, n, n + m), 1e-12);
  }
}

TEST(AffineScan, IsStepByStepFloat) { check_affine_scan<float>(); }
TEST(AffineScan, IsStepByStepDouble) { check_affine_scan<double>(); }

// --- checks of inputs -----------------------------------------------------------------------------------------------

TEST(FirstOutside, NamesTheFirstValueOfEachType) {
  constexpr int tokens = 50, heads = 3, width = 5;
  const double nan = std::nan("");
  for (DType type : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    test::Numbers x(type, tokens, heads, width);
    for (std::int64_t i = 0; i < tokens * heads * width; ++i) store(x.bytes.data(), type, i, -random_uniform(1, 0, i));
    const auto first = [&](Domain domain) {
      Memory memory;
      return first_outside(x.view(heads, 0, memory.copy(x.bytes)), tokens, heads, width, domain);
    };
    EXPECT_EQ(first(Domain::finite), -1) << name_of(type);
    EXPECT_EQ(first(Domain::nonpositive), -1) << name_of(type);
    x.set(48, 0, 1, nan);
    EXPECT_EQ(first(Domain::finite), (48 * heads + 0) * width + 1) << name_of(type);
    EXPECT_EQ(first(Domain::nonpositive), (48 * heads + 0) * width + 1) << name_of(type);
    x.set(20, 2, 4, -HUGE_VAL);  // means: forget all
    EXPECT_EQ(first(Domain::finite), (20 * heads + 2) * width + 4) << name_of(type);
    EXPECT_EQ(first(Domain::nonpositive), (48 * heads + 0) * width + 1) << name_of(type);
    x.set(20, 1, 0, HUGE_VAL);
    EXPECT_EQ(first(Domain::finite), (20 * heads + 1) * width) << name_of(type);
    EXPECT_EQ(first(Domain::nonpositive), (20 * heads + 1) * width) << name_of(type);
    x.set(3, 0, 0, 1e-4);
    EXPECT_EQ(first(Domain::nonpositive), 3 * heads * width) << name_of(type);
    x.set(0, 0, 0, 0.0);
    EXPECT_EQ(first(Domain::nonpositive), 3 * heads * width) << name_of(type);
    Memory memory;
    EXPECT_EQ(first_outside(x.view(heads, 0, memory.room(8)), 0, heads, width, Domain::finite), -1);
  }
}

TEST(FirstOutside, FollowsStrides) {
  // heads first, and room between the rows that holds NaN
  constexpr int tokens = 10, heads = 2, width = 3, stride = 4;
  std::vector<float> x(heads * tokens * stride, std::nanf(""));
  for (int h = 0; h < heads; ++h)
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < width; ++i) x[(h * tokens + t) * stride + i] = 1;
  const auto first = [&] {
    Memory memory;
    TokenArray view{memory.copy(x), DType::f32, stride, tokens * stride, 1};
    return first_outside(view, tokens, heads, width, Domain::finite);
  };
  EXPECT_EQ(first(), -1);
  x[(1 * tokens + 7) * stride + 2] = HUGE_VALF;
  EXPECT_EQ(first(), (7 * heads + 1) * width + 2);
}

// --- wrong calls ----------------------------------------------------------------------------------------------------

TEST(LocalDelta, WrongOptionsAreRefused) {
  const auto ranks = make_single_transport();
  const auto refused = [&](auto change, const std::string& text) {
    DeltaShape shape{1, 2, 3, false};
    DeltaOptions options;
    change(shape, options);
    try {
      DeltaRule(*ranks, shape, options, {{0, 4}});
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ExitCode::usage);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  refused([](DeltaShape&, DeltaOptions& o) { o.chunk = 0; }, "chunk is 0; it takes 1 to 256");
  refused([](DeltaShape&, DeltaOptions& o) { o.chunk = 257; }, "257");
  refused([](DeltaShape& s, DeltaOptions&) { s.heads = 0; }, "heads");
  refused([](DeltaShape& s, DeltaOptions&) { s.d_key = 0; }, "d_key");
  refused([](DeltaShape&, DeltaOptions& o) { o.precision = Precision::automatic; }, "arithmetic");
}

}  // namespace
}  // namespace longscan
