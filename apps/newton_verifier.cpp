// SPDX-License-Identifier: Apache-2.0
#include "apps/newton_verifier.hpp"

#include <algorithm>
#include <cmath>

#include "core/dtype.hpp"

namespace longscan {
namespace {

/// What an elementary function costs, in multiplications.
constexpr double function_work = 30;
/// Differences of so many times the twin's are rounding; a run ends where that is this much of the RMS.
constexpr double twin_factor = 16, twin_limit = 0.1;

constexpr const char* names[] = {"h", "c"};

std::vector<double> read(const InputFile& file, const DatasetInfo& info, const Slab& slab) {
  std::int64_t elements = 1;
  for (std::int64_t n : slab.count) elements *= n;
  std::vector<std::byte> raw(elements * size_of(info.type));
  file.read(info, slab, raw.data());
  std::vector<double> values(elements);
  for (std::int64_t i = 0; i < elements; ++i) values[i] = load<double>(raw.data(), info.type, i);
  return values;
}

/// What rounding may have done, judged by a twin run, where that is not small beside `allowed`.
double slack_of(double twin_difference, double allowed) {
  return twin_factor * twin_difference > allowed ? twin_factor * twin_difference : 0;
}

/// Differences up to `slack` do not count.
template <class F>
void add(Difference& difference, double got, double expected, double slack, const F& place) {
  const double d = got - expected;
  if (std::abs(d) <= slack)
    got = expected;
  else if (std::isfinite(d))
    got -= d > 0 ? slack : -slack;
  difference.add(got, expected, std::abs(expected), std::cref(place));
}

}  // namespace

NewtonVerifier::NewtonVerifier(const InputFile& input, const InputFile& output, const NewtonCommand& command)
    : input_(input),
      output_(output),
      rounds_(output.text_attribute("/", "arithmetic").value_or("") == name_of(Precision::f32)) {
  const CellSource cell = read_cell(input, command.cell);
  weights_ = cell.weights;
  for (auto& [name, tensor] : weights_.tensors) round(tensor.values);
  network_ = network_shape(weights_, -1);
  problems_ = find_newton_problems(input, command, network_);
  for (int direction = 0; network_.layers == 1 && direction < network_.directions; ++direction)
    directions_.emplace_back(weights_, network_, 0, direction);
}

/// Every sequence.
std::vector<Stretch> NewtonVerifier::sequences() const {
  std::vector<Stretch> all;
  for (std::size_t p = 0; p < problems_.size(); ++p)
    for (std::size_t s = 0; s < problems_[p].sources.size(); ++s) {
      const Source& source = problems_[p].sources[s];
      for (std::int64_t i = 0; i < source.sequences(); ++i)
        all.push_back({p, s, i, source.offsets[i], source.offsets[i + 1]});
    }
  return all;
}

/// Multiplications a token of all layers and directions.
double NewtonVerifier::token_work() const {
  const double D = network_.channels, gates = network_.type == "lstm"                                      ? 4
                                              : network_.type == "rnn_tanh" || network_.type == "rnn_relu" ? 1
                                                                                                           : 3;
  const bool mixes = network_.type != "paragru" && network_.type != "paralstm";
  double work = 0;
  for (int layer = 0; layer < network_.layers; ++layer)
    work += gates * D * ((layer == 0 ? network_.inputs : network_.directions * D) + (mixes ? D : 0) + function_work);
  return work * network_.directions;
}

/// Tokens that are read at once.
std::int64_t NewtonVerifier::piece() const {
  return std::max<std::int64_t>(
      16, (std::int64_t{1} << 21) / (network_.inputs + 2 * network_.directions * network_.channels));
}

/// h_t from the stored h_{t-1} for the tokens of a stretch, in each direction. One layer.
void NewtonVerifier::verify_transitions(const Stretch& all) {
  const NewtonProblem& problem = problems_[all.problem];
  const Source& source = problem.sources[all.source];
  const std::int64_t first = source.offsets[all.sequence], last = source.offsets[all.sequence + 1];
  const std::int64_t D = network_.channels, k = network_.state, dirs = network_.directions;
  const States start = initial_states(all);
  for (int direction = 0; direction < dirs; ++direction) {
    const std::int64_t step = direction == 1 ? -1 : 1;
    std::vector<double> state(k * D);
    if (first == last) {
      state = start.of(direction, D, k);
      compare_final(transitions, all, direction, state, 0);
    }
    for (std::int64_t t = all.begin; t < all.end; t += piece()) {
      const std::int64_t e = std::min(all.end, t + piece()), from = std::max(first, t - 1), to = std::min(last, e + 1);
      const std::vector<double> x = read_x(problem, source, t, e);
      const std::vector<std::vector<double>> stored = read_outputs(problem, source, from, to);
      const auto put = [&](std::int64_t token) {
        for (std::int64_t i = 0; i < k; ++i)
          std::copy_n(&stored[i][((token - from) * dirs + direction) * D], D, &state[i * D]);
      };
      for (std::int64_t now = t; now < e; ++now) {
        const std::int64_t before = now - step;
        if (before < first || before >= last)
          state = start.of(direction, D, k);
        else
          put(before);
        directions_[direction].step(&x[(now - t) * network_.inputs], state.data());
        for (std::int64_t i = 0; i < k; ++i)
          for (std::int64_t d = 0; d < D; ++d)
            add(transitions, stored[i][((now - from) * dirs + direction) * D + d], state[i * D + d], 0,
                [&] { return where(source, i, now, direction * D + d); });
        if (now + step < first || now + step >= last) compare_final(transitions, all, direction, state, 0);
      }
    }
  }
  transition_tokens += all.size();
}

/// A sequence from its start on, through all layers; at most `tokens` tokens where it runs forwards alone.
void NewtonVerifier::verify_run(const Stretch& all, std::int64_t tokens, double limit) {
  if (network_.directions > 1)
    verify_run_in_memory(all, limit);
  else
    verify_run_streaming(all, tokens, limit);
}

std::vector<double> NewtonVerifier::States::of(std::int64_t index, std::int64_t D, std::int64_t k) const {
  std::vector<double> state(h.begin() + index * D, h.begin() + (index + 1) * D);
  if (k > 1) state.insert(state.end(), c.begin() + index * D, c.begin() + (index + 1) * D);
  return state;
}

void NewtonVerifier::round(std::vector<double>& values) const {
  if (rounds_)
    for (double& v : values) v = static_cast<double>(static_cast<float>(v));
}
/// What the arithmetic does to a state at least.
std::function<double(double)> NewtonVerifier::rounding() const {
  if (rounds_) return [](double v) { return static_cast<double>(static_cast<float>(v)); };
  return [](double v) { return v * (bits_as<std::uint64_t>(v) & 8 ? 1 + 0x1p-52 : 1 - 0x1p-52); };
}

DatasetInfo NewtonVerifier::find_output(const Source& source, const std::string& name) const {
  const std::string path = dataset_path(source.group, name);
  const auto info = output_.find(path);
  if (!info) throw Error(ExitCode::bad_input, output_.path() + " has no dataset '" + path + "'");
  return *info;
}

Slab NewtonVerifier::token_slab(const NewtonProblem& problem, const Source& source, std::int64_t t, std::int64_t e,
                                std::int64_t width) const {
  const std::int64_t each = std::max<std::int64_t>(1, source.tokens);
  return problem.batched ? Slab{{t / each, t % each, 0}, {1, e - t, width}} : Slab{{t, 0}, {e - t, width}};
}

std::vector<double> NewtonVerifier::read_x(const NewtonProblem& problem, const Source& source, std::int64_t t,
                                           std::int64_t e) const {
  auto x = read(input_, source.data.at("x"), token_slab(problem, source, t, e, network_.inputs));
  round(x);
  return x;
}

/// h, and c where the cell has it, of tokens [t, e): [tokens][directions][D].
std::vector<std::vector<double>> NewtonVerifier::read_outputs(const NewtonProblem& problem, const Source& source,
                                                              std::int64_t t, std::int64_t e) const {
  std::vector<std::vector<double>> out;
  const Slab slab = token_slab(problem, source, t, e, network_.directions * network_.channels);
  for (int i = 0; i < network_.state; ++i) out.push_back(read(output_, find_output(source, names[i]), slab));
  return out;
}

NewtonVerifier::States NewtonVerifier::initial_states(const Stretch& s) const {
  const NewtonProblem& problem = problems_[s.problem];
  const std::int64_t size = static_cast<std::int64_t>(network_.layers) * network_.directions * network_.channels;
  const auto one = [&](const std::string& role) {
    if (!problem.has(role)) return std::vector<double>(size, 0.0);
    const DatasetInfo& info = problem.sources[s.source].data.at(role);
    auto values = read(input_, info, state_slab(info.shape, problem.layers_first.at(role), s.sequence));
    round(values);
    return values;
  };
  return {one("h0"), one("c0")};
}

std::string NewtonVerifier::where(const Source& source, std::int64_t value, std::int64_t t,
                                  std::int64_t channel) const {
  return "dataset '" + dataset_path(source.group, names[value]) + "' at token " +
         std::to_string(t % std::max<std::int64_t>(1, source.tokens)) +
         (source.batch > 1 ? " of batch entry " + std::to_string(t / source.tokens) : "") + ", channel " +
         std::to_string(channel);
}

/// The state [state][D] after a sequence, of a layer and direction, beside h_final and c_final.
void NewtonVerifier::compare_final(Difference& difference, const Stretch& s, std::int64_t index,
                                   const std::vector<double>& state, double slack) {
  const NewtonProblem& problem = problems_[s.problem];
  const Source& source = problem.sources[s.source];
  const std::int64_t D = network_.channels;
  for (std::int64_t i = 0; i < network_.state; ++i) {
    const DatasetInfo info = find_output(source, names[i] + std::string("_final"));
    const Slab slab = problem.many() ? Slab{{index, s.sequence, 0}, {1, 1, D}} : Slab{{index, 0}, {1, D}};
    const std::vector<double> got = read(output_, info, slab);
    for (std::int64_t d = 0; d < D; ++d)
      add(difference, got[d], state[i * D + d], slack, [&] {
        return "dataset '" + info.path + "', sequence " + std::to_string(s.sequence) + ", layer and direction " +
               std::to_string(index) + ", channel " + std::to_string(d);
      });
  }
}

void NewtonVerifier::verify_run_streaming(const Stretch& all, std::int64_t tokens, double limit) {
  const NewtonProblem& problem = problems_[all.problem];
  const Source& source = problem.sources[all.source];
  const std::int64_t D = network_.channels, k = network_.state, L = network_.layers;
  const States start = initial_states(all);
  reference::CellStack stack(weights_, network_), twin(weights_, network_);
  for (std::int64_t l = 0; l < L; ++l)
    for (reference::CellStack* s : {&stack, &twin}) {
      const std::vector<double> state = start.of(l, D, k);
      std::copy(state.begin(), state.end(), s->state(static_cast<int>(l)));
    }
  const auto change = rounding();
  const std::int64_t end = std::min(all.end, all.begin + tokens);
  double squares = 0, twin_difference = 0, slack = 0;
  for (std::int64_t t = all.begin; t < end; t += piece()) {
    const std::int64_t e = std::min(end, t + piece());
    const std::vector<double> x = read_x(problem, source, t, e);
    const std::vector<std::vector<double>> stored = read_outputs(problem, source, t, e);
    for (std::int64_t now = t; now < e; ++now) {
      stack.step(&x[(now - t) * network_.inputs]), twin.step(&x[(now - t) * network_.inputs], change);
      const double* h = stack.state(static_cast<int>(L - 1));
      for (std::int64_t l = 0; l < L; ++l)
        for (std::int64_t j = 0; j < k * D; ++j)
          twin_difference = std::max(
              twin_difference, std::abs(stack.state(static_cast<int>(l))[j] - twin.state(static_cast<int>(l))[j]));
      for (std::int64_t d = 0; d < D; ++d) squares += h[d] * h[d];
      const double rms = std::sqrt(squares / static_cast<double>((now - all.begin + 1) * D));
      slack = slack_of(twin_difference, limit * rms);
      if (slack > twin_limit * rms) {
        return;
      }
      ++run_tokens;
      for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t d = 0; d < D; ++d)
          add(runs, stored[i][(now - t) * D + d], h[i * D + d], slack, [&] { return where(source, i, now, d); });
    }
  }
  if (end < all.end) {
    return;
  }
  for (std::int64_t l = 0; l < L; ++l) {
    const double* state = stack.state(static_cast<int>(l));
    compare_final(runs, all, l, std::vector<double>(state, state + k * D), slack);
  }
}

