// SPDX-License-Identifier: Apache-2.0
#include "apps/delta_problem.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace longscan {
namespace {

using Problems = std::vector<std::string>;

const std::vector<std::string> array_roles = {"q", "k", "v", "beta", "eta", "log_decay", "a", "b"};

std::string join(const std::string& group, const std::string& name) {
  return group == "/" ? "/" + name : group + "/" + name;
}

std::string dataset_name(const DeltaCommand& command, const std::string& role) {
  const auto it = command.names.find(role);
  return it == command.names.end() ? role : it->second;
}

/// The floating and integer datasets of a group by role; problems for those missing or unreadable.
class Finder {
 public:
  Finder(const InputFile& file, const DeltaCommand& command, const std::string& group, Problems& problems)
      : file_(file), command_(command), group_(group), problems_(problems) {
    for (const DatasetInfo& d : file.datasets(group)) names_.push_back(d.path.substr(d.path.rfind('/') + 1));
  }

  bool there(const std::string& role) const {
    return std::find(names_.begin(), names_.end(), dataset_name(command_, role)) != names_.end();
  }

  void take(const std::string& role, bool required, DeltaSource& source) {
    const std::string name = dataset_name(command_, role);
    if (!there(role)) {
      if (required || command_.names.count(role)) missing(role, name);
      return;
    }
    DatasetInfo info = *file_.find(join(group_, name));
    if (role == "cu_seqlens") {  // the one dataset of integers
      if (info.storage == Storage::integer)
        source.data[role] = std::move(info);
      else
        problems_.push_back("dataset '" + info.path + "' must hold integers, the offsets of the sequences");
    } else if (!info.usable()) {
      problems_.push_back(info.problem);
    } else {
      source.data[role] = std::move(info);
    }
  }

 private:
  void missing(const std::string& role, const std::string& name) {
    std::string text = "no dataset '" + name + "' in group '" + group_ + "'";
    const std::string near = nearest(name, names_);
    if (!near.empty()) text += "; did you mean '" + near + "' (--" + role + " " + near + ")?";
    text += " There are:";
    for (const std::string& n : names_) text += " " + n;
    if (names_.empty()) text += " none";
    problems_.push_back(text);
  }

  const InputFile& file_;
  const DeltaCommand& command_;
  std::string group_;
  Problems& problems_;
  std::vector<std::string> names_;
};

/// Checks shapes against each other and fills in what they say.
class Fitter {
 public:
  Fitter(DeltaProblem& problem, DeltaSource& source, Problems& problems)
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
    problem_.shape.heads = static_cast<int>(v.shape[at_.head]);
    problem_.shape.d_value = static_cast<int>(v.shape[at_.width]);
    if (problem_.shape.heads < 1 || problem_.shape.d_value < 1) return fail(v, "has no heads or no width");
    const std::size_t before = problems_.size();
    wide("k", 0);
    if (problems_.size() == before) problem_.shape.d_key = static_cast<int>(source_.data.at("k").shape[at_.width]);
    if (problem_.shape.d_key < 1) return fail(source_.data.at("k"), "has keys of no width");
    for (const char* role : {"q", "a", "b"})
      if (source_.data.count(role)) wide(role, problem_.shape.d_key);
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

