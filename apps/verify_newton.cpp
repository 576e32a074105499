// SPDX-License-Identifier: Apache-2.0
// Two checks. Transitions: every state of the output, recomputed from the output's own state one token before; where a
// network has one layer that is all of its state, so this checks the recurrence itself, at any length and however
// chaotic, and ranks share the tokens. Whole runs: sequences from their start; as far as rounding leaves them
// comparable, which a second run with rounded states (a twin) tells.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "apps/newton_verifier.hpp"
#include "core/random.hpp"

namespace longscan {
namespace {

/// Multiplications that a check may take on a rank without being asked for.
constexpr double transition_work = 1e10, run_work = 3e9;

/// The options that an output was made with, from its attributes.
NewtonCommand command_of(const InputFile& output, const VerifyCommand& verify) {
  const auto get = [&](const std::string& name) { return output.text_attribute("/", "option_" + name).value_or(""); };
  NewtonCommand c;
  c.solve.input = verify.input, c.cell = verify.cell.empty() ? get("cell") : verify.cell;
  const std::string file = split_cell(c.cell).first;
  if (verify.cell.empty() && !file.empty() && !std::filesystem::exists(file))
    throw Error(ExitCode::file_io, "the cell of " + verify.output + " was in '" + file +
                                       "', which is not there; --cell names where it is now");
  if (get("layout") == "TD" || get("layout") == "BTD") c.layout = get("layout");
  for (Precision p : {Precision::f64, Precision::f32, Precision::bf16})
    if (get("precision") == name_of(p)) c.solve.precision = p;
  if (get("tolerance") != "default") c.tolerance = std::atof(get("tolerance").c_str());
  if (get("group") != "/") c.solve.groups = split_words(get("group"));
  for (const char* role : {"x", "h0", "c0", "cu_seqlens"})
    if (const auto name = output.text_attribute("/", std::string("option_name_") + role)) c.names[role] = *name;
  return c;
}

/// Tokens for the transitions: all, or random stretches and the end of the last sequence.
std::vector<Stretch> choose_stretches(const std::vector<Stretch>& sequences, std::int64_t sample,
                                      double tokens_at_most) {
  constexpr std::int64_t longest = 4096;
  std::vector<Stretch> chosen;
  std::int64_t tokens = 0;
  for (const Stretch& s : sequences) tokens += s.size();
  if (sample == 0 && static_cast<double>(tokens) <= tokens_at_most) {
    for (const Stretch& s : sequences) {
      std::int64_t t = s.begin;
      do {
        chosen.push_back(s);
        chosen.back().begin = t, chosen.back().end = t = std::min(s.end, t + longest);
      } while (t < s.end);
    }
    return chosen;
  }
  const std::int64_t count = sample > 0 ? sample : 64;
  const auto length = static_cast<std::int64_t>(
      std::clamp(tokens_at_most / static_cast<double>(count), 1.0, static_cast<double>(longest)));
  for (std::int64_t i = 0; i < count && tokens > 0; ++i) {
    auto token = static_cast<std::int64_t>(random_bits(1, 0, i) % static_cast<std::uint64_t>(tokens));
    for (Stretch s : sequences) {
      if (token < s.size()) {
        s.begin += token, s.end = std::min(s.end, s.begin + length);
        chosen.push_back(s);
        break;
      }
      token -= s.size();
    }
  }
  if (!sequences.empty()) {
    chosen.push_back(sequences.back());
    chosen.back().begin = std::max(chosen.back().begin, chosen.back().end - length);
  }
  return chosen;
}

/// Throws Error(bad_input) where a dataset of the output is not there or has another shape than the solution.
void require_shapes(const VerifyCommand& verify, const InputFile& output, const NewtonVerifier& verifier) {
  const NetworkShape& network = verifier.network();
  const std::int64_t D = network.channels, L = static_cast<std::int64_t>(network.layers) * network.directions;
  for (const NewtonProblem& problem : verifier.problems())
    for (const Source& source : problem.sources)
      for (const std::string name : {"h", "c"}) {
        if (name == "c" && network.state == 1) continue;
        std::vector<std::int64_t> each = source.data.at("x").shape, last = {L, D};
        each.back() = network.directions * D;
        if (problem.many()) last = {L, source.sequences(), D};
        require_shape(verify, output, dataset_path(source.group, name), each);
        require_shape(verify, output, dataset_path(source.group, name + "_final"), last);
      }
}

}  // namespace

void verify_newton(Transport& ranks, const VerifyCommand& verify) {
  std::optional<InputFile> input, output;
  std::optional<NewtonVerifier> verifier;
  NewtonCommand command;
  agree(ranks, [&] {
    input.emplace(verify.input);
    output.emplace(verify.output);
    command = command_of(*output, verify);
    verifier.emplace(*input, *output, command);
    require_same_input(verify, *input, *output, sources_of(verifier->problems()));
    require_shapes(verify, *output, *verifier);
  });
  NewtonVerifier& v = *verifier;
  const std::vector<Stretch> sequences = v.sequences();
  std::int64_t tokens = 0;
  for (const Stretch& s : sequences) tokens += s.size();
  const double rate = v.token_work(), P = ranks.size();
  const bool one_layer = v.network().layers == 1, forwards = v.network().directions == 1;
  DType stored = DType::f64;
  for (const NewtonProblem& p : v.problems()) {
    const auto info = output->find(dataset_path(p.sources.front().group, "h"));
    if (info && significand_bits(info->type) < significand_bits(stored)) stored = info->type;
  }
  // a tolerance that the user gave may show at every border of segments
  const double usual = allowed_difference(stored, v.arithmetic(), 0).of_rms;
  const double limit = verify.tolerance > 0 ? verify.tolerance : std::max(usual, 8 * command.tolerance);
  v.transitions.allowed = v.runs.allowed = allowed_difference(stored, v.arithmetic(), limit);

  if (one_layer) {
    const std::vector<Stretch> stretches = choose_stretches(sequences, verify.sample, P * transition_work / rate);
    agree(ranks, [&] {
      for (std::size_t i = ranks.rank(); i < stretches.size(); i += ranks.size()) v.verify_transitions(stretches[i]);
    });
  }
  // Runs: the shortest sequences first, each on one rank; those that run forwards alone for as long as there is time.
  std::vector<Stretch> runs = sequences;
  std::stable_sort(runs.begin(), runs.end(), [](const Stretch& a, const Stretch& b) { return a.size() < b.size(); });
  if (verify.sample > 0 && verify.sample < static_cast<std::int64_t>(runs.size())) runs.resize(verify.sample);
  agree(ranks, [&] {
    double left = run_work / (2 * rate);
    bool first = !one_layer;  // nothing else has looked at it
    for (std::size_t i = ranks.rank(); i < runs.size(); i += ranks.size(), first = false) {
      const auto size = static_cast<double>(runs[i].size());
      if (size > 0 && !first && left < (forwards ? 1 : size)) break;
      v.verify_run(runs[i], std::max<std::int64_t>(1, static_cast<std::int64_t>(left)), limit);
      left -= size;
    }
  });

  std::int64_t counts[] = {v.transition_tokens, v.run_tokens};
  ranks.all_reduce(counts, 2, Transport::Reduction::sum);
  v.transitions.reduce(ranks), v.runs.reduce(ranks);
  const bool talks = ranks.rank() == 0 && !verify.quiet;
  std::string bad;
  const auto judge = [&](const Difference& d, const std::string& what, std::int64_t looked) {
    if (d.values == 0) return;
    const std::string name = what + " (" + std::to_string(looked) + " of " + std::to_string(tokens) + " tokens)";
    if (talks) d.print(name.c_str(), false);
    if (!d.passes()) bad += (bad.empty() ? "" : "; ") + d.complaint() + " (" + what + ")";
  };
  judge(v.transitions, "transitions, each from the stored state before it", counts[0]);
  judge(v.runs, "runs from the start", counts[1]);
  if (!bad.empty()) {
    std::fflush(stdout);
    throw Error(ExitCode::numerical, verify.output + " is not the solution of " + verify.input + ": " + bad);
  }
  if (!talks) return;
  if (counts[1] < tokens && !one_layer)
    std::printf(
        "note: the states between layers are not in the file, and runs end where rounding alone may change much, "
        "or after %.0e multiplications\n",
        run_work);
  std::printf("verified\n");
}

}  // namespace longscan
