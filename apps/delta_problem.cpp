// SPDX-License-Identifier: Apache-2.0
#include "apps/delta_problem.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace longscan {
namespace {

/// Checks shapes against each other and fills in what they say.
class Fitter {
 public:
  Fitter(DeltaProblem& problem, Source& source, Problems& problems)
      : problem_(problem), source_(source), problems_(problems) {}

  bool fit(Layout wanted) {
    const DatasetInfo& v = source_.data.at("v");
    const std::size_t axes = v.shape.size();
    if (axes != 3 && axes != 4)
      return fail(v, "has " + std::to_string(axes) +
                         " axes; 3 ([tokens, heads, width]) or 4 ([batch, tokens, heads, width]) are needed");
    problem_.layout = wanted != Layout::automatic ? wanted : axes == 3 ? Layout::thd : Layout::bthd;
    if ((problem_.layout == Layout::thd) != (axes == 3))
      return fail(v, "has " + std::to_string(axes) + " axes, which --layout " + name_of(problem_.layout) + " does not");
    at_ = axes_of(problem_.layout);
    source_.batch = at_.batch < 0 ? 1 : v.shape[at_.batch];
    source_.tokens = v.shape[at_.token];
    knows_tokens_ = true;
    problem_.shape.heads = static_cast<int>(v.shape[at_.head]);
    problem_.shape.d_value = static_cast<int>(v.shape[at_.width]);
    if (problem_.shape.heads < 1 || problem_.shape.d_value < 1) return fail(v, "has no heads or no width");
    const std::size_t before = problems_.size();
    wide("k", 0);
    const bool knows_width = source_.data.at("k").shape.size() == axes;
    if (knows_width) problem_.shape.d_key = static_cast<int>(source_.data.at("k").shape[at_.width]);
    if (problem_.shape.d_key < 1) return fail(source_.data.at("k"), "has keys of no width");
    for (const char* role : {"q", "a", "b"})
      if (source_.data.count(role)) wide(role, knows_width ? problem_.shape.d_key : 0);
    for (const char* role : {"beta", "eta"})
      if (source_.data.count(role)) narrow(role);
    if (source_.data.count("log_decay")) {
      const auto& decay = source_.data.at("log_decay").shape;
      problem_.shape.channel_decay =
          decay.size() == axes && problem_.shape.d_key > 1 && decay.back() == problem_.shape.d_key;
      if (problem_.shape.channel_decay)
        wide("log_decay", problem_.shape.d_key, false);
      else
        narrow("log_decay");
    }
    return problems_.size() == before;
  }

  /// The axes of v are understood.
  bool knows_tokens() const { return knows_tokens_; }

  /// `fits`: the shape is known, so states can be compared with it.
  void sequences(const InputFile& file, bool fits) {
    problem_.packed = source_.data.count("cu_seqlens") > 0;
    set_offsets(file, source_, problems_);
    if (!fits || !source_.data.count("initial_state")) return;
    const DatasetInfo& s = source_.data.at("initial_state");
    const std::vector<std::int64_t> one = {problem_.shape.heads, problem_.shape.d_value, problem_.shape.d_key};
    std::vector<std::int64_t> all = one;
    all.insert(all.begin(), source_.sequences());
    const bool single = !problem_.packed && problem_.layout == Layout::thd;
    if (s.shape != all && !(single && s.shape == one))
      fail(s, "has shape " + shape_text(s.shape) + "; expected " + shape_text(single ? one : all) +
                  (single ? " (heads, d_value, d_key)" : " (sequences, heads, d_value, d_key)"));
  }

 private:
  bool fail(const DatasetInfo& info, const std::string& text) {
    problems_.push_back("dataset '" + info.path + "' " + text);
    return false;
  }

