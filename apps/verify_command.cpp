// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>
#include <limits>

#include "apps/verify.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

void Difference::add(double got, double expected, const std::function<std::string()>& place) {
  squares += expected * expected, ++values;
  const double d = std::isfinite(got) ? std::abs(got - expected) : std::numeric_limits<double>::infinity();
  errors += d * d;
  if (d > worst || (where.empty() && values == 1)) worst = d, where = place();
}

void Difference::reduce(Transport& ranks) {
  double sums[] = {squares, static_cast<double>(values), errors};
  ranks.all_reduce(sums, 3, Transport::Reduction::sum);
  double largest = worst;
  ranks.all_reduce(&largest, 1, Transport::Reduction::max);
  std::int64_t holder = values > 0 && worst == largest ? ranks.rank() : ranks.size();
  ranks.all_reduce(&holder, 1, Transport::Reduction::min);
  if (holder < ranks.size()) where = broadcast(ranks, where, static_cast<int>(holder));
  squares = sums[0], values = static_cast<std::int64_t>(sums[1]), worst = largest, errors = sums[2];
}

double Difference::ratio() const {
  if (values == 0) return 0;
  const double rms = std::sqrt(squares / static_cast<double>(values));
  return worst == 0 ? 0 : worst / std::max(rms, 1e-300);
}

double Difference::rms_ratio() const { return squares > 0 ? std::sqrt(errors / squares) : 0; }

void Difference::print(const char* what, double limit, bool sample) const {
  std::printf("%s: %lld values%s, relative RMS difference %.2e, largest %.2e of the RMS (allowed %.0e), in %s\n", what,
              static_cast<long long>(values), sample ? " (a sample)" : "", rms_ratio(), ratio(), limit, where.c_str());
}

std::string Difference::complaint() const {
  char text[48];
  std::snprintf(text, sizeof text, " differs by %.2e of the RMS", ratio());
  return where + text;
}

void require_same_input(const VerifyCommand& command, const InputFile& input, const InputFile& output,
                        const std::vector<const Source*>& sources) {
  const std::string mine = fingerprint_text(input, sources);
  const auto theirs = output.text_attribute("/", "input_fingerprint").value_or("");
  if (theirs != mine)
    throw Error(ExitCode::bad_input, command.output + " was made from another input than " + command.input +
                                         " (fingerprints " + theirs + " and " + mine + "); solve again");
}

double allowed_difference(DType stored, Precision arithmetic) {
  if (size_of(stored) == 2 || arithmetic == Precision::bf16) return 3.2e-2;
  if (stored == DType::f32 || arithmetic == Precision::f32) return 2e-5;
  return 1e-9;
}

void run_verify(Transport& ranks, const VerifyCommand& command) {
  std::string solver;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    const InputFile output(command.output);
    const auto text = output.text_attribute("/", "command");
    if (!text)
      throw Error(ExitCode::bad_input, command.output + " has no attribute 'command': it is not an output of longscan");
    solver = *text;
  });
  solver = broadcast(ranks, solver, 0);
  if (solver == "delta" && !command.cell.empty())
    throw Error(ExitCode::usage,
                "--cell is for outputs of longscan newton; " + command.output + " is of longscan delta");
  if (solver == "delta") return verify_delta(ranks, command);
  if (solver == "newton") return verify_newton(ranks, command);
  throw Error(ExitCode::bad_input, command.output + " is an output of '" + solver + "', which verify does not know");
}

}  // namespace longscan
