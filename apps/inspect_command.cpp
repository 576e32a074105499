// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "apps/inspect.hpp"
#include "apps/progress.hpp"
#include "apps/report.hpp"

namespace longscan {
namespace {

using nlohmann::json;

/// What rank 0 finds in the file before any data is read.
struct Found {
  std::vector<DeltaProblem> delta;
  std::vector<NewtonProblem> newton;
  std::optional<CellSource> cell;
  Problems problems;
  std::vector<std::string> notes;
  json ignored = json::array();  ///< datasets that play no role
  std::string cell_option;       ///< --cell, where the default would not find it
  Layout layout = Layout::automatic;
};

std::string quoted(const std::string& word) {
  const auto safe = [](unsigned char c) { return std::isalnum(c) || c >= 0x80 || std::strchr("/._-+:=@%,^", c); };
  if (!word.empty() && std::all_of(word.begin(), word.end(), safe)) return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

bool is_cell(const InputFile& file, const std::string& group) {
  for (const DatasetInfo& d : file.datasets(group)) {
    const std::string name = d.path.substr(d.path.rfind('/') + 1);
    if (name == "weight_hh_l0" || name == "weight_ih_l0" || name == "weight_ih" || name == "recurrent") return true;
  }
  return false;
}

/// The groups whose datasets make one think that they are to be solved.
std::vector<std::string> candidates(const InputFile& file, const std::map<std::string, std::string>& names,
                                    const std::vector<std::string>& patterns, const std::vector<std::string>& roles) {
  std::vector<std::string> groups;
  std::vector<std::string> all = file.groups();
  if (!patterns.empty()) {
    all.clear();
    for (const std::string& p : patterns)
      for (const std::string& g : file.match_groups(p))
        if (std::find(all.begin(), all.end(), g) == all.end()) all.push_back(g);
  }
  Problems ignored;
  for (const std::string& group : all) {
    if (is_cell(file, group)) continue;
    const DatasetFinder find(file, names, group, ignored);
    if (std::any_of(roles.begin(), roles.end(), [&](const std::string& r) { return find.there(r); }))
      groups.push_back(group);
  }
  return groups;
}

/// As `--group` would name them: nothing for the root, a pattern where one does, else each.
std::string group_option(const InputFile& file, const std::vector<std::string>& groups) {
  if (groups.empty() || (groups.size() == 1 && groups.front() == "/")) return "";
  std::string prefix = groups.front();
  for (const std::string& g : groups) {
    std::size_t n = 0;
    while (n < std::min(prefix.size(), g.size()) && prefix[n] == g[n]) ++n;
    prefix.resize(n);
  }
  if (groups.size() > 2 && prefix.size() > 1 && file.match_groups(prefix + "*") == groups)
    return " --group " + quoted(prefix + "*");
  std::string text = " --group";
  for (const std::string& g : groups) text += " " + quoted(g);
  return text;
}

void find_delta(const InputFile& file, const InspectCommand& command, const std::vector<std::string>& groups,
                Found& found) {
  DeltaCommand c = command.delta;
  c.solve.groups = groups;
  Problems problems;
  found.delta = find_problems(file, c, problems);
  found.layout = c.solve.layout;
  if (!problems.empty() && c.solve.layout == Layout::automatic) {  // heads before tokens, perhaps
    DeltaCommand other = c;
    other.solve.layout = Layout::bhtd;
    Problems others;
    auto fits = find_problems(file, other, others);
    if (others.empty()) {
      found.delta = std::move(fits), found.layout = Layout::bhtd, problems.clear();
      found.notes.push_back("the shapes fit only with heads before tokens: --layout BHTD");
    }
  }
  found.problems.insert(found.problems.end(), problems.begin(), problems.end());
}

void find_newton(const InputFile& file, const InspectCommand& command, const std::vector<std::string>& groups,
                 Found& found) {
  NewtonCommand c = command.newton;
  c.solve.groups = groups;
  if (c.cell.empty()) {
    const auto all = file.groups();
    std::vector<std::string> cells;
    for (const std::string& g : all)
      if (is_cell(file, g)) cells.push_back(g);
    if (cells.size() == 1 && cells.front() != "/cell") c.cell = found.cell_option = file.path() + ":" + cells.front();
  } else {
    found.cell_option = c.cell;
  }
  try {
    found.cell = read_cell(file, c.cell);
    const NetworkShape network = shape_of(*found.cell);
    found.newton = find_newton_problems(file, c, network, found.problems);
  } catch (const Error& e) {
    if (e.code() != ExitCode::bad_input) throw;
    found.problems.emplace_back(e.what());
    found.cell.reset();
  }
}

/// What a reader may want to know about a dataset's place in the file.
void storage_notes(const Source& source, std::vector<std::string>& notes) {
  for (const auto& [role, info] : source.data) {
    if (info.filters.empty() || info.layout.rfind("chunked", 0) != 0 || role == "cu_seqlens") continue;
    double chunk = 1;
    for (std::size_t at = 8; at < info.layout.size(); at = info.layout.find('x', at) + 1) {
      chunk *= std::atof(info.layout.c_str() + at);
      if (info.layout.find('x', at) == std::string::npos) break;
    }
    if (chunk * static_cast<double>(size_of(info.type)) > (256 << 20))
      notes.push_back(
          "dataset '" + info.path + "' is compressed in chunks of " + info.layout.substr(8) +
          ": each rank that needs a part of one unpacks all of it; smaller chunks along tokens read faster");
  }
}

Found look(const InputFile& file, const InspectCommand& command) {
  Found found;
  const auto& patterns = command.delta.solve.groups;
  const auto delta = candidates(file, command.delta.names, patterns, {"q", "k", "v"});
  const auto newton = candidates(file, command.newton.names, patterns, {"x"});
  if (!delta.empty()) find_delta(file, command, delta, found);
  if (!newton.empty()) find_newton(file, command, newton, found);
  if (delta.empty() && newton.empty()) {
    std::string text = "no group holds what can be solved: q, k, v and beta (delta), or x and a cell (newton)";
    std::string there;
    for (const std::string& g : file.groups())
      for (const DatasetInfo& d : file.datasets(g))
        if (there.size() < 400) there += " " + d.path;
    found.problems.push_back(text + "; there are:" + (there.empty() ? " no datasets" : there));
  }
  std::vector<std::string> used;
  for (const DeltaProblem& p : found.delta)
    for (const Source& s : p.sources) {
      for (const auto& [role, info] : s.data) used.push_back(info.path);
      storage_notes(s, found.notes);
      if (p.layout == Layout::bthd && found.layout == Layout::automatic && s.tokens < p.shape.heads)
        found.notes.push_back("group '" + s.group + "' has more heads (" + std::to_string(p.shape.heads) +
                              ") than tokens (" + std::to_string(s.tokens) +
                              "): if it is [B, H, T, D], say --layout BHTD");
    }
  for (const NewtonProblem& p : found.newton)
    for (const Source& s : p.sources) {
      for (const auto& [role, info] : s.data) used.push_back(info.path);
      storage_notes(s, found.notes);
    }
  const auto groups_used = [&](const std::string& g) {
    return std::find(delta.begin(), delta.end(), g) != delta.end() ||
           std::find(newton.begin(), newton.end(), g) != newton.end();
  };
  for (const std::string& g : file.groups())
    if (groups_used(g))
      for (const DatasetInfo& d : file.datasets(g))
        if (found.problems.empty() && std::find(used.begin(), used.end(), d.path) == used.end())
          found.ignored.push_back(d.path);
  return found;
}

json describe_dataset(const std::string& role, const DatasetInfo& d) {
  const char* storages[] = {"float", "bfloat16 bits in uint16", "bfloat16 in opaque", "integer", "unusable"};
  json j = {{"role", role},
            {"path", d.path},
            {"shape", d.shape},
            {"type", d.storage == Storage::integer ? "integer" : std::string(name_of(d.type))},
            {"storage", storages[static_cast<int>(d.storage)]},
            {"layout", d.layout},
            {"filters", d.filters},
            {"foreign_byte_order", d.foreign_byte_order}};
  return j;
}

json describe_sources(const std::vector<Source>& sources) {
  json groups = json::array(), datasets = json::array();
  for (const Source& s : sources) groups.push_back(s.group);
  for (const auto& [role, info] : sources.front().data) datasets.push_back(describe_dataset(role, info));
  return {{"groups", groups}, {"datasets", datasets}};
}

std::string names_option(const std::map<std::string, std::string>& names, const std::vector<std::string>& roles) {
  std::string text;
  for (const auto& [role, name] : names)
    if (std::find(roles.begin(), roles.end(), role) != roles.end()) {
      std::string option = role;
      std::replace(option.begin(), option.end(), '_', '-');
      text += " --" + option + " " + quoted(name);
    }
  return text;
}

std::string delta_command_line(const InputFile& file, const InspectCommand& command, const Found& found,
                               const DeltaProblem& p) {
  const DeltaCommand& c = command.delta;
  std::vector<std::string> groups;
  for (const Source& s : p.sources) groups.push_back(s.group);
  std::string text = "longscan delta " + quoted(file.path()) + " -o OUT.h5" + group_option(file, groups);
  if (found.layout != Layout::automatic) text += " --layout " + name_of(found.layout);
  if (c.variant) text += " --variant " + std::string(name_of(*c.variant));
  if (c.erase == Erase::undecayed) text += " --erase undecayed";
  if (c.normalize_keys) text += " --normalize-keys";
  if (c.scale != "1") text += " --scale " + c.scale;
  if (c.chunk != DeltaCommand{}.chunk) text += " --chunk " + std::to_string(c.chunk);
  if (c.solve.precision != Precision::automatic) text += " --precision " + std::string(name_of(c.solve.precision));
  return text +
         names_option(c.names, {"q", "k", "v", "beta", "eta", "log_decay", "a", "b", "initial_state", "cu_seqlens"});
}

std::string newton_command_line(const InputFile& file, const InspectCommand& command, const Found& found,
                                const NewtonProblem& p) {
  std::vector<std::string> groups;
  for (const Source& s : p.sources) groups.push_back(s.group);
  std::string text = "longscan newton " + quoted(file.path()) + " -o OUT.h5" + group_option(file, groups);
  if (!found.cell_option.empty()) text += " --cell " + quoted(found.cell_option);
  if (command.newton.solve.precision != Precision::automatic)
    text += " --precision " + std::string(name_of(command.newton.solve.precision));
  return text + names_option(command.newton.names, {"x", "h0", "c0", "cu_seqlens"});
}

// --- text ---------------------------------------------------------------------------------------------------------

std::string number(const json& j) {
  if (j.is_null()) return "-";
  if (j.is_number_integer()) return std::to_string(j.get<std::int64_t>());
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", j.get<double>());
  return text;
}

void line(const char* what, const std::string& text) { std::printf("    %-22s %s\n", what, text.c_str()); }

std::string range_text(const json& r) {
  return number(r.at("min")) + " to " + number(r.at("max")) + ", mean " + number(r.at("mean"));
}

std::string share_text(const json& part, const json& all) {
  const double a = part.get<double>(), b = std::max(1.0, all.get<double>());
  char text[64];
  std::snprintf(text, sizeof text, "%s of %s (%.3g %%)", number(part).c_str(), number(all).c_str(), 100 * a / b);
  return text;
}

void print_datasets(const json& problem) {
  for (const json& d : problem.at("datasets")) {
    std::string text =
        shape_text(d.at("shape").get<std::vector<std::int64_t>>()) + " " + d.at("type").get<std::string>();
    if (d.at("storage") != "float" && d.at("storage") != "integer")
      text += " (" + d.at("storage").get<std::string>() + ")";
    if (d.at("foreign_byte_order")) text += ", other byte order";
    text += ", " + d.at("layout").get<std::string>();
    for (const json& f : d.at("filters")) text += ", " + f.get<std::string>();
    const std::string path = d.at("path"), role = d.at("role"), name = path.substr(path.rfind('/') + 1);
    std::printf("    %-16s %s\n", (name == role ? role : role + " = " + name).c_str(), text.c_str());
  }
}

void print_groups(const json& problem) {
  const json& groups = problem.at("groups");
  std::string text = groups.front();
  if (groups.size() > 1)
    text += (groups.size() > 2 ? " … " : " and ") + groups.back().get<std::string>() +
            (groups.size() > 2 ? " (" + std::to_string(groups.size()) + " groups alike)" : "");
  std::printf("%s: %s\n", text.c_str(), problem.at("what").get<std::string>().c_str());
}

void print_looked_at(const json& d) {
  const std::int64_t read = d.at("tokens_read"), all = d.at("tokens");
  std::printf("  difficulty (%s):\n", read >= all ? ("all " + std::to_string(all) + " tokens").c_str()
                                                  : (std::to_string(read) + " of " + std::to_string(all) +
                                                     " tokens, spread evenly; --all looks at every one")
                                                        .c_str());
}

void print_delta(const json& d) {
  print_looked_at(d);
  if (d.at("tokens_read") == 0) return;
  if (d.contains("key_norm")) {
    std::string text = range_text(d.at("key_norm"));
    if (d.at("zero_keys") > 0) text += "; " + number(d.at("zero_keys")) + " keys are zero";
    line("|k|", text);
    line("beta", range_text(d.at("beta")) +
                     (d.at("negative_beta") > 0 ? "; " + number(d.at("negative_beta")) + " below zero" : ""));
    if (d.contains("eta")) line("eta", range_text(d.at("eta")));
  }
  if (d.contains("decay")) {
    line("decay",
         range_text(d.at("decay")) + (d.at("forget_all") > 0 ? "; " + number(d.at("forget_all")) + " forget all" : ""));
    if (d.contains("half_life_tokens"))
      line("half-life by decay", number(d.at("half_life_tokens").at("shortest")) + " to " +
                                     number(d.at("half_life_tokens").at("longest")) + " tokens, by head");
  }
  if (d.contains("stability_breaches")) {
    const bool none = d.at("stability_breaches") == 0;
    line("stability", d.at("stability_bound").get<std::string>() +
                          (none ? " holds everywhere"
                                : " is broken by " + share_text(d.at("stability_breaches"), d.at("token_heads")) +
                                      " tokens and heads: states may grow; --normalize-keys may be what was meant"));
  }
  line("isolated tokens",
       share_text(d.at("isolated_tokens"), d.at("token_heads")) + " erase nothing (beta |k|^2 < 0.001)");
  line("|A| per chunk", "median " + number(d.at("norm_A").at("median")) + ", max " + number(d.at("norm_A").at("max")) +
                            " (bound, chunks of " + number(d.at("chunk")) + ")");
  const json& terms = d.at("neumann_terms");
  line("Neumann terms", "median " + number(terms.at("median")) + ", max " + number(terms.at("max")) + " for " +
                            d.at("arithmetic").get<std::string>() + "; " +
                            share_text(terms.at("chunks_by_forward"), terms.at("chunks")) +
                            " chunks and heads would go to forward substitution");
  const json& forget = d.at("forgetting");
  if (forget.is_null())
    line("forgetting", "too few tokens in a row to tell");
  else if (forget.at("tokens_to_rounding").is_null())
    line("forgetting",
         "head " + number(forget.at("slowest_head")) + " does not forget: ranks need maps of their whole parts");
  else
    line("forgetting", "a state is below rounding after about " + number(forget.at("tokens_to_rounding")) +
                           " tokens in the slowest head (" + number(forget.at("slowest_head")) + ")");
}

void print_newton(const json& d) {
  print_looked_at(d);
  if (!d.contains("auto")) return;
  const json& a = d.at("auto");
  if (a.at("status") == "non_finite") {
    line("states", "leave the range of the arithmetic at token " + number(a.at("first_bad_token")) + " of the sample");
    return;
  }
  const double lyapunov = d.at("lyapunov");
  line("Lyapunov exponent",
       number(d.at("lyapunov")) + (lyapunov < 0 ? " per token: errors shrink" : " per token: errors grow"));
  line("log-amplification", number(d.at("log_amplification")) + " at most, over consecutive tokens");
  line("auto", a.at("status").get<std::string>() + " by " + a.at("method_used").get<std::string>() + " in " +
                   number(a.at("passes")) + (a.at("passes") == 1 ? " pass" : " passes") +
                   (a.at("reason") == "" ? "" : " (" + a.at("reason").get<std::string>() + ")"));
  std::string text = "predicted by the log-amplification: " + d.at("newton_iterations_predicted").get<std::string>();
  if (text.back() >= '0' && text.back() <= '9') text += " iterations";
  if (d.contains("newton"))
    text += d.at("newton").at("iterations").is_null()
                ? "; tried on " + number(d.at("newton").at("tokens")) + " tokens: not within 30"
                : "; tried on " + number(d.at("newton").at("tokens")) +
                      " tokens: " + number(d.at("newton").at("iterations"));
  line("--method newton", text);
}

void print_influence(const json& j) {
  std::printf("chunk %s of group '%s': tokens %s to %lld, sequence %s; written to %s\n", number(j.at("chunk")).c_str(),
              j.at("group").get<std::string>().c_str(), number(j.at("first_token")).c_str(),
              static_cast<long long>(j.at("first_token").get<std::int64_t>() + j.at("tokens").get<std::int64_t>() - 1),
              number(j.at("sequence")).c_str(), j.at("file").get<std::string>().c_str());
  std::printf("  T = (I - A)^-1 of head %s by path length:\n    length  |A^n|       left of T after it\n",
              number(j.at("head")).c_str());
  std::size_t shown = 0;
  for (const json& p : j.at("paths"))
    if (++shown <= 12)
      std::printf("    %6s  %-10s  %.2e\n", number(p.at("length")).c_str(), number(p.at("norm")).c_str(),
                  p.at("left_after").get<double>());
  if (shown > 12) std::printf("    … up to %zu\n", shown);
  std::printf("  what most influences token %s (by %s):\n    token       T           output\n",
              number(j.at("token")).c_str(), j.at("ranked_by").get<std::string>().c_str());
  for (const json& p : j.at("most_influential"))
    std::printf("    %-10s  %-10s  %s\n", number(p.at("token")).c_str(), number(p.at("T")).c_str(),
                p.contains("output") ? number(p.at("output")).c_str() : "-");
}

void print_text(const json& report) {
  std::printf("%s\n", report.at("file").get<std::string>().c_str());
  for (const json& p : report.at("solvable")) {
    std::printf("\n");
    print_groups(p);
    print_datasets(p);
    if (p.contains("difficulty"))
      p.at("solver") == "delta" ? print_delta(p.at("difficulty")) : print_newton(p.at("difficulty"));
    std::printf("  run:  %s\n", p.at("command_line").get<std::string>().c_str());
  }
  if (!report.at("ignored").empty()) {
    std::string text;
    for (const json& d : report.at("ignored")) text += " " + d.get<std::string>();
    std::printf("\nignored:%s\n", text.c_str());
  }
  for (const json& n : report.at("notes")) std::printf("\nnote: %s\n", n.get<std::string>().c_str());
  if (report.contains("influence")) {
    std::printf("\n");
    print_influence(report.at("influence"));
  }
  std::fflush(stdout);
}

// --- over the ranks -------------------------------------------------------------------------------------------------

/// What `--influence` needs and the listing of what is there.
json delta_json(const InputFile& file, const InspectCommand& command, const Found& found, const DeltaProblem& p) {
  json j = describe_sources(p.sources);
  const Sequences sequences = p.sequences();
  const char* decay = !p.has("log_decay") ? "no decay" : p.shape.channel_decay ? "channel decay" : "head decay";
  const Precision arithmetic = arithmetic_of(command.delta.solve.precision, p.widest());
  j["solver"] = "delta", j["variant"] = std::string(name_of(p.variant)), j["layout"] = name_of(p.layout);
  j["tokens"] = p.tokens(), j["sequences"] = sequences.count(), j["packed"] = p.packed;
  j["heads"] = p.shape.heads, j["d_key"] = p.shape.d_key, j["d_value"] = p.shape.d_value;
  j["decay"] = decay, j["arithmetic"] = std::string(name_of(arithmetic));
  j["what"] = "delta rule (" + std::string(name_of(p.variant)) + ", " + decay + "), " + count_of(p.tokens(), "token") +
              " in " + count_of(sequences.count(), "sequence") + ", H = " + std::to_string(p.shape.heads) +
              ", K = " + std::to_string(p.shape.d_key) + ", V = " + std::to_string(p.shape.d_value) + ", " +
              std::string(name_of(arithmetic)) + " arithmetic";
  j["command_line"] = delta_command_line(file, command, found, p);
  return j;
}

json newton_json(const InputFile& file, const InspectCommand& command, const Found& found, const NewtonProblem& p) {
  const NetworkShape network = shape_of(*found.cell);
  json j = describe_sources(p.sources);
  const Sequences sequences = p.sequences();
  const Precision arithmetic = newton_arithmetic(command.newton.solve.precision, p.type(), found.cell->widest);
  j["solver"] = "newton", j["cell"] = network.type, j["cell_from"] = found.cell->where;
  j["tokens"] = p.tokens(), j["sequences"] = sequences.count(), j["packed"] = p.packed;
  j["inputs"] = network.inputs, j["channels"] = network.channels, j["layers"] = network.layers;
  j["directions"] = network.directions, j["arithmetic"] = std::string(name_of(arithmetic));
  j["what"] = network.type + (network.reason.empty() ? "" : " (" + network.reason + ")") + " of " + found.cell->where +
              ", D = " + std::to_string(network.channels) + ", D_in = " + std::to_string(network.inputs) +
              (network.layers > 1 ? ", " + std::to_string(network.layers) + " layers" : "") +
              (network.directions > 1 ? ", both directions" : "") + ", " + count_of(p.tokens(), "token") + " in " +
              count_of(sequences.count(), "sequence") + ", " + std::string(name_of(arithmetic)) + " arithmetic";
  j["command_line"] = newton_command_line(file, command, found, p);
  return j;
}

}  // namespace

void run_inspect(Transport& ranks, const InspectCommand& command) {
  std::optional<InputFile> file;
  std::string delta_text, newton_text, cell_text;  // rank 0's findings, for the others
  json report;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    file.emplace(command.input());
    const Found found = look(*file, command);
    report = {{"file", command.input()}, {"version", LONGSCAN_VERSION}, {"problems", found.problems},
              {"notes", found.notes},    {"ignored", found.ignored},    {"solvable", json::array()}};
    for (const DeltaProblem& p : found.delta) report["solvable"].push_back(delta_json(*file, command, found, p));
    for (const NewtonProblem& p : found.newton) report["solvable"].push_back(newton_json(*file, command, found, p));
    delta_text = to_text(found.delta), newton_text = to_text(found.newton);
    if (found.cell) cell_text = to_text(*found.cell);
  });
  const std::vector<DeltaProblem> delta = problems_from_text(broadcast(ranks, delta_text, 0));
  const std::vector<NewtonProblem> newton = newton_problems_from_text(broadcast(ranks, newton_text, 0));
  agree(ranks, [&] {
    if (!file) file.emplace(command.input());
  });

