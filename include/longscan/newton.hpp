// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "longscan/partition.hpp"
#include "longscan/scan.hpp"
#include "longscan/transport.hpp"
#include "longscan/types.hpp"

namespace longscan {

/// How h_t = f(h_{t-1}, x_t) is solved for all t at once.
enum class NewtonMethod : int {
  automatic = 0,  ///< shooting, or the token loop where that is faster; falls back to it; never a wrong trajectory
  shooting,       ///< Newton on the states at segment borders (multiple shooting) with a warm-up
  newton,         ///< Newton on all states, full Jacobian (DEER, arXiv:2309.12252)
  quasi,          ///< diagonal of the Jacobian (arXiv:2407.19115)
  elk,            ///< Levenberg-Marquardt step as a Kalman smoother, diagonal (arXiv:2407.19115)
  picard,         ///< A = I
  jacobi,         ///< A = 0
  sequential      ///< the token loop, rank after rank
};
std::string_view name_of(NewtonMethod);

enum class NewtonStatus : int {
  converged = 0,    ///< within the tolerance, or equal to the token loop bit for bit
  exact_by_prefix,  ///< one iteration more than tokens: exact to rounding whatever the Jacobians are
  fell_back,        ///< what was left went to the token loop; exact
  not_converged,
  non_finite  ///< the recurrence leaves the range of the arithmetic
};
std::string_view name_of(NewtonStatus);

struct NewtonOptions {
  NewtonMethod method = NewtonMethod::automatic;
  double tolerance = 0;  ///< relative to the RMS of h; 0: 1e-6 in float32, 1e-10 in float64
  std::int64_t max_iterations = 100;
  std::int64_t segment = 0;                       ///< tokens of a shooting segment; 0: chosen
  Precision precision = Precision::f32;           ///< f32 or f64
  bool reproducible = false;                      ///< the same bits for any ranks and windows
  ScanAlgorithm scan = ScanAlgorithm::automatic;  ///< how Newton steps pass over the ranks
};

/// What a solve found out; the same on every rank. For several layers and directions: the worst status, sums of
/// iterations, largest values.
struct NewtonReport {
  NewtonStatus status = NewtonStatus::converged;
  NewtonMethod method_used = NewtonMethod::sequential;
  std::string reason;                    ///< why auto chose what it did
  std::int64_t iterations = 0;           ///< passes over the tokens
  std::vector<double> residual_history;  ///< largest residual (jump at a border) over the RMS of h, pass by pass
  std::int64_t converged_prefix = 0;     ///< tokens from the start that are right
  double error_bound = -1;               ///< on |h - true h|, absolute; -1: not known
  bool bits_of_token_loop = false;       ///< the result has the bits of the token loop
  bool sampled = false;                  ///< the next two (and the bound) are from a part of the tokens
  double lyapunov = 0;                   ///< finite-time largest Lyapunov exponent, per token
  double log_amplification = 0;          ///< largest log-growth of an error over consecutive tokens
  std::int64_t first_bad_token = -1;     ///< of the axis: first non-finite state
  double tolerance_floor = 0;            ///< > 0: the tolerance asked for is below what can be reached, which is this
  std::int64_t bytes_exchanged = 0;
  double projection_seconds = 0;  ///< of this rank's input projections
  ScanChoice scan;                ///< how the last Newton step passed over the ranks; no reason: none was needed
};

/// A weight or bias by its name in a torch state_dict, row-major.
struct CellTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

/// A recurrent network as a state_dict: weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, more layers _l1, …,
/// backward directions _reverse (rnn_tanh, rnn_relu, gru, lstm); weight_ih, bias, recurrent [3, D] (and peephole [2,
/// D]) for paragru and paralstm. Missing biases are zero.
struct CellWeights {
  std::string type;  ///< empty: from the shapes
  std::map<std::string, CellTensor> tensors;
};

struct NetworkShape {
  std::string type;
  int inputs = 0;    ///< D_in
  int channels = 0;  ///< D
  int layers = 1, directions = 1;
  int state = 1;       ///< values a channel: 2 for lstm and paralstm (h, c)
  std::string reason;  ///< how the type was found, if it was not given
};

/// What the weights say. Throws Error(bad_input) naming the tensors and shapes that do not fit; `inputs` < 0: unknown.
NetworkShape network_shape(const CellWeights& weights, int inputs);

/// One rank's part of a window, in host memory. States of runs are [runs, layers * directions, D] of the arithmetic's
/// type.
/// Arrays must not overlap: where kernels reach the host's memory, inputs are read and states are written in place.
struct NewtonData {
  const void* x = nullptr;  ///< [T, D_in], of `x_type`
  DType x_type = DType::f32;
  const void* h0 = nullptr;  ///< of runs that start here; nullptr: zero
  const void* c0 = nullptr;
  void* h = nullptr;        ///< [T, directions * D], the last layer, of the arithmetic's type
  void* c = nullptr;        ///< the same; may be nullptr
  void* h_final = nullptr;  ///< of runs that end here; may be nullptr
  void* c_final = nullptr;
  /// On a host: called by this thread when all of these are there for good, if they are a solution, so that they can be
  /// written while growth along them is looked at. Must neither throw nor communicate.
  std::function<void()> ready = {};
};

/// Nonlinear recurrences over sequences that are cut over the ranks of a Transport.
///
/// Every layer's input projection W_ih x + b_ih is one matrix product beforehand. The recurrence is then solved by
/// `method`. Shooting cuts the tokens into segments that run the true recurrence from guessed states, all at once; what
/// is wrong is the jump at each border; jumps are removed by handing over the end states (cells that forget need
/// nothing else) or by one affine scan over segments and ranks, delta_{j+1} = P_j delta_j + jump_j, where memory is
/// long. The full-trajectory methods solve delta_t = A_t delta_{t-1} - r_t for all tokens, an affine scan in the rank
/// and over ranks. States stay where their tokens are.
///
/// Where channels do not mix (paragru, paralstm), shooting and auto end with the bits of the token loop, whatever the
/// segments, ranks and windows; other cells and methods end within the tolerance.
/// Work: a pass is one evaluation of the cell a token; newton on mixing cells D^2 state^2 memory a token in flight and
/// D^3 multiplications. Messages: one state to the next rank and one all_reduce a pass. Determinism: the same inputs,
/// ranks and options give the same bits.
class Newton {
 public:
  /// Not collective. Throws Error(usage, bad_input).
  Newton(Transport& ranks, const CellWeights& weights, int inputs, const NewtonOptions& options, Sequences sequences);
  ~Newton();
  Newton(const Newton&) = delete;
  Newton& operator=(const Newton&) = delete;

  const NetworkShape& shape() const;
  /// Windows of at most about ranks * `tokens` tokens, of the tokens from `from` on; all tokens where a layer runs
  /// backwards.
  std::vector<TokenRange> windows(std::int64_t tokens, std::int64_t from = 0) const;
  TokenRange part(TokenRange window) const;
  std::vector<Run> runs(TokenRange window) const;
  /// Bytes of working memory for a window of `tokens` tokens a rank whose inputs are of type `x`; beside those of h and
  /// c. `only`: no other window has touched those before, so that a method may use up to as much while they wait.
  std::int64_t workspace_bytes(std::int64_t tokens, DType x, bool only = false) const;

  /// Collective. Solve one window; windows come in order. An outcome that is not a solution is in the report's status.
  NewtonReport solve(TokenRange window, const NewtonData& data);

  /// What the next window starts from: the states of all layers after the last window, on rank 0 (empty elsewhere, and
  /// before the first window). Neither is collective. A solver that is given it, on rank 0, goes on with that window as
  /// this one would, on any number of ranks. Throws Error(bad_input) if it is not a state of this network.
  std::vector<std::byte> state() const;
  void set_state(const std::vector<std::byte>& state);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace longscan
