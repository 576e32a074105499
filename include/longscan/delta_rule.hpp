// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longscan/partition.hpp"
#include "longscan/scan.hpp"
#include "longscan/transport.hpp"
#include "longscan/types.hpp"

namespace longscan {

/// Which recurrence. D_t = diag(exp(log_decay_t)), o_t = scale * S_t q_t in all of them.
enum class Variant : int {
  delta = 0,  ///< S_t = S_{t-1} D_t (I - beta_t k_t k_t^T) + eta_t v_t k_t^T; see Erase
  dplr = 1    ///< S_t = S_{t-1} (D_t + a_t b_t^T) + v_t k_t^T (diagonal plus low rank; RWKV-7)
};

/// What the erasing term of the delta rule reads.
enum class Erase : int {
  decayed = 0,   ///< S_{t-1} D_t (I - beta k k^T): gated delta rule (arXiv:2412.06464), KDA (arXiv:2510.26692)
  undecayed = 1  ///< S_{t-1} (D_t - beta k k^T)
};

/// How the triangular system of a chunk is solved.
enum class Inverse : int {
  forward = 0,    ///< forward substitution
  neumann = 1,    ///< I + A + A^2 + ..., as many terms as a norm bound of A asks for
  richardson = 2  ///< X <- I + A X until X no longer changes
};

std::string_view name_of(Variant);
std::string_view name_of(Erase);
std::string_view name_of(Inverse);

struct DeltaShape {
  int heads = 1;               ///< H, that of v
  int d_key = 1;               ///< K
  int d_value = 1;             ///< V
  bool channel_decay = false;  ///< log_decay has one value a key channel, [T,H,K], not one a head
};

struct DeltaOptions {
  Variant variant = Variant::delta;
  Erase erase = Erase::decayed;
  Inverse inverse = Inverse::forward;
  int chunk = 64;  ///< C, 1 to 256
  double scale = 1;
  bool normalize_keys = false;                    ///< divide k by |k|; a zero key stays zero
  Precision precision = Precision::f32;           ///< not automatic: decided by `arithmetic_of`
  bool reproducible = false;                      ///< the same bits for any number of ranks and any windows
  ScanAlgorithm scan = ScanAlgorithm::automatic;  ///< how states pass over the ranks
  std::int64_t state_every = 0;                   ///< record the state after every so many tokens; 0 is never
  /// Tokens of the segments that a rank solves side by side. 0: on a device enough of them to fill it, on a host none.
  /// With `reproducible` a function of the sequence's length instead.
  std::int64_t segment = 0;
};

/// The arithmetic that `wanted` means for inputs whose widest type is `widest`.
Precision arithmetic_of(Precision wanted, DType widest);
/// The type of states in that arithmetic: f64, else f32.
DType state_type_of(Precision arithmetic);

/// One rank's part of the inputs, in memory that Kokkos' default execution space can reach.
/// Arrays may have fewer heads than v: `TokenArray::heads_per_stored` neighbours share one.
struct DeltaInputs {
  TokenArray q;          ///< [T,H,K]; may be absent if no output is asked for
  TokenArray k;          ///< [T,H,K]
  TokenArray v;          ///< [T,H,V]
  TokenArray beta;       ///< [T,H]; absent for dplr
  TokenArray eta;        ///< [T,H]; absent: beta
  TokenArray log_decay;  ///< [T,H] or [T,H,K], <= 0; absent: 0
  TokenArray a, b;       ///< [T,H,K], dplr only
  /// The state before the first token of every run that starts in this part, in order: [runs,H,V,K] of the state
  /// type. nullptr: zero.
  const void* initial_states = nullptr;
};

struct DeltaOutputs {
  MutableTokenArray o;           ///< [T,H,V]; absent: not computed
  void* final_states = nullptr;  ///< [runs that end in this part,H,V,K] of the state type, in order; may be nullptr
  void* states = nullptr;        ///< [states,H,V,K], those that `state_every` asks for, in order; may be nullptr
  /// Where a part is solved as one piece, on a host: called in between when o of its first so many tokens is there, of
  /// few megabytes at a time, so that it can be written beside the rest. 0: it is to be corrected, so none is there.
  std::function<void(std::int64_t tokens)> ready;
};

/// What a solve found.
struct DeltaReport {
  std::int64_t stability_breaches = 0;    ///< tokens and heads where an eigenvalue of the transition may exceed 1
  std::int64_t inverse_terms_max = 0;     ///< most terms of a Neumann or Richardson series
  std::int64_t inverse_fallbacks = 0;     ///< chunks and heads solved by forward substitution instead
  std::int64_t horizon_max = 0;           ///< most tokens that a boundary state was computed from
  std::int64_t boundaries = 0;            ///< states passed between ranks, each head counted
  std::int64_t boundaries_forgotten = 0;  ///< of these, how many did not depend on what came before the horizon
  std::int64_t boundaries_corrected = 0;  ///< of these, how many had to be sent again
  std::int64_t horizons_remembered =
      0;                             ///< states before borders, of segments too, by the horizons of the window before
  std::int64_t map_tokens = 0;       ///< tokens and heads whose map was computed besides the outputs
  std::int64_t segments = 0;         ///< solved side by side, each head counted; 0 where a rank has none
  std::int64_t tensor_tasks = 0;     ///< segments and maps computed by tensor-core kernels
  std::int64_t general_tasks = 0;    ///< by the kernels that take everything
  std::int64_t bytes_exchanged = 0;  ///< sent by this and all other ranks
  ScanChoice scan;                   ///< how states passed over the ranks, and why so
  double seconds_scan = 0;           ///< the exchange between ranks, waiting included; this rank
  /// When this rank started to solve the window, on its steady clock, and seconds from then on: what this part does to
  /// a state is known and the scan begins; the state before the part is here; the outputs are done.
  double started = 0, at_scan = 0, at_states = 0, at_outputs = 0;
  std::int64_t known_heads = 0;  ///< heads whose state this rank passed on without waiting for what comes in
  double seconds_solve = 0;      ///< everything, this rank

