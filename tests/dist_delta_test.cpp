// SPDX-License-Identifier: Apache-2.0
// The delta rule over ranks: any cut of the tokens gives the answer of one rank. Runs on 1, 2, 3, 4 and 7 ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/portable.hpp"
#include "core/random.hpp"
#include "delta_cases.hpp"
#include "dist/segment_plan.hpp"
#include "longscan/error.hpp"

namespace longscan {
namespace {

using test::all_decays;
using test::all_inverses;
using test::all_rules;
using test::Case;
using test::Decay;
using test::Recipe;
using test::Solution;

/// Each test has all ranks, and one that solves everything alone. Every rank has all results; rank 0 judges them, since
/// a reference on each would take as many times as long. Failures must not end a test early on one rank: the others
/// would wait for it.
class DistDelta : public ::testing::Test {
 protected:
  bool judges() const { return ranks_->rank() == 0; }
  /// Solves over the ranks and compares with the reference and with one rank, to rounding.
  Solution expect_right(const Case& c, std::int64_t window = 0, double factor = 1) {
    const Solution got = test::solve(*ranks_, c, window);
    if (!judges()) return got;
    EXPECT_EQ(test::too_far(got, test::expected(c), c.state_type(), factor), "")
        << test::describe(c) << ", window " << window << ", " << ranks_->size() << " ranks";
    EXPECT_EQ(test::too_far(got, test::solve(*alone_, c), c.state_type(), factor), "") << test::describe(c);
    return got;
  }
  int size() const { return ranks_->size(); }

