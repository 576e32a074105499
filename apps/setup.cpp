// SPDX-License-Identifier: Apache-2.0
#include "apps/setup.hpp"

#include <algorithm>
#include <cmath>

#include "apps/delta_file.hpp"
#include "core/dtype.hpp"

namespace longscan {
namespace {

double scale_of(const std::string& text, int d_key) {
  if (text == "rsqrt") return 1 / std::sqrt(static_cast<double>(d_key));
  return std::stod(text);
}

std::int64_t bytes_of(DType type) { return static_cast<std::int64_t>(size_of(type)); }
std::int64_t share_of(std::int64_t tokens, int ranks) { return (tokens + ranks - 1) / ranks; }

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
  needs.any_cut = ranks == 1;  // ranks need maps, or a look back, in every window
  const std::int64_t state = static_cast<std::int64_t>(problem.shape.heads) * problem.shape.d_key *
                             problem.shape.d_value *
                             bytes_of(state_type_of(arithmetic_of(command.solve.precision, problem.widest())));
  // states of the sequences of a part (in and out) and recorded ones: at worst spread as the tokens are
  const std::int64_t sequences = problem.sequences().count();
  const double states_a_token =
      2.0 * static_cast<double>(sequences) / static_cast<double>(std::max<std::int64_t>(1, problem.tokens())) +
      (command.state_every > 0 ? 1.0 / static_cast<double>(command.state_every) : 0.0);
  needs.work = [states_a_token, state, all = needs.all, &rule](std::int64_t tokens) {
    const int slots = tokens < all ? 2 : 1;
    return slots * static_cast<std::int64_t>(states_a_token * static_cast<double>(tokens)) * state + 2 * state +
           rule.workspace_bytes(tokens);
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
  // what is written, h or c, may be converted on the way
  const DType written = newton_output_type(problem, command);
  const std::int64_t converted =
      written == state_type_of(arithmetic) ? 0 : network.directions * network.channels * bytes_of(written);
  needs.work = [converted, &solver](std::int64_t n) { return n * converted + solver.workspace_bytes(n); };
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
