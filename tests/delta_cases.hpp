// SPDX-License-Identifier: Apache-2.0
#pragma once
// Problems for tests of the delta rule, what the reference says of them, and what a solve makes of them.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/reference.hpp"
#include "longscan/delta_rule.hpp"
#include "tolerances.hpp"

namespace longscan::test {

enum class Decay { none, head, channel };
inline constexpr Decay all_decays[] = {Decay::none, Decay::head, Decay::channel};
inline constexpr Inverse all_inverses[] = {Inverse::forward, Inverse::neumann, Inverse::richardson};

/// A transition: delta with one of two erase orders, or dplr.
struct Rule {
  Variant variant;
  Erase erase;
};
inline constexpr Rule all_rules[] = {
    {Variant::delta, Erase::decayed}, {Variant::delta, Erase::undecayed}, {Variant::dplr, Erase::decayed}};

/// Numbers [tokens, heads, width] in host memory, as a file would hold them.
class Numbers {
 public:
  Numbers() = default;
  Numbers(DType type, std::int64_t tokens, int heads, int width);
  bool present() const { return width > 0; }
  double get(std::int64_t token, int head, int i) const;
  void set(std::int64_t token, int head, int i, double x);
  void fill(double x);
  /// Tokens from `first` on, for `heads` heads of the problem; `data` a copy of that memory, or null for this one.
  TokenArray view(int all_heads, std::int64_t first = 0, const void* data = nullptr) const;
  std::size_t token_bytes() const { return size_of(type) * heads * width; }

  DType type = DType::f64;
  std::int64_t tokens = 0;
  int heads = 0, width = 0;
  std::vector<std::byte> bytes;
};

/// What to make. Numbers are functions of (seed, place) alone: every rank makes the same ones.
struct Recipe {
  std::int64_t tokens = 150;
  int heads = 2, d_key = 8, d_value = 12;
  Decay decay = Decay::none;
  Rule rule = all_rules[0];
  DType type = DType::f64;       ///< of q, k, v, a, b
  DType gate_type = DType::f64;  ///< of beta, eta, log_decay
  int key_heads = 0;             ///< stored heads of q and k; 0: all
  bool eta = false;
  double beta_low = 0, beta_high = 1;
  double log_decay_mean = -0.1;
  double key_noise = -1;   ///< at least 0: all keys are one vector plus so much
  int key_dimensions = 0;  ///< keys only have the first so many channels; 0: all
  bool initial_states = false;
  std::uint64_t seed = 1;
};

/// A whole problem.
struct Case {
  std::int64_t tokens = 0;
  DeltaShape shape;
  DeltaOptions options;
  Sequences sequences;
  std::optional<Sequences> counting;
  std::optional<DType> output;  ///< type of o; that of the states if not given
  Numbers q, k, v, beta, eta, log_decay, a, b;
  std::vector<double> initial_states;  ///< [sequences, H, V, K], exact in float32; empty: zero

  DType state_type() const { return state_type_of(options.precision); }
  std::int64_t state_size() const { return static_cast<std::int64_t>(shape.heads) * shape.d_value * shape.d_key; }
  /// The inputs in host memory, without initial states.
  DeltaInputs host() const;
  reference::DeltaProblem problem() const { return {shape, options, host()}; }
};

/// One sequence, its arithmetic that of the type.
Case make_case(const Recipe& recipe);
/// The same numbers as packed sequences; initial states for each if the recipe asked for them.
void pack(Case& c, std::vector<std::int64_t> offsets, std::uint64_t seed = 7);
std::string describe(const Case& c);

/// All results, on every rank.
struct Solution {
  std::vector<double> o;             ///< [T,H,V]
  std::vector<double> final_states;  ///< [sequences,H,V,K]
  std::vector<double> states;        ///< [recorded,H,V,K]
  DeltaReport report;                ///< counts summed over the windows
  bool operator==(const Solution& other) const;
};

/// Token by token in double precision.
Solution expected(const Case& c);
/// By DeltaRule, windows of about `window` tokens a rank (0: one window). Collective; results gathered.
Solution solve(Transport& ranks, const Case& c, std::int64_t window = 0);

/// Differences relative to the root mean square of `expected`; infinite where `got` is not finite or sizes differ.
struct Difference {
  double rms = 0, worst = 0;
};
Difference difference(const std::vector<double>& got, const std::vector<double>& expected);
/// Empty if `got` is within `factor` times the tolerance of the arithmetic, else what is wrong.
std::string too_far(const Solution& got, const Solution& expected, DType arithmetic, double factor = 1);

/// Copies in memory of the default execution space, as long as this lives.
class Memory {
 public:
  Memory();
  ~Memory();
  void* copy(const void* host, std::size_t bytes);
  void* room(std::size_t bytes);
  void fetch(void* host, const void* device, std::size_t bytes) const;
  template <class E>
  E* copy(const std::vector<E>& from) {
    return static_cast<E*>(copy(from.data(), from.size() * sizeof(E)));
  }
  template <class E>
  E* room_for(std::size_t count) {
    return static_cast<E*>(room(count * sizeof(E)));
  }
  template <class E>
  std::vector<E> fetch(const E* device, std::size_t count) const {
    std::vector<E> host(count);
    fetch(host.data(), device, count * sizeof(E));
    return host;
  }
  /// The inputs of tokens [begin, end) of a case.
  DeltaInputs inputs(const Case& c, std::int64_t begin, std::int64_t end);

 private:
  struct Impl;
  std::vector<Impl> blocks_;
};

}  // namespace longscan::test
