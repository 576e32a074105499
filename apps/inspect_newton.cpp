// SPDX-License-Identifier: Apache-2.0
// How hard a network is: solved on a sample of the tokens (or on all), and what the solver found out kept.
#include <algorithm>
#include <cmath>

#include "apps/inspect.hpp"
#include "core/dtype.hpp"

namespace longscan {
namespace {

constexpr double sample_work = 1.5e9;  ///< multiplications of one pass
constexpr double trial_work = 2e9;     ///< of one iteration of the full method
constexpr double window_bytes = 128 << 20;

/// Stretches of a problem's tokens laid end to end, each a sequence of its own that starts from zero.
struct Axis {
  std::vector<TokenRange> stretches;  ///< on the problem's axis
  Sequences sequences;

  explicit Axis(std::vector<TokenRange> chosen) : stretches(std::move(chosen)) {
    for (const TokenRange& s : stretches) sequences.offsets.push_back(sequences.offsets.back() + s.size());
  }
  /// f(range of the problem's axis, first token in the part) for what `part` holds.
  template <class F>
  void for_ranges(TokenRange part, const F& f) const {
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      const std::int64_t base = sequences.offsets[i];
      const std::int64_t begin = std::max(part.begin, base), end = std::min(part.end, sequences.offsets[i + 1]);
      if (begin < end)
        f(TokenRange{stretches[i].begin + begin - base, stretches[i].begin + end - base}, begin - part.begin);
    }
  }
};

/// `tokens` tokens in four stretches, each inside one sequence; or every sequence.
Axis choose(const Sequences& all, std::int64_t tokens) {
  std::vector<TokenRange> chosen;
  if (tokens >= all.tokens()) {
    for (std::int64_t i = 0; i < all.count(); ++i)
      if (all.offsets[i + 1] > all.offsets[i]) chosen.push_back({all.offsets[i], all.offsets[i + 1]});
    return Axis(chosen);
  }
  const std::int64_t length = std::max<std::int64_t>(1, tokens / 4);
  std::int64_t done = 0;
  for (TokenRange s : sample_stretches(all.tokens(), length, tokens)) {
    s.begin = std::max(s.begin, done);
    const auto next = std::upper_bound(all.offsets.begin(), all.offsets.end(), s.begin);
    s.end = std::min(s.end, *next);
    if (s.end > s.begin) chosen.push_back(s), done = s.end;
  }
  return Axis(chosen);
}

class NewtonSurvey {
 public:
  NewtonSurvey(Transport& ranks, const InputFile& file, const NewtonProblem& problem, const CellSource& cell,
               Precision arithmetic)
      : ranks_(ranks), file_(file), problem_(problem), cell_(cell), arithmetic_(arithmetic) {}

  /// Solves the tokens of an axis window by window and merges the verdicts. Tokens that cannot be solved end it.
  std::optional<NewtonReport> solve(const Axis& axis, NewtonOptions options, Problems& problems) {
    options.precision = arithmetic_;
    Newton solver(ranks_, cell_.weights, problem_.inputs, options, axis.sequences);
    const DType x = problem_.type();
    const double token =
        static_cast<double>(solver.workspace_bytes(1 << 16, x) - solver.workspace_bytes(0, x)) / (1 << 16) +
        16.0 * problem_.inputs + 32.0 * solver.shape().channels * solver.shape().directions;
    NewtonReport total;
    bool first = true;
    for (const TokenRange& window : solver.windows(static_cast<std::int64_t>(window_bytes / token) + 1024)) {
      const TokenRange part = solver.part(window);
      const std::size_t before = problems.size();
      read(axis, part, problems);
      if (problems.size() != before) return std::nullopt;
      const NetworkShape& network = solver.shape();
      const std::size_t element = size_of(state_type_of(arithmetic_));
      std::vector<std::byte> h(part.size() * network.directions * network.channels * element);
      std::vector<std::byte> c(network.state > 1 ? h.size() : 0);
      NewtonData data;
      data.x = x_.data(), data.x_type = problem_.type(), data.h = h.data(), data.c = c.empty() ? nullptr : c.data();
      const NewtonReport r = solver.solve(window, data);
      if (first) {
        total = r, first = false;
        continue;
      }
      if (static_cast<int>(r.status) > static_cast<int>(total.status))
        total.status = r.status, total.method_used = r.method_used;
      total.iterations = std::max(total.iterations, r.iterations);
      const auto done = static_cast<double>(window.begin), now = static_cast<double>(window.size());
      total.lyapunov = (total.lyapunov * done + r.lyapunov * now) / std::max(1.0, done + now);
      total.log_amplification = std::max(total.log_amplification, r.log_amplification);
    }
    return total;
  }

