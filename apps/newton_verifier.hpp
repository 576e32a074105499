// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `longscan verify` does with an output of newton: recompute in float64 and compare. Not collective.
#include <functional>
#include <string>
#include <vector>

#include "apps/newton_problem.hpp"
#include "apps/verify.hpp"
#include "core/cell_reference.hpp"

namespace longscan {

/// Tokens [begin, end) of a sequence, on the axis of its source.
struct Stretch {
  std::size_t problem = 0, source = 0;
  std::int64_t sequence = 0, begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

class NewtonVerifier {
 public:
  /// `command`: the options that the output was made with.
  NewtonVerifier(const InputFile& input, const InputFile& output, const NewtonCommand& command);

  const std::vector<NewtonProblem>& problems() const { return problems_; }
  const NetworkShape& network() const { return network_; }
  Precision arithmetic() const { return rounds_ ? Precision::f32 : Precision::f64; }
  /// Every sequence, whole.
  std::vector<Stretch> sequences() const;
  /// Multiplications a token of all layers and directions.
  double token_work() const;

  /// h_t from the stored h_{t-1} for the tokens of a stretch, in each direction. For networks of one layer.
  void verify_transitions(const Stretch& stretch);
  /// A sequence from its start on, through all layers; at most `tokens` tokens where it runs forwards alone. A twin run
  /// with rounded states tells what rounding does: once that may be more than `limit` of the RMS it is set aside, and
  /// the run ends where it may be much.
  void verify_run(const Stretch& sequence, std::int64_t tokens, double limit);

  Difference transitions, runs;
  std::int64_t transition_tokens = 0, run_tokens = 0;

 private:
  /// h0 and c0, [layers * directions][D]; zeros where the file has none.
  struct States {
    std::vector<double> h, c;
    std::vector<double> of(std::int64_t index, std::int64_t D, std::int64_t k) const;
  };

  void verify_run_streaming(const Stretch& sequence, std::int64_t tokens, double limit);
  void verify_run_in_memory(const Stretch& sequence, double limit);
  /// The state [state][D] after a sequence, of a layer and direction, beside h_final and c_final.
  void compare_final(Difference& difference, const Stretch& s, std::int64_t index, const std::vector<double>& state,
                     double slack);

  std::int64_t piece() const;  ///< tokens that are read at once
  void round(std::vector<double>& values) const;
  std::function<double(double)> rounding() const;  ///< what the arithmetic does to a state at least
  DatasetInfo find_output(const Source& source, const std::string& name) const;
  Slab token_slab(const NewtonProblem& problem, const Source& source, std::int64_t t, std::int64_t e,
                  std::int64_t width) const;
  std::vector<double> read_x(const NewtonProblem& problem, const Source& source, std::int64_t t, std::int64_t e) const;
  /// h, and c where the cell has it, of tokens [t, e): [tokens][directions][D].
  std::vector<std::vector<double>> read_outputs(const NewtonProblem& problem, const Source& source, std::int64_t t,
                                                std::int64_t e) const;
  States initial_states(const Stretch& s) const;
  std::string where(const Source& source, std::int64_t value, std::int64_t t, std::int64_t channel) const;

  const InputFile& input_;
  const InputFile& output_;
  bool rounds_;  ///< the arithmetic was float32
  CellWeights weights_;
  NetworkShape network_;
  std::vector<NewtonProblem> problems_;
  std::vector<reference::CellLayer> directions_;  ///< of a network of one layer
};

}  // namespace longscan
