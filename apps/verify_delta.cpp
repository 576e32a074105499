// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "apps/delta_file.hpp"
#include "apps/delta_problem.hpp"
#include "apps/verify.hpp"
#include "core/dtype.hpp"
#include "core/random.hpp"
#include "core/reference.hpp"

namespace longscan {

namespace {

/// The options that an output was made with, from its attributes.
DeltaCommand command_of(const InputFile& output, const VerifyCommand& verify) {
  const auto get = [&](const std::string& name) { return output.text_attribute("/", "option_" + name).value_or(""); };
  DeltaCommand c;
  c.solve.input = verify.input;
  if (get("layout") == "THD") c.solve.layout = Layout::thd;
  if (get("layout") == "BTHD") c.solve.layout = Layout::bthd;
  if (get("layout") == "BHTD") c.solve.layout = Layout::bhtd;
  for (Precision p : {Precision::f64, Precision::f32, Precision::bf16})
    if (get("precision") == name_of(p)) c.solve.precision = p;
  if (get("variant") == "delta") c.variant = Variant::delta;
  if (get("variant") == "dplr") c.variant = Variant::dplr;
  if (get("erase") == "undecayed") c.erase = Erase::undecayed;
  c.scale = get("scale"), c.normalize_keys = get("normalize_keys") == "yes", c.state_only = get("state_only") == "yes";
  c.state_every = std::atoll(get("state_every").c_str());
  if (get("group") != "/") c.solve.groups = split_words(get("group"));
  for (const char* role : {"q", "k", "v", "beta", "eta", "log_decay", "a", "b", "initial_state", "cu_seqlens"})
    if (const auto name = output.text_attribute("/", std::string("option_name_") + role)) c.names[role] = *name;
  return c;
}

/// A stretch of tokens of one head, and the rows of its state that are followed.
struct Place {
  std::size_t problem = 0, source = 0;
  std::int64_t sequence = 0;        ///< in the source
  std::int64_t begin = 0, end = 0;  ///< on the source's axis
  int head = 0, row_begin = 0, row_end = 0;
  std::int64_t state_before = -1;  ///< entry of `states` to start from; -1: the initial state
  std::int64_t state_after = -1;   ///< entry of `states` to end at; -1: the final state
};

class DeltaVerifier {
 public:
  DeltaVerifier(const InputFile& input, const InputFile& output, const DeltaCommand& command,
                const std::vector<DeltaProblem>& problems)
      : input_(input), output_(output), command_(command), problems_(problems) {}

  /// All stretches: each sequence and head, cut where states were recorded; and the multiplications each costs.
  std::vector<Place> stretches() const {
    std::vector<Place> places;
    for (std::size_t p = 0; p < problems_.size(); ++p)
      for (std::size_t s = 0; s < problems_[p].sources.size(); ++s) {
        const Source& source = problems_[p].sources[s];
        const std::int64_t every = problems_[p].packed || command_.state_only ? 0 : command_.state_every;
        for (std::int64_t i = 0; i < source.sequences(); ++i)
          for (int h = 0; h < problems_[p].shape.heads; ++h) {
            const std::int64_t begin = source.offsets[i], end = source.offsets[i + 1];
            std::int64_t t = begin, recorded = 0;
            do {
              Place place{p, s, i, t, end, h, 0, problems_[p].shape.d_value};
              place.state_before = recorded - 1;
              if (every > 0 && t + every <= end) place.end = t + every, place.state_after = recorded++;
              t = place.end;
              places.push_back(place);
            } while (t < end);
          }
      }
    return places;
  }

  double cost(const Place& place) const {
    return static_cast<double>(place.end - place.begin) * (place.row_end - place.row_begin) *
           problems_[place.problem].shape.d_key;
  }

