// SPDX-License-Identifier: Apache-2.0
#include "apps/setup.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "apps/delta_file.hpp"
#include "core/dtype.hpp"
#include "dist/delta_axis.hpp"
#include "dist/scan_measure.hpp"

namespace longscan {
namespace {

double scale_of(const std::string& text, int d_key) {
  if (text == "rsqrt") return 1 / std::sqrt(static_cast<double>(d_key));
  return std::stod(text);
}

std::int64_t bytes_of(DType type) { return static_cast<std::int64_t>(size_of(type)); }
std::int64_t share_of(std::int64_t tokens, int ranks) { return (tokens + ranks - 1) / ranks; }

/// Bytes that the choice of a scan takes for the while.
std::int64_t scan_choice_bytes(ScanAlgorithm asked, int ranks) {
  return measures_scan(asked == ScanAlgorithm::automatic, ranks) ? 2 * measured_message_bytes : 0;
}

/// The parts of reproducible windows, which end where segments do. Where there are too many to look at all, some at the
/// start and the last ones are: windows of the same sequence are alike.
WindowNeeds::Parts reproducible_parts(const DeltaAxis& axis, int ranks, std::int64_t tokens) {
  constexpr std::size_t parts_at_most = 400'000, at_start = 256, at_end = 4;
  const std::vector<TokenRange> windows = axis.cuts().windows(tokens * ranks);
  const bool some = windows.size() * static_cast<std::size_t>(ranks) > parts_at_most;
  std::vector<std::array<std::int64_t, 2>> slots(ranks);  // of a rank: the longest parts of its two slots
  for (std::size_t w = 0; w < windows.size(); ++w) {
    if (some && w >= at_start && w + at_end < windows.size()) continue;
    const std::vector<TokenRange> parts = axis.cuts().parts(windows[w]);
    for (std::size_t r = 0; r < parts.size(); ++r) slots[r][w % 2] = std::max(slots[r][w % 2], parts[r].size());
  }
  WindowNeeds::Parts most{1, 1};
  for (const auto& [even, odd] : slots)
    most.longest = std::max({most.longest, even, odd}), most.two = std::max(most.two, even + odd);
  return most;
}

}  // namespace

DeltaOptions options_of(const DeltaCommand& command, const DeltaProblem& problem) {
  DeltaOptions o;
  o.variant = problem.variant, o.erase = command.erase, o.inverse = command.inverse, o.chunk = command.chunk;
  o.scale = scale_of(command.scale, problem.shape.d_key), o.normalize_keys = command.normalize_keys;
  o.precision = arithmetic_of(command.solve.precision, problem.widest());
  o.scan = command.solve.scan;
  o.reproducible = command.solve.reproducible, o.state_every = command.state_only ? 0 : command.state_every;
  return o;
}

NewtonOptions options_of(const NewtonCommand& command, Precision arithmetic) {
  NewtonOptions o;
  o.method = command.method, o.tolerance = command.tolerance, o.max_iterations = command.max_iterations;
  o.segment = command.segment, o.precision = arithmetic, o.reproducible = command.solve.reproducible;
  o.scan = command.solve.scan;
  return o;
}

Precision newton_arithmetic(const NewtonCommand& command, const std::vector<NewtonProblem>& problems, DType weights) {
  for (const NewtonProblem& p : problems)
    if (newton_arithmetic(command.solve.precision, p.type(), weights) == Precision::f64) return Precision::f64;
  return Precision::f32;
}

DType newton_output_type(const NewtonProblem& problem, const NewtonCommand& command) {
  return command.solve.output_type.value_or(problem.type());
}

WindowNeeds needs_of(const DeltaCommand& command, const DeltaProblem& problem, const DeltaRule& rule, int ranks) {
  WindowNeeds needs;
  needs.all = share_of(problem.tokens(), ranks);
  needs.in_and_out = DeltaPartBuffers::bytes_per_token(problem, command, delta_output_type(problem, command));
  if (command.solve.reproducible) {
    const Sequences all = problem.sequences();
    const auto axis = std::make_shared<DeltaAxis>(all, all, true, 0, ranks, 0);
    needs.parts_of = [axis, ranks](std::int64_t tokens) { return reproducible_parts(*axis, ranks, tokens); };
  }
  if (ranks == 1) {
    needs.cut_tokens = 1;
  } else {  // ranks need maps, or a look back, in every window; unit keys are forgotten in some 60 d_key tokens
    needs.horizon = std::max<std::int64_t>(8192, 64 * problem.shape.d_key);
  }
  const std::int64_t state = static_cast<std::int64_t>(problem.shape.heads) * problem.shape.d_key *
                             problem.shape.d_value *
                             bytes_of(state_type_of(arithmetic_of(command.solve.precision, problem.widest())));
  // states of the sequences of a part (in and out) and recorded ones: at worst spread as the tokens are
  const std::int64_t sequences = problem.sequences().count();
  const double states_a_token =
      2.0 * static_cast<double>(sequences) / static_cast<double>(std::max<std::int64_t>(1, problem.tokens())) +
      (command.state_every > 0 ? 1.0 / static_cast<double>(command.state_every) : 0.0);
  const std::int64_t choice = scan_choice_bytes(command.solve.scan, ranks);
  needs.work = [states_a_token, state, all = needs.all, choice, &rule](std::int64_t tokens) {
    const int slots = tokens < all ? 2 : 1;
    return choice + slots * static_cast<std::int64_t>(states_a_token * static_cast<double>(tokens)) * state +
           2 * state + rule.workspace_bytes(tokens);
  };
  return needs;
}

WindowNeeds needs_of(const NewtonCommand& command, const NewtonProblem& problem, const Newton& solver,
                     Precision arithmetic, int ranks) {
  const NetworkShape& network = solver.shape();
  const std::int64_t outputs = network.state * network.directions * network.channels;
  WindowNeeds needs;
  needs.all = share_of(problem.tokens(), ranks);
  needs.in_and_out = problem.inputs * bytes_of(problem.type()) + outputs * bytes_of(state_type_of(arithmetic));
  // layers that run backwards need every token at once
  needs.whole = network.directions > 1;
  const NewtonMethod m = command.method;
  needs.overlaps = m == NewtonMethod::automatic || m == NewtonMethod::shooting || m == NewtonMethod::sequential;
  // enough for a few segments with their warm-ups, which are many where weights are large
  const bool mixes = network.type != "paragru" && network.type != "paralstm";
  if (!mixes || network.channels <= 128) needs.cut_tokens = 16384;
  // what is written, h or c, may be converted on the way
  const DType written = newton_output_type(problem, command);
  const std::int64_t converted =
      written == state_type_of(arithmetic) ? 0 : network.directions * network.channels * bytes_of(written);
  // shooting seldom needs a scan
  const std::int64_t choice = needs.overlaps ? 0 : scan_choice_bytes(command.solve.scan, ranks);
  needs.work = [converted, choice, all = needs.all, x = problem.type(), &solver](std::int64_t n) {
    return n * converted + choice + solver.workspace_bytes(n, x, n >= all);
  };
  return needs;
}

std::string shape_text(const DeltaProblem& p, Precision arithmetic) {
  return "H = " + std::to_string(p.shape.heads) + ", K = " + std::to_string(p.shape.d_key) +
         ", V = " + std::to_string(p.shape.d_value) + ", " +
         (!p.has("log_decay")     ? "no decay"
          : p.shape.channel_decay ? "channel decay"
                                  : "head decay") +
         ", " + std::string(name_of(arithmetic));
}

std::string shape_text(const NetworkShape& network) {
  return "D = " + std::to_string(network.channels) + ", D_in = " + std::to_string(network.inputs) +
         (network.layers > 1 ? ", " + std::to_string(network.layers) + " layers" : "") +
         (network.directions > 1 ? ", both directions" : "");
}

}  // namespace longscan