  void sequences(const InputFile& file) {
    const std::int64_t tokens = source_.axis_tokens();
    if (source_.data.count("cu_seqlens")) {
      problem_.packed = true;
      const DatasetInfo& info = source_.data.at("cu_seqlens");
      source_.offsets = file.read_integers(info);
      if (source_.batch != 1) {
        fail(info,
             "packs sequences, but there is a batch of " + std::to_string(source_.batch) + "; use one or the other");
        return;
      }
      if (info.shape.size() != 1 || source_.offsets.empty() || source_.offsets.front() != 0) {
        fail(info, "must be one axis of offsets that starts with 0");
        return;
      }
      for (std::size_t i = 1; i < source_.offsets.size(); ++i)
        if (source_.offsets[i] < source_.offsets[i - 1]) {
          fail(info, "decreases at entry " + std::to_string(i) + ": " + std::to_string(source_.offsets[i]) + " after " +
                         std::to_string(source_.offsets[i - 1]));
          return;
        }
      if (source_.offsets.back() != tokens)
        fail(info, "ends at " + std::to_string(source_.offsets.back()) + ", but there are " + std::to_string(tokens) +
                       " tokens");
    } else {
      for (std::int64_t i = 0; i <= source_.batch; ++i) source_.offsets.push_back(i * source_.tokens);
    }
    if (!source_.data.count("initial_state")) return;
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
      fail(info, "has shape " + shape_text(info.shape) + "; one value a token and head is needed, " +
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
  DeltaSource& source_;
  Problems& problems_;
  Axes at_{};
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

bool looks_solvable(const InputFile& file, const DeltaCommand& command, const std::string& group) {
  for (const char* role : {"q", "k", "v"})
    if (file.find(join(group, dataset_name(command, role)))) return true;
  return false;
}

DeltaProblem one_problem(const InputFile& file, const DeltaCommand& command, const std::string& group,
                         Problems& problems) {
  DeltaProblem problem;
  problem.sources.emplace_back();
  DeltaSource& source = problem.sources.front();
  source.group = group;
  Finder find(file, command, group, problems);
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
  if (problems.size() != before) return problem;
  Fitter fitter(problem, source, problems);
  if (fitter.fit(command.solve.layout)) fitter.sequences(file);
  return problem;
}

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Axes axes_of(Layout layout) {
  return layout == Layout::bthd ? Axes{0, 1, 2, 3} : layout == Layout::bhtd ? Axes{0, 2, 1, 3} : Axes{-1, 0, 1, 2};
}

DType DeltaProblem::widest() const {
  DType widest = type("v");
  for (const char* role : {"q", "k", "a", "b"})
    if (has(role) && significand_bits(type(role)) > significand_bits(widest)) widest = type(role);
  return widest;
}

Sequences DeltaProblem::sequences() const {
  Sequences all;
  for (const DeltaSource& source : sources) {
    const std::int64_t base = all.offsets.back();
    for (std::size_t i = 1; i < source.offsets.size(); ++i) all.offsets.push_back(base + source.offsets[i]);
  }
  return all;
}

Sequences DeltaProblem::counting() const {
  if (!packed) return sequences();
  Sequences all;
  for (const DeltaSource& source : sources) all.offsets.push_back(all.offsets.back() + source.axis_tokens());
  return all;
}

std::int64_t DeltaProblem::tokens() const {
  std::int64_t sum = 0;
  for (const DeltaSource& source : sources) sum += source.axis_tokens();
  return sum;
}

TokenPlace place_of(const DeltaProblem& problem, std::int64_t token) {
  TokenPlace place;
  while (place.source + 1 < problem.sources.size() && token >= problem.sources[place.source].axis_tokens())
    token -= problem.sources[place.source++].axis_tokens();
  const std::int64_t tokens = std::max<std::int64_t>(1, problem.sources[place.source].tokens);
  place.batch = token / tokens, place.token = token % tokens;
  return place;
}

std::string describe_place(const DeltaProblem& problem, const std::string& file, const std::string& role,
                           std::int64_t token, int head) {
  const TokenPlace place = place_of(problem, token);
  const DeltaSource& source = problem.sources[place.source];
  std::string text = role.empty() ? "group '" + source.group + "'" : "dataset '" + source.data.at(role).path + "'";
  text += " of " + file + " at token " + std::to_string(place.token) + ", head " + std::to_string(head);
  if (problem.layout != Layout::thd) text += ", batch entry " + std::to_string(place.batch);
  if (problem.packed) {
    const auto next = std::upper_bound(source.offsets.begin(), source.offsets.end(), place.token);
    text += " (sequence " + std::to_string(next - source.offsets.begin() - 1) + ")";
  }
  return text;
}

std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command) {
  std::vector<std::string> groups;
  Problems problems;
  for (const std::string& pattern : command.solve.groups) {
    const bool wild = pattern.find_first_of("*?[") != std::string::npos;
    bool any = false;
    for (const std::string& group : file.match_groups(pattern)) {
      if (wild && !looks_solvable(file, command, group)) continue;
      any = true;
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
    if (any) continue;
    std::string text = "--group " + pattern + " matches no group with the datasets q, k, v";
    const std::string near = nearest(pattern, file.groups());
    if (!near.empty() && near != pattern) text += "; did you mean '" + near + "'?";
    problems.push_back(text);
  }
  if (command.solve.groups.empty()) groups.push_back("/");

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
  if (!problems.empty()) {
    std::string text = file.path() + ": " + problems.front();
    for (std::size_t i = 1; i < std::min<std::size_t>(problems.size(), 8); ++i) text += "\n  " + problems[i];
    if (problems.size() > 8) text += "\n  and " + std::to_string(problems.size() - 8) + " more";
    throw Error(ExitCode::bad_input, text);
  }
  return found;
}

// --- the same, as text, for the other ranks
// ---------------------------------------------------------------------------

static void to_json(nlohmann::json& j, const DatasetInfo& d) {
  j = {{"path", d.path},
       {"shape", d.shape},
       {"storage", static_cast<int>(d.storage)},
       {"type", static_cast<int>(d.type)},
       {"foreign", d.foreign_byte_order},
       {"layout", d.layout},
       {"filters", d.filters},
       {"problem", d.problem}};
}
static void from_json(const nlohmann::json& j, DatasetInfo& d) {
  d.path = j.at("path"), d.shape = j.at("shape").get<std::vector<std::int64_t>>();
  d.storage = static_cast<Storage>(j.at("storage").get<int>()), d.type = static_cast<DType>(j.at("type").get<int>());
  d.foreign_byte_order = j.at("foreign"), d.layout = j.at("layout");
  d.filters = j.at("filters").get<std::vector<std::string>>(), d.problem = j.at("problem");
}
static void to_json(nlohmann::json& j, const DeltaSource& s) {
  j = {{"group", s.group}, {"data", s.data}, {"batch", s.batch}, {"tokens", s.tokens}, {"offsets", s.offsets}};
}
static void from_json(const nlohmann::json& j, DeltaSource& s) {
  s.group = j.at("group"), s.data = j.at("data").get<std::map<std::string, DatasetInfo>>();
  s.batch = j.at("batch"), s.tokens = j.at("tokens"), s.offsets = j.at("offsets").get<std::vector<std::int64_t>>();
}
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
  p.sources = j.at("sources").get<std::vector<DeltaSource>>();
}

std::string to_text(const std::vector<DeltaProblem>& problems) { return nlohmann::json(problems).dump(); }
std::vector<DeltaProblem> problems_from_text(const std::string& text) {
  return nlohmann::json::parse(text).get<std::vector<DeltaProblem>>();
}

}  // namespace longscan
