// SPDX-License-Identifier: Apache-2.0
#include "longscan/cells.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/device_memory.hpp"
#include "core/half.hpp"
#include "core/random.hpp"
#include "dist/newton_layer.hpp"
#include "dist/token_cuts.hpp"

namespace longscan {
namespace {

TokenCuts cuts_of(const Transport& ranks, const Sequences& sequences) {
  return {sequences, ranks.size(), ranks.rank(), [](std::int64_t token) { return token; }};
}

std::string text_of(const char* name, const std::vector<double>& values) {
  std::string text = std::string(name) + " =";
  char number[32];
  for (double v : values) {
    std::snprintf(number, sizeof number, " %.17g", v);
    text += number;
  }
  return text;
}

/// A point: inputs, weights and state of one channel.
struct Point {
  std::vector<double> x, w, s;
  std::string text() const { return text_of("x", x) + ", " + text_of("w", w) + ", " + text_of("s", s); }
};

template <class T>
void check_bits(const detail::CellFunctions& cell, void (*rows)(bool, int, const T*, const T*, T*),
                const CellCheckRange& range) {
  constexpr int channels = 67;  // no multiple of a vector's length
  const auto fill = [&](int values, double deviation, std::uint64_t stream) {
    std::vector<T> v(static_cast<std::size_t>(values) * channels);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<T>(deviation * random_normal(range.seed, stream, i));
    return v;
  };
  const std::vector<T> x = fill(cell.inputs, range.inputs, 11), w = fill(cell.weights, range.weights, 12),
                       s = fill(cell.state, range.states, 13);
  std::vector<T> together = s, again = s, alone = s;
  rows(false, channels, x.data(), w.data(), together.data());
  rows(false, channels, x.data(), w.data(), again.data());
  rows(true, channels, x.data(), w.data(), alone.data());
  for (std::size_t i = 0; i < s.size(); ++i) {
    const bool same = std::memcmp(&together[i], &again[i], sizeof(T)) == 0;
    if (same && std::memcmp(&together[i], &alone[i], sizeof(T)) == 0) continue;
    throw Error(ExitCode::numerical,
                "the cell's step gives value " + std::to_string(i / channels) + " other bits " +
                    (same ? "for a channel alone than among others; write products followed by sums as fused(a, b, c)"
                          : "the second time: it must depend on its arguments alone") +
                    " (" + text_of("first", {static_cast<double>(together[i])}) + ", " +
                    text_of("then", {static_cast<double>(same ? alone[i] : again[i])}) + ")");
  }
}

}  // namespace

CellCheck detail::check_cell(const CellFunctions& cell, const CellCheckRange& range) {
  check_bits(cell, cell.rows, range);
  check_bits(cell, cell.rows32, range);
  const int k = cell.state;
  CellCheck check;
  for (int n = 0; n < range.points; ++n) {
    const auto fill = [&](int values, double deviation, std::uint64_t stream) {
      std::vector<double> v(values);
      for (int i = 0; i < values; ++i)
        v[i] = deviation * random_normal(range.seed, stream, static_cast<std::uint64_t>(n) * values + i);
      return v;
    };
    const Point p{fill(cell.inputs, range.inputs, 1), fill(cell.weights, range.weights, 2), fill(k, range.states, 3)};
    std::vector<double> A(static_cast<std::size_t>(k) * k), middle = p.s;
    cell.jacobian(p.x.data(), p.w.data(), p.s.data(), A.data());
    cell.step(p.x.data(), p.w.data(), middle.data());
    bool kink = false;
    double worst = 0;
    std::string where;
    for (int j = 0; j < k; ++j) {
      const double size = 1e-5 * std::max(1.0, std::abs(p.s[j]));
      std::vector<double> up = p.s, down = p.s;
      up[j] += size, down[j] -= size;
      const double width = up[j] - down[j];
      cell.step(p.x.data(), p.w.data(), up.data()), cell.step(p.x.data(), p.w.data(), down.data());
      for (int i = 0; i < k; ++i) {
        const double difference = (up[i] - down[i]) / width, a = A[i * k + j];
        // the slopes on both sides differ by the second derivative times the step, or there is a kink
        const double left = (middle[i] - down[i]) / size, right = (up[i] - middle[i]) / size;
        kink = kink || std::abs(left - right) > 0.01 * (1 + std::abs(left) + std::abs(right));
        const double error = std::abs(a - difference) / (1 + std::abs(a));
        if (error <= worst) continue;
        worst = std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
        where = "entry [" + std::to_string(i) + "][" + std::to_string(j) +
                "] of the Jacobian: " + text_of("written", {a}) + ", " + text_of("differences say", {difference}) +
                ", at " + p.text();
      }
      for (double v : middle)
        if (!std::isfinite(v))
          throw Error(ExitCode::numerical,
                      "the cell's step is not finite: " + text_of("s'", middle) + " at " + p.text());
    }
    if (kink) {
      ++check.kinks;
      continue;
    }
    ++check.points;
    if (worst > check.worst || check.where.empty()) check.worst = worst, check.where = where;
  }
  if (!(check.worst <= range.tolerance))
    throw Error(ExitCode::numerical, "the cell's Jacobian is wrong: " + check.where);
  if (check.points == 0 && range.points > 0)
    throw Error(ExitCode::numerical, "the cell's step is smooth at none of the points that were looked at");
  return check;
}

TokenRange cell_part(const Transport& ranks, const Sequences& sequences) {
  return cuts_of(ranks, sequences).part({0, sequences.tokens()});
}
std::vector<Run> cell_runs(const Transport& ranks, const Sequences& sequences) {
  return cuts_of(ranks, sequences).runs({0, sequences.tokens()});
}

namespace {

/// Launches "longscan::cells::convert".
template <class From, class To>
void convert(const void* from, std::int64_t count, void* to) {
  const auto* source = static_cast<const From*>(from);
  auto* target = static_cast<To*>(to);
  Kokkos::parallel_for(
      "longscan::cells::convert",
      Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(0, count),
      KOKKOS_LAMBDA(const std::int64_t i) { target[i] = as_stored<To>(as_arithmetic(source[i])); });
}

/// Arrays of 16-bit numbers by way of copies in float.
NewtonReport solve_copies(Transport& ranks, const CellKernel<float>& kernel, const Sequences& sequences,
                          const CellArrays<float>& data, const NewtonOptions& options) {
  const std::int64_t tokens = cell_part(ranks, sequences).size();
  const std::int64_t inputs = tokens * kernel.inputs() * kernel.channels(), states = tokens * kernel.state_size();
  DeviceArray<float> x, h;
  reserve(x, "longscan::cells::x", inputs), reserve(h, "longscan::cells::h", states);
  const bool bf16 = data.stored == Stored::bf16;
  bf16 ? convert<StoredBf16, float>(data.x, inputs, x.data()) : convert<StoredF16, float>(data.x, inputs, x.data());
  const NewtonReport report = solve_cell_kernel<float>(
      ranks, kernel, sequences, {x.data(), h.data(), data.initial_states, data.final_states}, options);
  bf16 ? convert<float, StoredBf16>(h.data(), states, data.states)
       : convert<float, StoredF16>(h.data(), states, data.states);
  Kokkos::fence();  // the copies end here
  return report;
}

}  // namespace

template <class T>
NewtonReport solve_cell_kernel(Transport& ranks, const CellKernel<T>& kernel, const Sequences& sequences,
                               const CellArrays<T>& data, const NewtonOptions& options) {
  const bool full = options.method != NewtonMethod::automatic && options.method != NewtonMethod::shooting &&
                    options.method != NewtonMethod::sequential;
  if (options.reproducible && full)
    throw Error(ExitCode::usage, "reproducible cannot hold with the method " + std::string(name_of(options.method)) +
                                     ", whose scans depend on how tokens are cut");
  if (data.stored != Stored::as_arithmetic) {
    if constexpr (sizeof(T) == 4) {
      if (full || !kernel.takes_stored()) return solve_copies(ranks, kernel, sequences, data, options);
    } else {
      throw Error(ExitCode::usage, "arrays of 16-bit numbers need arithmetic in float");
    }
  }
  const TokenRange window{0, sequences.tokens()}, here = cell_part(ranks, sequences);
  const std::int64_t D = kernel.channels(), size = kernel.state_size();
  LayerPart<T> part;
  part.path = {data.x, kernel.inputs() * D, data.states, size, data.stored};
  part.runs = cell_runs(ranks, sequences);
  part.axis_begin = here.begin, part.axis_tokens = window.size();
  if (!part.runs.empty()) {
    if (!part.runs.front().starts && here.begin != window.begin) part.before = ranks.rank() - 1;
    if (!part.runs.back().ends && here.end != window.end) part.after = ranks.rank() + 1;
  }
  part.starts.assign(part.runs.size() * size, T(0)), part.ends = part.starts;
  for (std::size_t i = 0; i < part.runs.size(); ++i)
    if (part.runs[i].starts && data.initial_states)
      std::copy_n(data.initial_states + i * size, size, &part.starts[i * size]);
  ScanPlan plan(options.scan, options.reproducible);
  LayerSolve<T> s{ranks, kernel, part, options, {}, plan};
  const std::int64_t sent_before = ranks.bytes_sent();
  solve_layer(s);
  for (std::size_t i = 0; i < part.runs.size(); ++i)
    if (part.runs[i].ends && data.final_states) std::copy_n(&part.ends[i * size], size, data.final_states + i * size);
  s.report.bytes_exchanged = ranks.bytes_sent() - sent_before;
  ranks.all_reduce(&s.report.bytes_exchanged, 1, Transport::Reduction::sum);
  return s.report;
}

template NewtonReport solve_cell_kernel(Transport&, const CellKernel<float>&, const Sequences&,
                                        const CellArrays<float>&, const NewtonOptions&);
template NewtonReport solve_cell_kernel(Transport&, const CellKernel<double>&, const Sequences&,
                                        const CellArrays<double>&, const NewtonOptions&);

}  // namespace longscan