  /// [B?, T, H', width] with H' dividing H (or equal to it).
  void wide(const std::string& role, std::int64_t width, bool shared = true) {
    const DatasetInfo& info = source_.data.at(role);
    const DatasetInfo& v = source_.data.at("v");
    if (info.shape.size() != v.shape.size()) {
      fail(info, "has shape " + shape_text(info.shape) + "; it needs as many axes as '" + v.path + "' " +
                     shape_text(v.shape));
      return;
    }
    if (width > 0 && info.shape[at_.width] != width)
      fail(info, "has " + std::to_string(info.shape[at_.width]) + " key channels, '" + source_.data.at("k").path +
                     "' has " + std::to_string(width) + "; they must be equal");
    tokens(info);
    const std::int64_t stored = info.shape[at_.head], H = problem_.shape.heads;
    if (stored < 1 || (shared ? H % stored != 0 : stored != H))
      fail(info, "has " + std::to_string(stored) + " heads, '" + v.path + "' has " + std::to_string(H) +
                     (shared ? "; the first must divide the second" : "; they must be equal"));
    problem_.heads[role] = static_cast<int>(stored);
  }

  /// [B?, T, H], with or without a last axis of one.
  void narrow(const std::string& role) {
    const DatasetInfo& info = source_.data.at(role);
    const DatasetInfo& v = source_.data.at("v");
    const std::size_t axes = v.shape.size() - 1;
    if (!(info.shape.size() == axes || (info.shape.size() == axes + 1 && info.shape.back() == 1))) {
      fail(info, "has shape " + shape_text(info.shape) + "; one value per token and head is needed, " +
                     shape_text({v.shape.begin(), v.shape.end() - 1}) +
                     (role == "log_decay" ? ", or one a key channel" : ""));
      return;
    }
    tokens(info);
    if (info.shape[at_.head] != problem_.shape.heads)
      fail(info, "has " + std::to_string(info.shape[at_.head]) + " heads, '" + v.path + "' has " +
                     std::to_string(problem_.shape.heads) + "; they must be equal");
    problem_.heads[role] = problem_.shape.heads;
  }

  void tokens(const DatasetInfo& info) {
    if (info.shape[at_.token] != source_.tokens)
      fail(info, "has " + std::to_string(info.shape[at_.token]) + " tokens, '" + source_.data.at("v").path + "' has " +
                     std::to_string(source_.tokens) + "; they must be equal");
    if (at_.batch >= 0 && info.shape[at_.batch] != source_.batch)
      fail(info, "has a batch of " + std::to_string(info.shape[at_.batch]) + ", '" + source_.data.at("v").path +
                     "' of " + std::to_string(source_.batch) + "; they must be equal");
  }

  DeltaProblem& problem_;
  Source& source_;
  Problems& problems_;
  Axes at_{};
  bool knows_tokens_ = false;
};

/// What must be equal for two groups to be solved together.
std::string signature(const DeltaProblem& p) {
  std::string text = std::to_string(p.shape.heads) + " " + std::to_string(p.shape.d_key) + " " +
                     std::to_string(p.shape.d_value) + " " + std::to_string(p.shape.channel_decay) + " " +
                     std::to_string(p.packed) + " " + name_of(p.layout) + " " + std::string(name_of(p.variant));
  for (const auto& [role, info] : p.sources.front().data)
    if (role != "cu_seqlens") text += " " + role + ":" + std::string(name_of(info.type));
  for (const auto& [role, heads] : p.heads) text += " " + role + "=" + std::to_string(heads);
  return text;
}

DeltaProblem one_problem(const InputFile& file, const DeltaCommand& command, const std::string& group,
                         Problems& problems) {
  DeltaProblem problem;
  problem.sources.emplace_back();
  Source& source = problem.sources.front();
  source.group = group;
  DatasetFinder find(file, command.names, group, problems);
  const bool free_vectors = find.there("a") && find.there("b");
  problem.variant = command.variant                       ? *command.variant
                    : free_vectors && !find.there("beta") ? Variant::dplr
                                                          : Variant::delta;
  const std::size_t before = problems.size();
  const bool dplr = problem.variant == Variant::dplr;
  for (const char* role : {"q", "k", "v"}) find.take(role, role[0] != 'q' || !command.state_only, source);
  if (dplr) {
    for (const char* role : {"a", "b"}) find.take(role, true, source);
  } else {
    find.take("beta", true, source);
    find.take("eta", false, source);
  }
  for (const char* role : {"log_decay", "initial_state", "cu_seqlens"}) find.take(role, false, source);
  if (!source.data.count("v") || !source.data.count("k")) return problem;  // they say what the axes are
  Fitter fitter(problem, source, problems);
  fitter.fit(command.solve.layout);
  if (fitter.knows_tokens()) fitter.sequences(file, problems.size() == before);
  return problem;
}

}  // namespace

