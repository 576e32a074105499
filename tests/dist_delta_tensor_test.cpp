// SPDX-License-Identifier: Apache-2.0
// 16-bit inputs and products: what tensor cores take where there are some.
#include <algorithm>
#include <cmath>

#include "core/portable.hpp"
#include "dist_delta_fixture.hpp"
#include "some_of.hpp"

namespace longscan {
namespace {

TEST_F(DistDelta, SixteenBitInputs) {
  for (DType type : {DType::f16, DType::bf16}) {
    Recipe r;
    r.tokens = 500, r.type = r.gate_type = type;
    expect_right(test::make_case(r));
  }
}

class SixteenBitProducts : public DistDelta {
 protected:
  static constexpr bool tensor = !is_host_space<Kokkos::DefaultExecutionSpace>;
  Solution check(const Case& c, const char* what) {
    Solution got = test::solve(*ranks_, c);
    if (!judges()) return got;
    const Solution expected = test::expected(c);
    EXPECT_LE(test::difference(got.o, expected.o).rms, 3e-3) << what << ", " << test::describe(c);
    EXPECT_LE(test::difference(got.final_states, expected.final_states).rms, 3e-3) << what << ", " << test::describe(c);
    return got;
  }
};

/// Sizes and types that a device's tensor cores may take.
struct Sizes {
  int K, V;
};
class SixteenBitProductsOf : public SixteenBitProducts, public ::testing::WithParamInterface<Sizes> {};

TEST_P(SixteenBitProductsOf, AnyDecayTypeAndCutAreWithinTheLimits) {
  const Sizes size = GetParam();
  int residue = (size.K + 3 * size.V) / 8;  // of the number of tokens, and what goes by it
  for (Decay decay : test::some_of(all_decays))
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
      for (int segment : test::some_of({1, 100, 640})) {
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
}
INSTANTIATE_TEST_SUITE_P(Sizes, SixteenBitProductsOf,
                         ::testing::Values(Sizes{128, 128}, Sizes{64, 64}, Sizes{72, 104}, Sizes{128, 136},
                                           Sizes{64, 256}, Sizes{192, 192}, Sizes{256, 256}, Sizes{256, 64},
                                           Sizes{192, 128}, Sizes{136, 72}),
                         [](const auto& info) {
                           return "K" + std::to_string(info.param.K) + "V" + std::to_string(info.param.V);
                         });

TEST_F(SixteenBitProducts, DecaysThatTensorCoresDoNotTake) {
  for (bool undecayed : {false, true}) {
    Recipe r;
    r.tokens = 300, r.d_key = 64, r.d_value = 64, r.heads = 2, r.type = DType::bf16, r.decay = Decay::channel;
    r.rule = all_rules[undecayed], r.gate_type = undecayed ? DType::f32 : DType::f64;
    Case c = test::make_case(r);
    c.options.precision = Precision::bf16, c.output = DType::bf16;
    const Solution got = check(c, "decays of the general kernel");
    EXPECT_EQ(got.report.tensor_tasks, 0);
  }
}

/// Numbers that 16-bit operands of products cannot hold.
TEST_F(SixteenBitProducts, OfAnyScaleAreWithinTheLimits) {
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

}  // namespace
}  // namespace longscan