 private:
  void read(const Axis& axis, TokenRange part, Problems& problems) {
    const std::int64_t width = problem_.inputs, row = width * static_cast<std::int64_t>(size_of(problem_.type()));
    x_.resize(part.size() * row);
    std::string bad;
    agree(ranks_, [&] {
      axis.for_ranges(part, [&](TokenRange range, std::int64_t first) {
        for_pieces(
            problem_.sources, range,
            [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
              const Slab slab = problem_.batched ? Slab{{b, token, 0}, {1, n, width}} : Slab{{token, 0}, {n, width}};
              std::byte* to = x_.data() + (first + at) * row;
              file_.read(source.data.at("x"), slab, to);
              for (std::int64_t i = 0; i < n * width && bad.empty(); ++i) {
                const auto value = load<double>(to, problem_.type(), i);
                if (is_non_finite(value))
                  bad = describe_token(problem_.sources, file_.path(), "x", range.begin + at + i / width) +
                        ", feature " + std::to_string(i % width) + " is " + (value != value ? "NaN" : "infinite") +
                        "; every input must be finite";
              }
            });
      });
    });
    std::int64_t holder = bad.empty() ? ranks_.size() : ranks_.rank();
    ranks_.all_reduce(&holder, 1, Transport::Reduction::min);
    if (holder < ranks_.size()) problems.push_back(broadcast(ranks_, bad, static_cast<int>(holder)));
  }

  Transport& ranks_;
  const InputFile& file_;
  const NewtonProblem& problem_;
  const CellSource& cell_;
  Precision arithmetic_;
  std::vector<std::byte> x_;
};

/// What the log-amplification says of the full-trajectory method. Seen on cells with random weights: channels that do
/// not mix 3 to 7 iterations, those that mix 7 to 16, where errors never grow on the way; beyond e^13 it overflows.
std::string predicted(const NewtonReport& r, bool mixes) {
  if (r.log_amplification <= 0.7 && r.lyapunov < 0) return mixes ? "7 to 16" : "3 to 7";
  if (r.lyapunov >= 0 || r.log_amplification > 13) return "does not converge";
  return mixes ? "more than 16, if it converges" : "more than 7, if it converges";
}

}  // namespace

nlohmann::json newton_difficulty(Transport& ranks, const InputFile& file, const InspectCommand& command,
                                 const NewtonProblem& problem, const CellSource& cell, double share,
                                 Problems& problems) {
  const NetworkShape network = network_shape(cell.weights, -1);
  const bool mixes = network.type != "paragru" && network.type != "paralstm";
  const double D = network.channels, gates = network.type == "lstm" ? 4 : 3;
  const double token = gates * D * (problem.inputs + (mixes ? D : 30)) * network.layers * network.directions;
  const Sequences sequences = problem.sequences();
  const auto most = command.all ? sequences.tokens()
                                : static_cast<std::int64_t>(std::clamp(share * sample_work / token, 64.0, 32768.0));
  const Precision arithmetic = newton_arithmetic(command.newton.solve.precision, problem.type(), cell.widest);
  NewtonSurvey survey(ranks, file, problem, cell, arithmetic);
  const Axis axis = choose(sequences, most);
  for (const char* role : {"h0", "c0"})
    check_states(
        ranks, file, problem.sources, role,
        [&](const DatasetInfo& info, std::int64_t sequence) {
          return state_slab(info.shape, problem.layers_first.at(role), sequence);
        },
        problems);
  nlohmann::json j = {{"tokens_read", axis.sequences.tokens()},
                      {"tokens", sequences.tokens()},
                      {"arithmetic", std::string(name_of(arithmetic))},
                      {"starts_from", "zero states"}};
  if (axis.sequences.tokens() == 0) return j;
  const auto found = survey.solve(axis, {}, problems);
  if (!found) return j;
  j["lyapunov"] = found->lyapunov, j["log_amplification"] = found->log_amplification;
  j["auto"] = {{"status", std::string(name_of(found->status))},
               {"method_used", std::string(name_of(found->method_used))},
               {"passes", found->iterations},
               {"reason", found->reason}};
  if (found->status == NewtonStatus::non_finite) {
    j["auto"]["first_bad_token"] = found->first_bad_token;
    return j;
  }
  j["newton_iterations_predicted"] = predicted(*found, mixes);
  // the full method itself, where its cubes are affordable
  const double n = network.state * (mixes ? D : 1), cube = n * n * n * (mixes ? 1 : D) * network.layers;
  const auto tried = static_cast<std::int64_t>(std::min(trial_work / cube, 2048.0));
  if (tried >= 32) {
    const Axis part = choose(sequences, std::min(tried, axis.sequences.tokens()));
    NewtonOptions full;
    full.method = NewtonMethod::newton, full.max_iterations = 30;
    if (const auto r = survey.solve(part, full, problems)) {
      const bool converged = r->status == NewtonStatus::converged || r->status == NewtonStatus::exact_by_prefix;
      j["newton"] = {{"tokens", part.sequences.tokens()},
                     {"iterations", converged ? nlohmann::json(r->iterations) : nlohmann::json()},
                     {"status", std::string(name_of(r->status))}};
    }
  }
  return j;
}

}  // namespace longscan
