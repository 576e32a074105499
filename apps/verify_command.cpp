// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "apps/verify.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

void Difference::add(double got, double expected, double size, const std::function<std::string()>& place) {
  ++values;
  double beyond = 0;
  if (std::isfinite(got) && std::isfinite(expected)) {
    const double d = std::abs(got - expected);
    squares += expected * expected, errors += d * d;
    beyond = d - allowed.of_size * size;
  } else {  // what follows from a NaN in the output comes after the NaN itself
    ++not_finite;
    beyond = std::isfinite(got) ? std::numeric_limits<double>::max() : std::numeric_limits<double>::infinity();
  }
  if (beyond > worst) worst = beyond, where = place();
}

void Difference::reduce(Transport& ranks) {
  double sums[] = {squares, static_cast<double>(values), errors, static_cast<double>(not_finite)};
  ranks.all_reduce(sums, 4, Transport::Reduction::sum);
  double largest = worst;
  ranks.all_reduce(&largest, 1, Transport::Reduction::max);
  std::int64_t holder = values > 0 && worst == largest ? ranks.rank() : ranks.size();
  ranks.all_reduce(&holder, 1, Transport::Reduction::min);
  if (holder < ranks.size()) where = broadcast(ranks, where, static_cast<int>(holder));
  squares = sums[0], values = static_cast<std::int64_t>(sums[1]), worst = largest, errors = sums[2];
  not_finite = static_cast<std::int64_t>(sums[3]);
}

double Difference::ratio() const {
  const std::int64_t n = values - not_finite;
  return worst == 0 ? 0 : worst / std::max(n > 0 ? std::sqrt(squares / static_cast<double>(n)) : 0, 1e-300);
}

double Difference::rms_ratio() const { return squares > 0 ? std::sqrt(errors / squares) : 0; }

void Difference::print(const char* what, bool sample) const {
  std::printf("%s: %lld values%s, ", what, static_cast<long long>(values), sample ? " (a sample)" : "");
  if (not_finite > 0)
    std::printf("%lld not finite or not to be compared for one before, in %s\n", static_cast<long long>(not_finite),
                where.c_str());
  else
    std::printf(
        "relative RMS difference %.2e, largest beyond %.1e of the values around %.2e of the RMS (allowed %.1e)%s\n",
        rms_ratio(), allowed.of_size, ratio(), allowed.of_rms, worst > 0 ? (", in " + where).c_str() : "");
}

std::string Difference::complaint() const {
  if (std::isinf(worst)) return where + " is not finite";
  if (not_finite > 0) return where + " is finite, which the solution is not";
  char text[112];
  std::snprintf(text, sizeof text, " differs by %.2e of the RMS, beyond %.1e of the values around", ratio(),
                allowed.of_size);
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

void require_shape(const VerifyCommand& command, const InputFile& output, const std::string& path,
                   const std::vector<std::int64_t>& shape) {
  const auto info = output.find(path);
  if (!info) throw Error(ExitCode::bad_input, command.output + " has no dataset '" + path + "'");
  if (info->shape != shape)
    throw Error(ExitCode::bad_input, command.output + ": dataset '" + path + "' has shape " + shape_text(info->shape) +
                                         "; expected " + shape_text(shape) + " for " + command.input);
}

Allowance allowed_difference(DType stored, Precision arithmetic, double tolerance) {
  const int bits = arithmetic == Precision::bf16 ? significand_bits(DType::bf16) : 64;
  const bool short_type = size_of(stored) == 2 || arithmetic == Precision::bf16;
  double share = 1e-9;
  if (stored == DType::f32 || arithmetic == Precision::f32) share = 2e-5;
  if (short_type) share = 3.2e-2;
  if (tolerance > 0) share = tolerance;
  return {share, short_type ? std::ldexp(1.0, -std::min(bits, significand_bits(stored))) : share};
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