  std::unique_ptr<Transport> ranks_ = make_mpi_transport(), alone_ = make_single_transport();
};

// --- any problem ----------------------------------------------------------------------------------------------------

TEST_F(DistDelta, AnyNumberOfTokens) {
  for (std::int64_t tokens : {0, 1, 2, 5, 133, 1000})
    for (const test::Rule& rule : all_rules)
      for (Decay decay : all_decays)
        for (DType type : {DType::f64, DType::f32}) {
          Recipe r;
          r.tokens = tokens, r.rule = rule, r.decay = decay, r.type = type;
          r.initial_states = true, r.eta = rule.variant == Variant::delta && tokens % 2 == 1;
          expect_right(test::make_case(r));
        }
}

TEST_F(DistDelta, AnyInverseChunkAndSizes) {
  for (Inverse inverse : all_inverses)
    for (int chunk : {1, 16, 100})
      for (const auto& [K, V] : {std::pair(1, 5), std::pair(24, 3), std::pair(40, 65)}) {
        Recipe r;
        r.tokens = 230, r.d_key = K, r.d_value = V, r.type = DType::f32, r.decay = Decay::head;
        r.heads = 4, r.key_heads = 2, r.beta_high = K == 1 ? 0.5 : 1;
        Case c = test::make_case(r);
        c.options.inverse = inverse, c.options.chunk = chunk;
        expect_right(c);
      }
}

TEST_F(DistDelta, SixteenBitInputs) {
  for (DType type : {DType::f16, DType::bf16}) {
    Recipe r;
    r.tokens = 500, r.type = r.gate_type = type;
    expect_right(test::make_case(r));
  }
}

/// Sizes and types that a device's tensor cores may take, and numbers that 16-bit operands of products cannot hold.
TEST_F(DistDelta, SixteenBitProducts) {
  const bool tensor = !is_host_space<Kokkos::DefaultExecutionSpace>;
  struct Sizes {
    int K, V;
  };
  const auto check = [&](const Case& c, const char* what) {
    const Solution got = test::solve(*ranks_, c);
    if (!judges()) return got;
    const Solution expected = test::expected(c);
    EXPECT_LE(test::difference(got.o, expected.o).rms, 3e-3) << what << ", " << test::describe(c);
    EXPECT_LE(test::difference(got.final_states, expected.final_states).rms, 3e-3) << what << ", " << test::describe(c);
    return got;
  };
  int residue = 0;
  for (const Sizes& size : {Sizes{128, 128}, Sizes{64, 64}, Sizes{72, 104}, Sizes{128, 136}, Sizes{64, 256},
                            Sizes{192, 192}, Sizes{256, 256}, Sizes{256, 64}, Sizes{192, 128}, Sizes{136, 72}})
    for (Decay decay : all_decays)
      for (DType type : {DType::f16, DType::bf16}) {
        if (!tensor && size.K > 128 && type == DType::f16) continue;  // nothing of its own there
        const bool channel = decay == Decay::channel;
        Recipe r;
        r.tokens = (!tensor ? 150 : size.K > 128 ? 700 : 2100) + (residue += 7), r.heads = 2;
        r.d_key = size.K, r.d_value = size.V;
        r.decay = decay, r.type = type, r.rule = all_rules[channel ? 0 : residue % 2], r.eta = residue % 3 == 0;
        r.gate_type = residue % 2 == 0 ? type
                      : channel        ? DType::f32
                                       : DType::f64,
        r.initial_states = true, r.key_heads = residue % 2 + 1;
        Case c = test::make_case(r);
        c.options.precision = Precision::bf16, c.output = type;
        const Solution got = check(c, "plain");
        if (tensor) {
          const bool takes = size.K <= 128 || !channel;
          EXPECT_EQ(got.report.tensor_tasks > 0, takes) << test::describe(c);
          EXPECT_EQ(got.report.general_tasks > 0, !takes) << test::describe(c);
        }
        EXPECT_TRUE(test::solve(*ranks_, c) == got) << "the same bits again";
        for (std::int64_t segment : {1, 100, 640}) {
          if (!tensor && segment == 1) continue;
          Case cut = c;
          cut.options.segment = segment == 1 ? 1037 : segment;
          check(cut, "in segments");
        }
        Case reproducible = c;
        reproducible.options.reproducible = true;
        const Solution bits = check(reproducible, "reproducible");
        EXPECT_TRUE(test::solve(*alone_, reproducible, 1024) == bits);
      }
  for (bool undecayed : {false, true}) {  // decays a channel that no tensor-core kernel takes
    Recipe r;
    r.tokens = 300, r.d_key = 64, r.d_value = 64, r.heads = 2, r.type = DType::bf16, r.decay = Decay::channel;
    r.rule = all_rules[undecayed], r.gate_type = undecayed ? DType::f32 : DType::f64;
    Case c = test::make_case(r);
    c.options.precision = Precision::bf16, c.output = DType::bf16;
    const Solution got = check(c, "decays of the general kernel");
    EXPECT_EQ(got.report.tensor_tasks, 0);
  }
  for (double factor : {1e-7, 1e5}) {  // of v: below what fp16 resolves, and beyond its range
    Recipe r;
    r.tokens = 300, r.d_key = 64, r.d_value = 64, r.heads = 1, r.type = DType::bf16;
    Case c = test::make_case(r);
    for (std::int64_t t = 0; t < r.tokens; ++t)
      for (int i = 0; i < r.d_value; ++i) c.v.set(t, 0, i, factor * c.v.get(t, 0, i));
    c.options.precision = Precision::bf16, c.output = DType::bf16;
    const Solution got = check(c, "another scale");
    EXPECT_GT(got.report.general_tasks, 0);
  }
}

TEST_F(DistDelta, PackedSequencesCutTheScan) {
  const std::vector<std::int64_t> offsets[] = {
      {0, 0, 70, 71, 71, 200, 333, 333}, {0, 333},          {0, 0, 0, 333}, {0, 110, 110, 110, 222, 333},
      {0, 1, 2, 3, 4, 5, 6, 333},        {0, 333, 333, 333}};
  for (const auto& cut : offsets)
    for (Decay decay : all_decays)
      for (bool reproducible : {false, true}) {
        Recipe r;
        r.tokens = 333, r.decay = decay, r.initial_states = true;
        Case c = test::make_case(r);
        test::pack(c, cut);
        c.options.reproducible = reproducible;
        for (std::int64_t window : {0, 13, 50}) expect_right(c, window);
        if (decay == Decay::head) expect_right(c, 1);
      }
  // nothing but empty sequences: states pass through
  Recipe r;
  r.tokens = 0, r.initial_states = true;
  Case c = test::make_case(r);
  test::pack(c, {0, 0, 0, 0});
  const Solution got = expect_right(c);
  EXPECT_EQ(got.final_states, c.initial_states);
}

TEST_F(DistDelta, WindowsPassTheStateOn) {
  for (const test::Rule& rule : all_rules)
    for (DType type : {DType::f64, DType::f32}) {
      Recipe r;
      r.tokens = 1000, r.rule = rule, r.type = type, r.decay = Decay::channel, r.initial_states = true;
      const Case c = test::make_case(r);
      for (std::int64_t window : {7, 64, 100, 333, 999, 5000}) expect_right(c, window);
    }
}

TEST_F(DistDelta, WindowsCoverTheTokensInOrder) {
  for (bool reproducible : {false, true})
    for (std::int64_t tokens : {0, 1, 5000, 20000})
      for (std::int64_t window : {1, 100, 1024, 3000, 100000}) {
        DeltaOptions options;
        options.reproducible = reproducible;
        const DeltaRule rule(*ranks_, {}, options, {{0, tokens / 3, tokens}});
        std::int64_t at = 0;
        for (const TokenRange& w : rule.windows(window)) {
          EXPECT_EQ(w.begin, at);
          EXPECT_TRUE(w.end > w.begin || tokens == 0);
          if (!reproducible) {
            EXPECT_LE(w.size(), window * size());
          }
          const TokenRange part = rule.part(w);
          std::int64_t held = part.size();
          ranks_->all_reduce(&held, 1, Transport::Reduction::sum);
          EXPECT_EQ(held, w.size());
          at = w.end;
        }
        EXPECT_EQ(at, tokens);
      }
}

TEST_F(DistDelta, StatesAreRecordedOnTheRankThatHasThem) {
  for (std::int64_t every : {1, 10, 64, 333, 334})
    for (bool reproducible : {false, true})
      for (bool packed : {false, true})
        for (std::int64_t window : {0, 40}) {
          Recipe r;
          r.tokens = 333, r.heads = 1, r.d_key = 4, r.d_value = 3;
          Case c = test::make_case(r);
          if (packed) test::pack(c, {0, 0, 70, 71, 71, 200, 333});
          c.options.state_every = every, c.options.reproducible = reproducible;
          expect_right(c, window);  // counted in each sequence
          c.counting = Sequences{{0, 333}};
          expect_right(c, window);  // counted along the axis
        }
}

TEST_F(DistDelta, SameRanksGiveTheSameBits) {
  Recipe r;
  r.tokens = 1500, r.decay = Decay::head, r.type = DType::f32;
  const Case c = test::make_case(r);
  EXPECT_TRUE(test::solve(*ranks_, c) == test::solve(*ranks_, c));
  EXPECT_TRUE(test::solve(*ranks_, c, 100) == test::solve(*ranks_, c, 100));
}

TEST_F(DistDelta, LaterTokensChangeNoEarlierBit) {
  struct Kind {
    DType type;
    Decay decay;
    bool reproducible;
  };
  for (const Kind& kind : {Kind{DType::f32, Decay::head, false}, Kind{DType::f32, Decay::head, true},
                           Kind{DType::bf16, Decay::head, false}, Kind{DType::bf16, Decay::channel, false}}) {
    Recipe r;
    r.tokens = 3000, r.heads = 1, r.type = kind.type, r.decay = kind.decay;
    if (kind.type == DType::bf16) r.d_key = r.d_value = 64, r.gate_type = DType::bf16;  // for tensor cores
    Case c = test::make_case(r);
    c.options.reproducible = kind.reproducible;
    if (kind.type == DType::bf16) c.options.precision = Precision::bf16, c.output = DType::bf16;
    const Solution whole = test::solve(*ranks_, c);
    for (std::int64_t t : {1, 1024, 1501, 2500}) {
      Case other = c;
      for (std::int64_t s = t; s < c.tokens; ++s)
        other.v.set(s, 0, 0, 100), other.beta.set(s, 0, 0, 0.25), other.log_decay.set(s, 0, 0, -HUGE_VAL);
      const Solution changed = test::solve(*ranks_, other);
      EXPECT_TRUE(std::equal(whole.o.begin(), whole.o.begin() + t * r.d_value, changed.o.begin())) << t;
      EXPECT_FALSE(whole.o == changed.o);
    }
  }
}

// --- --reproducible -------------------------------------------------------------------------------------------------

TEST_F(DistDelta, ReproducibleBitsDoNotDependOnRanksOrWindows) {
  for (const test::Rule& rule : all_rules)
    for (Decay decay : all_decays)
      for (DType type : {DType::f64, DType::f32}) {
        Recipe r;
        r.tokens = 5200, r.heads = 3, r.d_key = 6, r.d_value = 5, r.rule = rule, r.decay = decay, r.type = type;
        r.initial_states = true, r.log_decay_mean = -0.001;
        Case c = test::make_case(r);
        c.options.reproducible = true, c.options.state_every = 700;
        const Solution one = test::solve(*alone_, c);
        if (judges()) {
          EXPECT_EQ(test::too_far(one, test::expected(c), c.state_type()), "") << test::describe(c);
        }
        for (std::int64_t window : {0, 1, 1600})
          EXPECT_TRUE(test::solve(*ranks_, c, window) == one) << test::describe(c) << ", window " << window;
        EXPECT_TRUE(test::solve(*alone_, c, 1500) == one) << test::describe(c) << ", one rank in windows";
      }
}

TEST_F(DistDelta, ReproducibleBitsOfPackedSequences) {
  Recipe r;
  r.tokens = 9000, r.heads = 2, r.d_key = 4, r.d_value = 3, r.type = DType::f32, r.initial_states = true;
  Case c = test::make_case(r);
  test::pack(c, {0, 0, 4100, 4101, 4101, 5000, 8999, 9000, 9000});
  c.options.reproducible = true, c.options.state_every = 450;
  const Solution one = test::solve(*alone_, c);
  if (judges()) {
    EXPECT_EQ(test::too_far(one, test::expected(c), DType::f32), "");
  }
  for (std::int64_t window : {0, 300, 700, 1024, 2000, 4000, 5000})
    EXPECT_TRUE(test::solve(*ranks_, c, window) == one) << "window " << window;
}

// --- forgetting -----------------------------------------------------------------------------------------------------

/// A device cuts the few tokens of a test into segments too short to forget.
constexpr bool segments_are_long = is_host_space<Kokkos::DefaultExecutionSpace>;

TEST_F(DistDelta, KeysThatForgetNeedNoState) {
  for (DType type : {DType::f64, DType::f32})
    for (std::int64_t every : {0, 999}) {
      Recipe r;
      r.tokens = 6000 * size(), r.type = type;
      Case c = test::make_case(r);
      c.options.state_every = every;
      const Solution got = expect_right(c);
      EXPECT_EQ(got.report.boundaries, std::int64_t{r.heads} * (size() - 1));
      EXPECT_EQ(got.report.boundaries_corrected, 0);
      if (!segments_are_long) continue;
      EXPECT_EQ(got.report.boundaries_forgotten, got.report.boundaries);
      if (size() > 1) {
        EXPECT_GT(got.report.horizon_max, 0);
        EXPECT_LT(got.report.horizon_max, r.tokens / size() / 2);
        EXPECT_LT(got.report.map_tokens, r.tokens) << "half of the tokens and heads, at most";
      }
    }
}

TEST_F(DistDelta, KeysInASubspaceNeverForget) {
  for (DType type : {DType::f64, DType::f32}) {
    Recipe r;
    r.tokens = 20000, r.key_dimensions = 5, r.type = type, r.initial_states = true;
    const Solution got = expect_right(test::make_case(r));
    EXPECT_EQ(got.report.boundaries, std::int64_t{r.heads} * (size() - 1));
    EXPECT_EQ(got.report.boundaries_forgotten, 0);
    EXPECT_EQ(got.report.boundaries_corrected, 0);
    // all parts but the last are mapped, or run once more where their state is known
    EXPECT_GE(got.report.map_tokens, r.tokens * r.heads / size() * (size() - 1) - 2 * size());
  }
}

TEST_F(DistDelta, SomeHeadsForgetAndOthersDoNot) {
  Recipe r;
  r.tokens = 6000 * size(), r.heads = 5, r.initial_states = true;
  Case c = test::make_case(r);
  for (std::int64_t t = 0; t < r.tokens; ++t)
    for (int h : {1, 4}) c.beta.set(t, h, 0, 0);
  Case eta = c;
  eta.eta = test::make_case(r).beta;
  const Solution got = expect_right(eta, 0, 10);  // sums of thousands of values that nothing erases
  EXPECT_EQ(got.report.boundaries, 5 * (size() - 1));
  if (segments_are_long) {
    EXPECT_EQ(got.report.boundaries_forgotten, 3 * (size() - 1));
  }
}

TEST_F(DistDelta, DecaysForgetAtOnce) {
  for (Decay decay : {Decay::head, Decay::channel}) {
    Recipe r;
    r.tokens = 5000, r.decay = decay, r.log_decay_mean = -1, r.type = DType::f32, r.initial_states = true;
    Case c = test::make_case(r);
    c.options.chunk = 16;
    const Solution got = expect_right(c);
    EXPECT_EQ(got.report.boundaries_forgotten, got.report.boundaries);
    EXPECT_LE(got.report.horizon_max, 16 * r.d_key + 16);
  }
}

TEST_F(DistDelta, HorizonsReachToWherePVanishes) {
  for (DType type : {DType::f64, DType::f32})
    for (std::int64_t segment : {0, 800})
      for (double excess : {0.7, 2.0}) {
        Recipe r;
        r.tokens = 1600 * size(), r.type = type, r.heads = 1, r.decay = Decay::head, r.eta = true;
        Case c = test::make_case(r);
        // |P| = sqrt(K) exp(sum of log_decay): a sixteenth of the rounding of L, less or more, after the 4 K tokens
        // that are tried first
        const double P = excess * (type == DType::f64 ? 1.1e-16 : 6e-8) / 16;
        c.beta.fill(0), c.log_decay.fill(std::log(P / std::sqrt(r.d_key)) / (4 * r.d_key));
        c.options.chunk = 16, c.options.segment = segment;
        const DeltaReport report = expect_right(c).report;
        EXPECT_EQ(report.boundaries_forgotten, size() - 1);
        EXPECT_EQ(report.horizon_max, size() == 1 ? 0 : excess < 1 ? 32 : 48) << test::describe(c);
      }
}

/// Keys of the last fifth of each rank's part forget, those before change nothing: what the first fifths leave of an
/// initial state that is `size` times larger still shows at the boundary.
Case large_state(int ranks, DType type, double size, std::int64_t tokens, int d_value = Recipe().d_value) {
  Recipe r;
  r.tokens = tokens, r.type = type, r.d_value = d_value, r.initial_states = true, r.eta = true;
  Case c = test::make_case(r);
  for (int rank = 0; rank < ranks; ++rank) {
    const TokenRange part = part_of(tokens, ranks, rank);
    for (std::int64_t t = part.begin; t < part.end - part.size() / 5; ++t)
      for (int h = 0; h < r.heads; ++h) c.beta.set(t, h, 0, 0), c.eta.set(t, h, 0, 0);
  }
  for (std::size_t i = 0; i < c.initial_states.size() / r.heads; ++i)  // head 0 alone
    c.initial_states[i] = static_cast<float>(size * c.initial_states[i]);
  return c;
}

TEST_F(DistDelta, StatesTooLargeToBeForgottenAreCorrected) {
  for (DType type : {DType::f64, DType::f32})
    for (std::int64_t every : {0, 777})
      for (std::int64_t odd : {0, 1, 31}) {
        // parts that start and end anywhere in a chunk
        const std::int64_t tokens = size() * (type == DType::f64 ? 6000 : 4000) + odd;
        Case c = large_state(size(), type, type == DType::f64 ? 1e24 : 1e14, tokens);
        c.options.state_every = every;
        const Solution got = test::solve(*ranks_, c);
        if (!judges()) continue;
        const Solution expected = test::expected(c);
        // part by part: what is right relative to the first one may be wrong relative to the others
        const std::int64_t row = std::int64_t{2} * c.shape.d_value;
        for (int rank = 0; rank < size(); ++rank) {
          const TokenRange part = part_of(tokens, size(), rank);
          const auto slice = [&](const std::vector<double>& o) {
            return std::vector<double>(o.begin() + part.begin * row, o.begin() + part.end * row);
          };
          EXPECT_LE(test::difference(slice(got.o), slice(expected.o)).rms, 20 * test::tolerance_of(type).rms)
              << "part " << rank << " of " << size() << ", " << test::describe(c);
        }
        if (size() > 1) {
          EXPECT_EQ(got.report.boundaries_forgotten, 2 * (size() - 1));
          EXPECT_GE(got.report.boundaries_corrected, 1) << test::describe(c);
          EXPECT_LE(got.report.boundaries_corrected, size() - 1) << "head 1 was right";
        } else {
          EXPECT_EQ(got.report.boundaries_corrected, 0);
        }
      }
}

/// o of 2 heads and 250 channels of float64, 4 MiB of which are 1024 tokens in whole chunks.
TEST_F(DistDelta, OutputsAreReadyPieceByPiece) {
  if (!is_host_space<Kokkos::DefaultExecutionSpace>) GTEST_SKIP() << "segments are solved side by side";
  for (double too_large : {1.0, 1e24}) {
    const Case c = large_state(size(), DType::f64, too_large, size() * std::int64_t{6000}, 250);
    const std::int64_t row = std::int64_t{c.shape.heads} * c.shape.d_value;
    std::vector<std::int64_t> calls;
    std::vector<double> seen;
    const auto solve = [&](bool asks) {
      test::Memory memory;
      DeltaRule rule(*ranks_, c.shape, c.options, c.sequences);
      const TokenRange all{0, c.tokens}, part = rule.part(all);
      DeltaInputs in = memory.inputs(c, part.begin, part.end);
      if (rule.runs(all).front().starts) in.initial_states = c.initial_states.data();
      std::vector<double> o(part.size() * row);
      DeltaOutputs out;
      out.o = {o.data(), DType::f64, row, c.shape.d_value};
      if (asks)
        out.ready = [&](std::int64_t tokens) {
          calls.push_back(tokens);
          if (tokens == 0) seen.clear();
          seen.insert(seen.end(), o.begin() + static_cast<std::ptrdiff_t>(seen.size()), o.begin() + tokens * row);
        };
      const DeltaReport report = rule.solve(all, in, out);
      return std::pair(o, report.boundaries_corrected);
    };
    const auto [expected, corrected] = solve(false);
    const auto [o, again] = solve(true);
    EXPECT_TRUE(o == expected) << "the same bits";
    EXPECT_EQ(again, corrected);
    if (too_large > 1 && ranks_->rank() == 1) {
      EXPECT_TRUE(!calls.empty() && calls.back() == 0) << "the large state was before this rank";
      calls.resize(std::min<std::size_t>(calls.size(), 5));
    } else {
      EXPECT_GT(seen.size(), static_cast<std::size_t>(5000 * row));
      EXPECT_TRUE(std::equal(seen.begin(), seen.end(), o.begin()));
    }
    EXPECT_EQ(calls.size(), 5U);
    std::int64_t piece = 0;
    for (const std::int64_t tokens : calls) {
      piece += 1024;
      EXPECT_TRUE(tokens > piece - 64 && tokens <= piece) << tokens;
    }
  }
}

TEST_F(DistDelta, OverflowIsNamedWhereStatesAreCorrected) {
  // on the second rank, which starts again with head 0
  const std::int64_t tokens = size() * 4000, bad = part_of(tokens, size(), std::min(1, size() - 1)).end - 77;
  Case c = large_state(size(), DType::f32, 1e14, tokens);
  for (std::int64_t t = bad; t < bad + 20; ++t) {
    c.eta.set(t, 0, 0, 1.9);
    for (int i = 0; i < c.shape.d_value; ++i) c.v.set(t, 0, i, 3e38);
  }
  std::int64_t named = -1;
  try {
    test::solve(*ranks_, c);
  } catch (const NonFinite& e) {
    named = e.token;
    EXPECT_EQ(e.head, 0);
  }
  EXPECT_TRUE(named == bad || named == bad + 1) << named << ", expected " << bad;
}

// --- segments inside a rank -----------------------------------------------------------------------------------------

TEST_F(DistDelta, AnySegmentsGiveTheAnswer) {
  for (std::int64_t segment : {1, 37, 64, 1000})
    for (const test::Rule& rule : all_rules)
      for (Decay decay : all_decays)
        for (bool packed : {false, true}) {
          Recipe r;
          r.tokens = segment == 1 ? 20 : 700, r.rule = rule, r.decay = decay, r.initial_states = true;
          r.type = packed ? DType::f32 : DType::f64;
          Case c = test::make_case(r);
          if (packed) test::pack(c, {0, 0, 1, r.tokens / 3, r.tokens / 3, r.tokens / 2, r.tokens, r.tokens});
          c.options.segment = segment, c.options.state_every = 90, c.options.chunk = segment == 37 ? 16 : 64;
          for (std::int64_t window : {0, 150}) expect_right(c, window);
        }
}

TEST_F(DistDelta, SegmentsForgetToo) {
  for (DType type : {DType::f64, DType::f32}) {
    Recipe r;
    r.tokens = 12000 * size() + 17, r.type = type, r.initial_states = true;
    Case c = test::make_case(r);
    c.options.segment = 4000;
    const Solution got = expect_right(c);
    EXPECT_EQ(got.report.boundaries, std::int64_t{r.heads} * (size() - 1));
    EXPECT_EQ(got.report.boundaries_forgotten, got.report.boundaries);
    EXPECT_EQ(got.report.boundaries_corrected, 0);
    EXPECT_GE(got.report.segments, 3 * r.heads * size());
    EXPECT_LT(got.report.map_tokens, r.tokens * r.heads * 3 / 4);
    EXPECT_GT(got.report.map_tokens, 0);
    EXPECT_TRUE(test::solve(*ranks_, c) == got) << "the same bits again";
  }
  Recipe r;
  r.tokens = 9000, r.key_dimensions = 5, r.initial_states = true;
  Case c = test::make_case(r);
  c.options.segment = 700;
  const Solution got = expect_right(c);
  EXPECT_EQ(got.report.boundaries_forgotten, 0);
  EXPECT_EQ(got.report.boundaries_corrected, 0);
}

/// Four windows of 3000 tokens a rank, in three segments each, that decays let forget at once.
Case forgetful_windows(int ranks, DType type) {
  Recipe r;
  r.tokens = std::int64_t{4} * 3000 * ranks, r.type = type, r.decay = Decay::head, r.initial_states = true;
  Case c = test::make_case(r);
  for (std::int64_t t = 0; t < r.tokens; ++t)
    for (int h = 0; h < r.heads; ++h) c.log_decay.set(t, h, 0, -1 - t % 3);
  c.options.segment = 1000;
  return c;
}

TEST_F(DistDelta, HorizonsAreRememberedFromWindowToWindow) {
  for (DType type : {DType::f64, DType::f32}) {
    const Case c = forgetful_windows(size(), type);
    const Solution got = expect_right(c, 3000);
    EXPECT_EQ(got.report.boundaries_corrected, 0);
    EXPECT_EQ(got.report.boundaries_forgotten, got.report.boundaries);
    // the other windows' states at three borders a rank and head, two of the last rank
    EXPECT_EQ(got.report.horizons_remembered, std::int64_t{3} * c.shape.heads * (3 * size() - 1));
    EXPECT_TRUE(test::solve(*ranks_, c, 3000) == got) << "the same bits again";
  }
}

TEST_F(DistDelta, RememberedHorizonsThatDoNotHoldAreMeasuredAgain) {
  for (DType type : {DType::f64, DType::f32})
    for (double decay : {-0.02, 0.0}) {  // the second window forgets later, or not
      Case c = forgetful_windows(size(), type);
      for (std::int64_t t = 3000 * size(); t < 6000 * size(); ++t)
        for (int h = 0; h < c.shape.heads; ++h) c.log_decay.set(t, h, 0, decay);
      const Solution got = expect_right(c, 3000);
      EXPECT_GE(got.report.boundaries_corrected, 1) << test::describe(c);
      EXPECT_EQ(got.report.horizons_remembered, std::int64_t{c.shape.heads} * (3 * size() - 1)) << "never again";
    }
}

TEST_F(DistDelta, ARunThatGoesOnRemembersWhatItWouldHave) {
  const Case c = forgetful_windows(size(), DType::f32);
  test::Memory memory;
  const std::int64_t row = std::int64_t{c.shape.heads} * c.shape.d_value;
  std::int64_t remembered = 0;
  std::vector<std::byte> state;
  for (int begin : {0, 1}) {
    DeltaRule rule(*ranks_, c.shape, c.options, c.sequences);
    if (begin > 0) rule.set_state(state);
    for (int i = begin; i < (begin > 0 ? 4 : 1); ++i) {
      const TokenRange window = rule.windows(3000)[i], part = rule.part(window);
      DeltaOutputs out;
      out.o = {memory.room(part.size() * row * 4), DType::f32, row, c.shape.d_value};
      remembered += rule.solve(window, memory.inputs(c, part.begin, part.end), out).horizons_remembered;
    }
    state = rule.state();
  }
  EXPECT_EQ(remembered, std::int64_t{3} * c.shape.heads * (3 * size() - 1));
}

TEST_F(DistDelta, LargeStatesForgottenBeforeTheHorizonAreNotDoneAgain) {
  for (std::int64_t segment : {0, 5000}) {
    if (segment == 0 && !segments_are_long) continue;
    Recipe r;
    r.tokens = 10000 * size(), r.initial_states = true;
    Case c = test::make_case(r);
    for (double& x : c.initial_states) x = static_cast<float>(1e20 * x);
    c.options.segment = segment;
    const Solution got = test::solve(*ranks_, c);
    EXPECT_EQ(got.report.boundaries_forgotten, std::int64_t{r.heads} * (size() - 1));
    EXPECT_EQ(got.report.boundaries_corrected, 0) << "segments of " << segment;
    if (judges()) {
      const Solution expected = test::expected(c);
      const auto tail = [&](const std::vector<double>& o) { return std::vector<double>(o.end() - 24 * 4000, o.end()); };
      EXPECT_LE(test::difference(tail(got.o), tail(expected.o)).rms, test::tolerance_of(DType::f64).rms);
    }
  }
}

TEST_F(DistDelta, SegmentsWithStatesTooLargeToBeForgottenAreDoneAgain) {
  for (DType type : {DType::f64, DType::f32}) {
    // segments that end where parts do
    const std::int64_t each = type == DType::f64 ? 6000 : 4000, tokens = size() * each;
    Case c = large_state(size(), type, type == DType::f64 ? 1e24 : 1e14, tokens);
    const Case one = c;
    c.options.segment = each / 2;
    const Solution got = test::solve(*ranks_, c), expected = test::solve(*alone_, one);
    const auto tail = [&](const std::vector<double>& o) { return std::vector<double>(o.end() - 8 * 12, o.end()); };
    EXPECT_LE(test::difference(tail(got.o), tail(expected.o)).rms, 1e4 * test::tolerance_of(type).rms);
    EXPECT_EQ(got.report.boundaries, 2 * (size() - 1)) << "each once";
    if (size() > 1) {
      EXPECT_GE(got.report.boundaries_corrected, 1) << test::describe(c);
    }
  }
}

TEST_F(DistDelta, OverflowInASegmentIsNamed) {
  Recipe r;
  r.tokens = 4000, r.type = DType::f32;
  Case c = test::make_case(r);
  for (int h = 0; h < r.heads; ++h)
    for (std::int64_t t = 2500; t < 2600; ++t)
      for (int i = 0; i < r.d_value; ++i) c.v.set(t, h, i, 3e38), c.beta.set(t, h, 0, 1.9);
  std::int64_t named[2] = {-1, -1};
  for (int i = 0; i < 2; ++i) {
    c.options.segment = i == 0 ? 0 : 300;
    try {
      test::solve(*ranks_, c);
    } catch (const NonFinite& e) {
      named[i] = e.token;
    }
  }
  EXPECT_GE(named[0], 2500);
  EXPECT_EQ(named[0], named[1]);
}

using Runs = std::vector<Run>;

TEST(SegmentPlan, FillsTheDeviceAndMapsWhatIsWanted) {
  const Runs inner = {{0, 0, 40000, 0, 40000, false, false}},
             two_runs = {{0, 0, 10000, 0, 10000, true, true}, {1, 10000, 40000, 0, 50000, true, false}};
  const SegmentRules lanes{false, 0, 16, 64};
  const SegmentPlan one(inner, lanes, true);
  EXPECT_EQ(one.segments(), 16);
  EXPECT_EQ(one.scan_maps(), 16) << "the last state goes on";
  EXPECT_EQ(one.borders(), 17);
  EXPECT_EQ(SegmentPlan(inner, lanes, false).scan_maps(), 15);
  EXPECT_EQ(SegmentPlan(Runs{{0, 0, 1024, 0, 1024, true, true}}, lanes, false).segments(), 1) << "16 chunks";
  EXPECT_EQ(SegmentPlan(Runs{{0, 0, 1025, 0, 1025, true, true}}, lanes, false).segments(), 2);
  EXPECT_EQ(SegmentPlan(Runs{}, lanes, true).scan_maps(), 1);

  const SegmentPlan two(two_runs, lanes, true), same(two_runs, {true, 0, 16, 64}, false);
  EXPECT_EQ(two.maps_of(0), two.segments_of(0) - 1);
  EXPECT_EQ(two.maps_of(1), two.segments_of(1));
  EXPECT_EQ(two.map(1, 0), two.maps_of(0));
  EXPECT_EQ(two.border(1, 0), two.maps_of(0) + 1);
  EXPECT_EQ(two.last_border(1), two.borders() - 1);
  EXPECT_EQ(same.segments_of(0), 10);
  EXPECT_EQ(same.maps(), same.segments()) << "every segment has a map";
  EXPECT_EQ(same.segment(0, 9).begin, 9 * 1024);
  for (const SegmentPlan& plan : {two, same})
    for (std::int64_t run : {0, 1}) {
      std::int64_t at = two_runs[run].begin;
      for (std::int64_t j = 0; j < plan.segments_of(run); ++j) {
        EXPECT_EQ(plan.segment(run, j).begin, at);
        EXPECT_GT(plan.segment(run, j).size(), 0);
        at = plan.segment(run, j).end;
      }
      EXPECT_EQ(at, two_runs[run].end);
    }
}

TEST_F(DistDelta, AnOverflowLeavesNothingToTheNextSolve) {
  Recipe r;
  r.tokens = 4000;
  Case good = test::make_case(r);
  good.options.segment = 1000;
  for (std::int64_t t = 0; t < r.tokens; ++t) good.beta.set(t, 1, 0, 0);  // one head forgets, one does not
  Case bad = good;
  bad.v.set(100, 0, 0, 1e308), bad.v.set(101, 0, 0, 1e308);
  bad.eta = bad.beta, good.eta = good.beta;
  for (std::int64_t t = 0; t < r.tokens; ++t) bad.eta.set(t, 0, 0, 8);
  DeltaRule rule(*alone_, good.shape, good.options, good.sequences);
  const auto solve = [&](const Case& c) {
    test::Memory memory;
    DeltaOutputs out;
    out.o = {memory.room(c.tokens * r.heads * r.d_value * 8), DType::f64, std::int64_t{r.heads} * r.d_value, r.d_value};
    rule.solve({0, c.tokens}, memory.inputs(c, 0, c.tokens), out);
  };
  EXPECT_NO_THROW(solve(good));
  EXPECT_THROW(solve(bad), NonFinite);
  EXPECT_NO_THROW(solve(good));
}

TEST_F(DistDelta, WorkingMemoryHoldsTheMapsOfSegments) {
  const DeltaShape shape{2, 16, 16, false};
  const std::int64_t map = std::int64_t{2} * 16 * 32 * 8;  // bytes
  Sequences many;
  for (std::int64_t i = 1; i <= 3000; ++i) many.offsets.push_back(2 * i);
  DeltaOptions options;
  options.precision = Precision::f64, options.reproducible = true;
  const auto more = [](const DeltaRule& rule, std::int64_t tokens) {  // than what does not depend on them
    return rule.workspace_bytes(tokens) - rule.workspace_bytes(0);
  };
  const DeltaRule short_ones(*alone_, shape, options, many);
  EXPECT_GE(more(short_ones, 6000), 3000 * map) << "one a sequence";
  EXPECT_LT(more(short_ones, 600), 1500 * map);
  options.reproducible = false, options.segment = 100;
  const DeltaRule segments(*alone_, shape, options, {{0, 100000}});
  EXPECT_GE(more(segments, 100000), 1000 * map);
  EXPECT_LT(more(segments, 10000), 1000 * map);
}

TEST_F(DistDelta, OneRankMakesNoMap) {
  if constexpr (!is_host_space<Kokkos::DefaultExecutionSpace>) return;  // a device makes them inside a rank
  Recipe r;
  r.tokens = 3000;
  const Case c = test::make_case(r);
  for (std::int64_t window : {0, 700}) {
    const DeltaReport report = test::solve(*alone_, c, window).report;
    EXPECT_EQ(report.map_tokens, 0);
    EXPECT_EQ(report.boundaries, 0);
    EXPECT_EQ(report.bytes_exchanged, 0);
  }
  const DeltaReport report = test::solve(*ranks_, c).report;
  if (size() == 1) {
    EXPECT_EQ(report.map_tokens, 0);
  } else {
    EXPECT_GT(report.bytes_exchanged, 0);
  }
}

// --- failures: the same on every rank -------------------------------------------------------------------------------

TEST_F(DistDelta, OverflowIsNamedOnEveryRank) {
  // from token 505 on channel 2 of head 1 grows by 1024 a token
  for (bool reproducible : {false, true}) {
    Recipe r;
    r.tokens = 1400, r.type = DType::f32, r.eta = true;
    Case c = test::make_case(r);
    for (std::int64_t t = 505; t < r.tokens; ++t) {
      c.beta.set(t, 1, 0, 1025), c.eta.set(t, 1, 0, 0);
      for (int i = 0; i < r.d_key; ++i) c.k.set(t, 1, i, i == 2), c.q.set(t, 1, i, 1);
    }
    c.options.reproducible = reproducible;
    // how large that channel is before token 505, from the reference
    Case before = c;
    before.tokens = 505, before.sequences.offsets = {0, 505};
    const Solution reference = test::expected(before);
    double largest = 0;
    for (int v = 0; v < r.d_value; ++v)
      largest = std::max(largest, std::abs(reference.final_states[(r.d_value + v) * r.d_key + 2]));
    const double limit = 3.4028234663852886e38;
    const std::int64_t first = 505 + static_cast<std::int64_t>(std::floor(std::log2(limit / largest) / 10));
    std::int64_t token = -1, head = -1;
    try {
      test::solve(*ranks_, c);
    } catch (const NonFinite& e) {
      token = e.token, head = e.head;
    }
    // a product in between may overflow one token before the state does
    EXPECT_TRUE(token == first || token == first - 1) << token << ", expected " << first;
    EXPECT_EQ(head, 1);
    std::int64_t low = token, high = token;
    ranks_->all_reduce(&low, 1, Transport::Reduction::min);
    ranks_->all_reduce(&high, 1, Transport::Reduction::max);
    EXPECT_EQ(low, high);
  }
}

TEST_F(DistDelta, AFailureOnOneRankIsRaisedOnAll) {
  for (int failing = 0; failing < size(); ++failing)
    for (ExitCode code : {ExitCode::bad_input, ExitCode::file_io}) {
      const std::string message = "rank " + std::to_string(failing) + " says so: α, 100 % \n of it";
      std::string got;
      ExitCode got_code = ExitCode::ok;
      try {
        agree(*ranks_, [&] {
          if (ranks_->rank() == failing) throw Error(code, message);
        });
      } catch (const Error& e) {
        got = e.what(), got_code = e.code();
      }
      EXPECT_EQ(got, message);
      EXPECT_EQ(got_code, code);
    }
  // of several, the lowest rank's
  std::string got;
  try {
    agree(*ranks_, [&] {
      if (ranks_->rank() >= size() / 2) throw Error(ExitCode::usage, "rank " + std::to_string(ranks_->rank()));
    });
  } catch (const Error& e) {
    got = e.what();
  }
  EXPECT_EQ(got, "rank " + std::to_string(size() / 2));
  // errors that are not ours have codes, too
  ExitCode memory = ExitCode::ok, internal = ExitCode::ok;
  try {
    agree(*ranks_, [&] {
      if (ranks_->rank() == size() - 1) throw std::bad_alloc();
    });
  } catch (const Error& e) {
    memory = e.code();
  }
  try {
    agree(*ranks_, [&] {
      if (ranks_->rank() == 0) throw std::runtime_error("unforeseen");
    });
  } catch (const Error& e) {
    internal = e.code();
    EXPECT_NE(std::string(e.what()).find("unforeseen"), std::string::npos);
  }
  EXPECT_EQ(memory, ExitCode::resources);
  EXPECT_EQ(internal, ExitCode::internal);
  EXPECT_NO_THROW(agree(*ranks_, [] {}));
}

// --- the scan on its own --------------------------------------------------------------------------------------------

TEST_F(DistDelta, TransportMovesBytes) {
  const int rank = ranks_->rank();
  for (std::int64_t bytes : {0, 1, 1000, 3000000}) {
    std::vector<char> out(bytes), in(bytes);
    std::iota(out.begin(), out.end(), static_cast<char>(rank));
    const auto request = ranks_->send(out.data(), bytes, (rank + 1) % size(), 5);
    ranks_->receive(in.data(), bytes, (rank + size() - 1) % size(), 5);
    request->wait();
    std::iota(out.begin(), out.end(), static_cast<char>((rank + size() - 1) % size()));
    EXPECT_EQ(in, out);
  }
  EXPECT_EQ(broadcast(*ranks_, rank == size() - 1 ? "from the last" : "", size() - 1), "from the last");
  EXPECT_EQ(broadcast(*ranks_, "", 0), "");
  std::int64_t sum = std::int64_t{1} << (40 + rank), most = rank;
  ranks_->all_reduce(&sum, 1, Transport::Reduction::sum);
  ranks_->all_reduce(&most, 1, Transport::Reduction::max);
  EXPECT_EQ(sum, ((std::int64_t{1} << size()) - 1) << 40);
  EXPECT_EQ(most, size() - 1);
  double least = rank - 0.5;
  ranks_->all_reduce(&least, 1, Transport::Reduction::min);
  EXPECT_EQ(least, -0.5);
}

}  // namespace
}  // namespace longscan