  void verify(const Place& place) {
    const DeltaProblem& problem = problems_[place.problem];
    const Source& source = problem.sources[place.source];
    const int rows = place.row_end - place.row_begin, K = problem.shape.d_key;
    std::vector<double> state(static_cast<std::size_t>(rows) * K, 0.0);
    if (place.state_before >= 0)
      state = read_state(output_, name(source, "states"), place, place.state_before);
    else if (problem.has("initial_state"))
      state = read_state(input_, source.data.at("initial_state").path, place, -1);

    const std::int64_t window = 8192;
    for (std::int64_t t = place.begin; t < place.end; t += window) {
      const std::int64_t n = std::min(window, place.end - t);
      reference::DeltaProblem r;
      r.shape = problem.shape, r.shape.heads = 1;
      r.options.variant = problem.variant, r.options.erase = command_.erase;
      r.options.normalize_keys = command_.normalize_keys;
      r.options.scale = command_.scale == "rsqrt" ? 1 / std::sqrt(static_cast<double>(K)) : std::stod(command_.scale);
      std::vector<std::vector<double>> memory;
      memory.reserve(9);
      const auto array = [&](const char* role, int width) -> TokenArray {
        if (!problem.has(role) || (command_.state_only && role[0] == 'q')) return {};
        const int stored = problem.heads.count(role) ? problem.heads.at(role) : problem.shape.heads;
        memory.push_back(
            read_tokens(input_, source.data.at(role), problem, t, n, place.head * stored / problem.shape.heads));
        return {memory.back().data(), DType::f64, width, 0, 1};
      };
      r.in.q = array("q", K), r.in.k = array("k", K), r.in.v = array("v", problem.shape.d_value);
      r.in.beta = array("beta", 1), r.in.eta = array("eta", 1), r.in.a = array("a", K), r.in.b = array("b", K);
      r.in.log_decay = array("log_decay", problem.shape.channel_decay ? K : 1);
      std::vector<double> expected(static_cast<std::size_t>(n) * rows);
      reference::delta_rule(r, 0, 0, n, place.row_begin, place.row_end, state.data(), expected.data());
      if (!command_.state_only) compare_outputs(place, problem, source, t, n, expected);
    }
    compare_state(place, problem, source, state);
  }

  Difference o, states;

 private:
  static std::string name(const Source& source, const std::string& dataset) {
    return source.group == "/" ? "/" + dataset : source.group + "/" + dataset;
  }

  const DatasetInfo find(const std::string& path) const {
    auto info = output_.find(path);
    if (!info) throw Error(ExitCode::bad_input, output_.path() + " has no dataset '" + path + "'");
    return *info;
  }

  static double largest(const double* values, std::int64_t n) {
    double size = 0;
    for (std::int64_t i = 0; i < n; ++i) size = std::max(size, std::abs(values[i]));
    return size;
  }

  static std::vector<double> to_doubles(const std::vector<std::byte>& raw, DType type, std::int64_t n) {
    std::vector<double> x(n);
    load_row(raw.data(), type, 0, static_cast<int>(n), x.data());
    return x;
  }

  /// Tokens [t, t + n) of a source's axis, one stored head: [n][width].
  static std::vector<double> read_tokens(const InputFile& file, const DatasetInfo& info, const DeltaProblem& problem,
                                         std::int64_t t, std::int64_t n, std::int64_t head) {
    const Axes at = axes_of(problem.layout);
    Slab slab{std::vector<std::int64_t>(info.shape.size(), 0), info.shape};
    const std::int64_t tokens = info.shape[at.token];
    if (at.batch >= 0) slab.begin[at.batch] = t / tokens, slab.count[at.batch] = 1, t %= tokens;
    slab.begin[at.token] = t, slab.count[at.token] = n;
    slab.begin[at.head] = head, slab.count[at.head] = 1;
    std::int64_t elements = 1;
    for (std::int64_t c : slab.count) elements *= c;
    std::vector<std::byte> raw(elements * size_of(info.type));
    file.read(info, slab, raw.data());
    return to_doubles(raw, info.type, elements);
  }

  /// Rows of a state of [..., H, V, K]; `entry` of a recorded one, or -1.
  std::vector<double> read_state(const InputFile& file, const std::string& path, const Place& place,
                                 std::int64_t entry) const {
    const auto info = file.find(path);
    if (!info) throw Error(ExitCode::bad_input, file.path() + " has no dataset '" + path + "'");
    const std::size_t axes = info->shape.size();
    Slab slab{std::vector<std::int64_t>(axes, 0), info->shape};
    for (std::size_t i = 0; i + 3 < axes; ++i) slab.count[i] = 1;
    if (entry >= 0) slab.begin[axes - 4] = entry;
    const bool by_sequence = entry >= 0 ? axes == 5 : axes == 4;
    if (by_sequence) slab.begin[0] = place.sequence;
    slab.begin[axes - 3] = place.head, slab.count[axes - 3] = 1;
    slab.begin[axes - 2] = place.row_begin, slab.count[axes - 2] = place.row_end - place.row_begin;
    const std::int64_t elements = slab.count[axes - 2] * info->shape[axes - 1];
    std::vector<std::byte> raw(elements * size_of(info->type));
    file.read(*info, slab, raw.data());
    return to_doubles(raw, info->type, elements);
  }

