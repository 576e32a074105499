// SPDX-License-Identifier: Apache-2.0
// Forgetting, and segments inside a rank.
#include <algorithm>
#include <cmath>

#include "core/portable.hpp"
#include "core/random.hpp"
#include "dist/segment_plan.hpp"
#include "dist_delta_fixture.hpp"
#include "longscan/error.hpp"

namespace longscan {
namespace {

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

class AnySegments : public DistDeltaWith {};

TEST_P(AnySegments, GiveTheAnswer) {
  for (std::int64_t segment : {1, 37, 64, 1000})
    for (const test::Rule& rule : all_rules)
      for (bool packed : {false, true}) {
        Recipe r;
        r.tokens = segment == 1 ? 20 : 700, r.rule = rule, r.decay = GetParam(), r.initial_states = true;
        r.type = packed ? DType::f32 : DType::f64;
        Case c = test::make_case(r);
        if (packed) test::pack(c, {0, 0, 1, r.tokens / 3, r.tokens / 3, r.tokens / 2, r.tokens, r.tokens});
        c.options.segment = segment, c.options.state_every = 90, c.options.chunk = segment == 37 ? 16 : 64;
        for (std::int64_t window : {0, 150}) expect_right(c, window);
      }
}
INSTANTIATE_TEST_SUITE_P(Decays, AnySegments, ::testing::ValuesIn(all_decays), AnySegments::name);

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

}  // namespace
}  // namespace longscan