  Problems problems;
  std::vector<json> difficulties;
  const double share = 1.0 / std::max<double>(1, static_cast<double>(delta.size() + newton.size()));
  for (const DeltaProblem& p : delta)
    difficulties.push_back(delta_difficulty(ranks, *file, command, p, share, problems));
  if (!newton.empty()) {
    const CellSource cell = cell_from_text(broadcast(ranks, cell_text, 0));
    for (const NewtonProblem& p : newton)
      difficulties.push_back(newton_difficulty(ranks, *file, command, p, cell, share, problems));
  }

  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    for (std::size_t i = 0; i < difficulties.size(); ++i) report["solvable"][i]["difficulty"] = difficulties[i];
    for (const std::string& p : problems) report["problems"].push_back(p);
    if (command.influence >= 0) report["influence"] = write_influence(*file, command, delta);
    if (command.json) {
      std::printf("%s\n", printable(report).c_str());
      std::fflush(stdout);
    } else {
      print_text(report);
    }
    const json& wrong = report["problems"];
    if (wrong.empty()) return;
    std::string text =
        command.input() + ": " + (wrong.size() == 1 ? "" : std::to_string(wrong.size()) + " problems:\n  ");
    for (std::size_t i = 0; i < wrong.size(); ++i) text += (i ? "\n  " : "") + wrong[i].get<std::string>();
    throw Error(ExitCode::bad_input, text);
  });
}

}  // namespace longscan