  void compare_outputs(const Place& place, const DeltaProblem& problem, const Source& source, std::int64_t t,
                       std::int64_t n, const std::vector<double>& expected) {
    const int rows = place.row_end - place.row_begin, V = problem.shape.d_value;
    const std::vector<double> got = read_tokens(output_, find(name(source, "o")), problem, t, n, place.head);
    double size = 0;  // fades over a few tokens: one alone may be small only because its q hides a large state
    for (std::int64_t i = 0; i < n; ++i) {
      size = std::max(size / 2, largest(&expected[i * rows], rows));
      for (int r = 0; r < rows; ++r)
        o.add(got[i * V + place.row_begin + r], expected[i * rows + r], size, [&] {
          return "dataset '" + name(source, "o") + "' at token " +
                 std::to_string((t + i) % std::max<std::int64_t>(1, source.tokens)) +
                 (problem.layout == Layout::thd ? "" : " of batch entry " + std::to_string((t + i) / source.tokens)) +
                 ", head " + std::to_string(place.head) + ", value " + std::to_string(place.row_begin + r);
        });
    }
  }

  void compare_state(const Place& place, const DeltaProblem& problem, const Source& source,
                     const std::vector<double>& expected) {
    const auto compare = [&](const std::string& dataset, std::int64_t entry) {
      const auto got = read_state(output_, name(source, dataset), place, entry);
      const double size = largest(expected.data(), static_cast<std::int64_t>(expected.size()));
      for (std::size_t i = 0; i < expected.size(); ++i)
        states.add(got[i], expected[i], size, [&] {
          return "dataset '" + name(source, dataset) + "', sequence " + std::to_string(place.sequence) + ", head " +
                 std::to_string(place.head) + (entry < 0 ? "" : ", entry " + std::to_string(entry));
        });
    };
    if (place.state_after >= 0) compare("states", place.state_after);
    if (place.end == source.offsets[place.sequence + 1]) compare("final_state", -1);
    (void)problem;
  }

  const InputFile& input_;
  const InputFile& output_;
  const DeltaCommand& command_;
  const std::vector<DeltaProblem>& problems_;
};

}  // namespace

void verify_delta(Transport& ranks, const VerifyCommand& verify) {
  std::optional<InputFile> input, output;
  DeltaCommand command;
  std::vector<DeltaProblem> problems;
  agree(ranks, [&] {
    input.emplace(verify.input);
    output.emplace(verify.output);
    command = command_of(*output, verify);
    problems = find_problems(*input, command);
    require_same_input(verify, *input, *output, sources_of(problems));
    for (const OutputDataset& d : delta_outputs(problems, command)) require_shape(verify, *output, d.path, d.shape);
  });
  DeltaVerifier verifier(*input, *output, command, problems);
  std::vector<Place> places = verifier.stretches();
  double work = 0;
  for (const Place& place : places) work += verifier.cost(place);
  const bool all = verify.sample == 0 && work <= 2e10;
  const std::int64_t sample = verify.sample > 0 ? verify.sample : 16;
  if (!all && !places.empty()) {  // one row of the state each, over a stretch
    std::vector<Place> chosen;
    for (std::int64_t i = 0; i < sample; ++i) {
      Place place = places[random_bits(1, 0, i) % places.size()];
      place.row_begin = static_cast<int>(random_bits(1, 1, i) % problems[place.problem].shape.d_value);
      place.row_end = place.row_begin + 1;
      chosen.push_back(place);
    }
    places = chosen;
  }
  Precision coarsest = Precision::f64;
  DType stored = DType::f64;
  for (const DeltaProblem& p : problems) {
    const Precision arithmetic = arithmetic_of(command.solve.precision, p.widest());
    if (static_cast<int>(arithmetic) > static_cast<int>(coarsest)) coarsest = arithmetic;
    if (command.state_only) continue;
    const auto info = output->find(p.sources.front().group == "/" ? "/o" : p.sources.front().group + "/o");
    if (info && significand_bits(info->type) < significand_bits(stored)) stored = info->type;
  }
  verifier.o.allowed = allowed_difference(stored, coarsest, verify.tolerance);
  verifier.states.allowed = allowed_difference(DType::f64, coarsest, verify.tolerance);
  agree(ranks, [&] {
    for (std::size_t i = ranks.rank(); i < places.size(); i += ranks.size()) verifier.verify(places[i]);
  });
  verifier.o.reduce(ranks);
  verifier.states.reduce(ranks);
  std::string bad;
  const auto judge = [&](const Difference& d, const char* what) {
    if (d.values == 0) return;
    if (ranks.rank() == 0 && !verify.quiet) d.print(what, !all);
    if (!d.passes()) bad += (bad.empty() ? "" : "; ") + d.complaint();
  };
  judge(verifier.o, "outputs");
  judge(verifier.states, "states");
  if (!bad.empty()) {
    std::fflush(stdout);
    throw Error(ExitCode::numerical, verify.output + " is not the solution of " + verify.input + ": " + bad);
  }
  if (ranks.rank() == 0 && !verify.quiet) std::printf("verified\n");
}

}  // namespace longscan