Axes axes_of(Layout layout) {
  return layout == Layout::bthd ? Axes{0, 1, 2, 3} : layout == Layout::bhtd ? Axes{0, 2, 1, 3} : Axes{-1, 0, 1, 2};
}

DType DeltaProblem::widest() const {
  DType widest = type("v");
  for (const char* role : {"q", "k", "a", "b"})
    if (has(role) && significand_bits(type(role)) > significand_bits(widest)) widest = type(role);
  return widest;
}

Sequences DeltaProblem::counting() const {
  if (!packed) return sequences();
  Sequences all;
  for (const Source& source : sources) all.offsets.push_back(all.offsets.back() + source.axis_tokens());
  return all;
}

std::int64_t DeltaProblem::tokens() const {
  std::int64_t sum = 0;
  for (const Source& source : sources) sum += source.axis_tokens();
  return sum;
}

std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command, Problems& problems) {
  const auto solvable = [&](const std::string& group) {
    const DatasetFinder find(file, command.names, group, problems);
    return find.there("q") || find.there("k") || find.there("v");
  };
  const auto groups = select_groups(file, command.solve.groups, solvable, "the datasets q, k, v", problems);
  std::vector<DeltaProblem> found;
  std::map<std::string, std::size_t> by_signature;
  for (const std::string& group : groups) {
    const std::size_t before = problems.size();
    DeltaProblem problem = one_problem(file, command, group, problems);
    if (problems.size() != before) continue;
    const auto [it, added] = by_signature.emplace(signature(problem), found.size());
    if (added)
      found.push_back(std::move(problem));
    else
      found[it->second].sources.push_back(std::move(problem.sources.front()));
  }
  return found;
}

std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command) {
  Problems problems;
  auto found = find_problems(file, command, problems);
  if (!problems.empty() && file.find("/x") && !file.find("/v"))
    problems.push_back("dataset '/x' is input for longscan newton");
  throw_problems(file.path(), problems);
  return found;
}

// --- the same, as text, for the other ranks
// ---------------------------------------------------------------------------

static void to_json(nlohmann::json& j, const DeltaProblem& p) {
  j = {{"layout", static_cast<int>(p.layout)},
       {"packed", p.packed},
       {"shape", {p.shape.heads, p.shape.d_key, p.shape.d_value}},
       {"channel_decay", p.shape.channel_decay},
       {"variant", static_cast<int>(p.variant)},
       {"heads", p.heads},
       {"sources", p.sources}};
}
static void from_json(const nlohmann::json& j, DeltaProblem& p) {
  p.layout = static_cast<Layout>(j.at("layout").get<int>()), p.packed = j.at("packed");
  const auto& shape = j.at("shape");
  p.shape = {shape[0], shape[1], shape[2], j.at("channel_decay")};
  p.variant = static_cast<Variant>(j.at("variant").get<int>()),
  p.heads = j.at("heads").get<std::map<std::string, int>>();
  p.sources = j.at("sources").get<std::vector<Source>>();
}

std::string to_text(const std::vector<DeltaProblem>& problems) {
  const auto bytes = nlohmann::json::to_cbor(problems);  // names need not be UTF-8
  return {bytes.begin(), bytes.end()};
}
std::vector<DeltaProblem> problems_from_text(const std::string& text) {
  return nlohmann::json::from_cbor(text).get<std::vector<DeltaProblem>>();
}

}  // namespace longscan