void NewtonVerifier::verify_run_in_memory(const Stretch& all, double limit) {
  const NewtonProblem& problem = problems_[all.problem];
  const Source& source = problem.sources[all.source];
  const std::int64_t D = network_.channels, k = network_.state, n = all.size(), width = network_.directions * D;
  const States start = initial_states(all);
  const std::vector<double> x = read_x(problem, source, all.begin, all.end);
  const auto run = reference::network(weights_, network_, x.data(), n, start.h.data(), start.c.data());
  const auto twin = reference::network(weights_, network_, x.data(), n, start.h.data(), start.c.data(), rounding());
  const std::vector<std::vector<double>> stored = read_outputs(problem, source, all.begin, all.end);
  double squares = 0, twin_difference = 0;
  for (std::int64_t i = 0; i < n * width; ++i)
    squares += run.h[i] * run.h[i], twin_difference = std::max(twin_difference, std::abs(run.h[i] - twin.h[i]));
  const double rms = n > 0 ? std::sqrt(squares / static_cast<double>(n * width)) : 0;
  const double slack = slack_of(twin_difference, limit * rms);
  if (slack > twin_limit * rms) {
    return;
  }
  run_tokens += n;
  for (std::int64_t i = 0; i < k; ++i)
    for (std::int64_t j = 0; j < n * width; ++j)
      add(runs, stored[i][j], (i == 0 ? run.h : run.c)[j], slack,
          [&] { return where(source, i, all.begin + j / width, j % width); });
  for (std::int64_t l = 0; l < network_.layers * network_.directions; ++l)
    compare_final(runs, all, l, States{run.h_final, run.c_final}.of(l, D, k), slack);
}

}  // namespace longscan