  /// Counts of another window or problem added; the larger of what is a maximum, its own of what is of one window.
  DeltaReport& operator+=(const DeltaReport& other);
};

/// The delta rule over sequences that are cut over the ranks of a Transport.
///
/// A window of tokens is cut into one part a rank (`part`). Inside a part the recurrence runs chunk by chunk in the WY
/// form of arXiv:2406.06484. What a run of tokens does to the state is the affine map S -> S P + L; an exclusive
/// scan of these maps over the ranks gives each rank the state its part starts from. A rank that knows that state
/// makes no map. Where P vanishes over the last tokens of a part (it "forgets"), the state at its end is L, whatever
/// came before; this is checked against the true state afterwards and mended where it does not hold. Where parts are
/// solved in segments and that was so before all of them, the next window relies on it: P is not made, and the states
/// that outputs arrive at are compared with L.
///
/// Precision: sums and states are float32, or float64 for Precision::f64. Work: per token and head about 4 V K + 2 C (V
/// + K) multiply-adds for outputs, and as much again times (1 + K/V) where maps are needed. Memory: one map a head.
/// Messages: those of the scan (longscan/scan.hpp); with a chain one state a head from each rank to the next.
/// Determinism: the same inputs, ranks and options give the same bits; with `reproducible` for any ranks and windows.
class DeltaRule {
 public:
  /// Not collective. Throws Error(usage) for options out of range. `counting`: the stretches of the axis that
  /// `state_every` counts its tokens in, each a union of sequences; the sequences if absent.
  DeltaRule(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options, Sequences sequences,
            std::optional<Sequences> counting = std::nullopt);
  ~DeltaRule();
  DeltaRule(const DeltaRule&) = delete;
  DeltaRule& operator=(const DeltaRule&) = delete;

  /// The windows that all tokens are solved in, one after another, each of at most about ranks * `tokens` tokens; those
  /// from token `from` on, which must be the end of such a window on any number of ranks.
  std::vector<TokenRange> windows(std::int64_t tokens, std::int64_t from = 0) const;
  /// The tokens of `window` that this rank holds.
  TokenRange part(TokenRange window) const;
  /// The runs in `part(window)`.
  std::vector<Run> runs(TokenRange window) const;
  /// How many states `state_every` asks for before token `token` of the axis.
  std::int64_t states_before(std::int64_t token) const;

  /// Collective. Solve one window; windows come in order. Throws NonFinite on every rank if a state or output is not
  /// finite. The report's counts are totals over the ranks.
  DeltaReport solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out);

  /// What the next window starts from: the state after the last window, and whether it relies on that one's horizons,
  /// on rank 0 (empty elsewhere, and before the first window). Neither is collective. A solver that is given it, on
  /// rank 0, goes on with that window as this one would, on any number of ranks. Throws Error(bad_input) if it is not a
  /// state of this problem.
  std::vector<std::byte> state() const;
  void set_state(const std::vector<std::byte>& state);

  /// Bytes of working memory of this rank for a window of `tokens` tokens a rank.
  std::int64_t workspace_bytes(std::int64_t tokens) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace longscan
