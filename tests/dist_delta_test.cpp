// SPDX-License-Identifier: Apache-2.0
// The delta rule over ranks: any cut of the tokens gives the answer of one rank. Runs on 1, 2, 3, 4 and 7 ranks.
#include <numeric>

#include "dist_delta_fixture.hpp"
#include "longscan/error.hpp"
#include "some_of.hpp"

namespace longscan {
namespace {

// --- any problem ----------------------------------------------------------------------------------------------------

class AnyNumberOfTokens : public DistDeltaWith {};

TEST_P(AnyNumberOfTokens, GivesTheAnswer) {
  for (std::int64_t tokens : {0, 1, 2, 5, 133, 1000})
    for (const test::Rule& rule : all_rules)
      for (DType type : {DType::f64, DType::f32}) {
        Recipe r;
        r.tokens = tokens, r.rule = rule, r.decay = GetParam(), r.type = type;
        r.initial_states = true, r.eta = rule.variant == Variant::delta && tokens % 2 == 1;
        expect_right(test::make_case(r));
      }
}
INSTANTIATE_TEST_SUITE_P(Decays, AnyNumberOfTokens, ::testing::ValuesIn(all_decays), AnyNumberOfTokens::name);

class InverseBy : public DistDelta, public ::testing::WithParamInterface<Inverse> {};

TEST_P(InverseBy, AnyChunkAndSizes) {
  for (int chunk : {1, 16, 100})
    for (const auto& [K, V] : {std::pair(1, 5), std::pair(24, 3), std::pair(40, 65)}) {
      Recipe r;
      r.tokens = 230, r.d_key = K, r.d_value = V, r.type = DType::f32, r.decay = Decay::head;
      r.heads = 4, r.key_heads = 2, r.beta_high = K == 1 ? 0.5 : 1;
      Case c = test::make_case(r);
      c.options.inverse = GetParam(), c.options.chunk = chunk;
      expect_right(c);
    }
}
INSTANTIATE_TEST_SUITE_P(All, InverseBy, ::testing::ValuesIn(all_inverses),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class PackedSequences : public DistDeltaWith {};

TEST_P(PackedSequences, CutTheScan) {
  const std::vector<std::int64_t> offsets[] = {
      {0, 0, 70, 71, 71, 200, 333, 333}, {0, 333},          {0, 0, 0, 333}, {0, 110, 110, 110, 222, 333},
      {0, 1, 2, 3, 4, 5, 6, 333},        {0, 333, 333, 333}};
  for (const auto& cut : offsets)
    for (bool reproducible : {false, true}) {
      Recipe r;
      r.tokens = 333, r.decay = GetParam(), r.initial_states = true;
      Case c = test::make_case(r);
      test::pack(c, cut);
      c.options.reproducible = reproducible;
      for (std::int64_t window : {0, 13, 50}) expect_right(c, window);
      if (r.decay == Decay::head && &cut == offsets) expect_right(c, 1);
    }
}
INSTANTIATE_TEST_SUITE_P(Decays, PackedSequences, ::testing::ValuesIn(all_decays), PackedSequences::name);

TEST_F(DistDelta, StatesPassThroughEmptySequences) {
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

class StatesEvery : public DistDelta, public ::testing::WithParamInterface<int> {};

TEST_P(StatesEvery, AreRecordedOnTheRankThatHasThem) {
  for (bool reproducible : {false, true})
    for (bool packed : {false, true})
      for (std::int64_t window : {0, 40}) {
        Recipe r;
        r.tokens = 333, r.heads = 1, r.d_key = 4, r.d_value = 3;
        Case c = test::make_case(r);
        if (packed) test::pack(c, {0, 0, 70, 71, 71, 200, 333});
        c.options.state_every = GetParam(), c.options.reproducible = reproducible;
        expect_right(c, window);  // counted in each sequence
        c.counting = Sequences{{0, 333}};
        expect_right(c, window);  // counted along the axis
      }
}
INSTANTIATE_TEST_SUITE_P(Tokens, StatesEvery, ::testing::Values(1, 10, 64, 333, 334));

TEST_F(DistDelta, SameRanksGiveTheSameBits) {
  Recipe r;
  r.tokens = 1500, r.decay = Decay::head, r.type = DType::f32;
  const Case c = test::make_case(r);
  EXPECT_TRUE(test::solve(*ranks_, c) == test::solve(*ranks_, c));
  EXPECT_TRUE(test::solve(*ranks_, c, 100) == test::solve(*ranks_, c, 100));
}

// --- --reproducible -------------------------------------------------------------------------------------------------

class ReproducibleBits : public DistDeltaWith {};

TEST_P(ReproducibleBits, DoNotDependOnRanksOrWindows) {
  for (const test::Rule& rule : test::some_of(all_rules))
    for (DType type : {DType::f64, DType::f32}) {
      Recipe r;
      r.tokens = 5200, r.heads = 3, r.d_key = 6, r.d_value = 5, r.rule = rule, r.decay = GetParam(), r.type = type;
      r.initial_states = true, r.log_decay_mean = -0.001;
      Case c = test::make_case(r);
      c.options.reproducible = true, c.options.state_every = 700;
      const Solution one = test::solve(*alone_, c);
      if (judges()) {
        EXPECT_EQ(test::too_far(one, test::expected(c), c.state_type()), "") << test::describe(c);
      }
      for (int window : test::some_of({0, 1, 1600}))
        EXPECT_TRUE(test::solve(*ranks_, c, window) == one) << test::describe(c) << ", window " << window;
      EXPECT_TRUE(test::solve(*alone_, c, 1500) == one) << test::describe(c) << ", one rank in windows";
    }
}
INSTANTIATE_TEST_SUITE_P(Decays, ReproducibleBits, ::testing::ValuesIn(all_decays), ReproducibleBits::name);

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
