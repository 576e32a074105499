// SPDX-License-Identifier: Apache-2.0
#include "apps/sources.hpp"

#include <algorithm>
#include <cstdio>

namespace longscan {
namespace {

constexpr const char* all_roles[] = {"q", "k", "v",  "beta", "eta",           "log_decay", "a",
                                     "b", "x", "h0", "c0",   "initial_state", "cu_seqlens"};

std::vector<DatasetInfo> datasets_of(const std::vector<const Source*>& sources) {
  std::vector<DatasetInfo> datasets;
  for (const Source* source : sources)
    for (const auto& [role, info] : source->data) datasets.push_back(info);
  return datasets;
}

}  // namespace

void throw_problems(const std::string& file, const Problems& problems) {
  if (problems.empty()) return;
  constexpr std::size_t most = 8;
  std::string text = file + ": " + problems.front();
  for (std::size_t i = 1; i < std::min(problems.size(), most); ++i) text += "\n  " + problems[i];
  if (problems.size() > most) text += "\n  and " + std::to_string(problems.size() - most) + " more";
  throw Error(ExitCode::bad_input, text);
}

std::string dataset_path(const std::string& group, const std::string& name) {
  return group == "/" ? "/" + name : group + "/" + name;
}

DatasetFinder::DatasetFinder(const InputFile& file, const std::map<std::string, std::string>& names,
                             const std::string& group, Problems& problems)
    : file_(file), given_(names), group_(group), problems_(problems) {
  for (const DatasetInfo& d : file.datasets(group)) there_.push_back(d.path.substr(d.path.rfind('/') + 1));
}

std::string DatasetFinder::name(const std::string& role) const {
  const auto it = given_.find(role);
  return it == given_.end() ? role : it->second;
}

bool DatasetFinder::there(const std::string& role) const {
  return std::find(there_.begin(), there_.end(), name(role)) != there_.end();
}

void DatasetFinder::take(const std::string& role, bool required, Source& source) {
  if (!there(role)) {
    if (!required && !given_.count(role)) return;
    std::string text = "no dataset '" + name(role) + "' in group '" + group_ + "'";
    std::vector<std::string> free;  // a dataset that has a role of its own is not what a missing one should be
    for (const std::string& n : there_)
      if (given_.count(role) || std::find(std::begin(all_roles), std::end(all_roles), n) == std::end(all_roles))
        free.push_back(n);
    const std::string near = nearest(name(role), free);
    if (!near.empty()) text += "; did you mean '" + near + "' (--" + role + " " + near + ")?";
    text += near.empty() ? ". There are:" : " There are:";
    for (const std::string& n : there_) text += " " + n;
    problems_.push_back(text + (there_.empty() ? " none" : ""));
    return;
  }
  DatasetInfo info = *file_.find(dataset_path(group_, name(role)));
  if (role == "cu_seqlens") {
    if (info.storage == Storage::integer)
      source.data[role] = std::move(info);
    else
      problems_.push_back(info.storage == Storage::unusable
                              ? info.problem
                              : "dataset '" + info.path + "' must hold integers, the offsets of the sequences");
  } else if (!info.usable()) {
    problems_.push_back(info.problem);
  } else {
    source.data[role] = std::move(info);
  }
}

std::vector<std::string> select_groups(const InputFile& file, const std::vector<std::string>& patterns,
                                       const std::function<bool(const std::string&)>& solvable,
                                       const std::string& needed, Problems& problems) {
  if (patterns.empty()) {
    if (solvable("/")) return {"/"};
    std::vector<std::string> others = file.groups();
    std::erase_if(others, [&](const std::string& group) { return !solvable(group); });
    if (others.empty()) return {"/"};  // what it lacks is said of each dataset
    problems.push_back("group '/' does not hold " + needed + ", but " +
                       (others.size() == 1 ? "group '" + others.front() + "' does: --group '" + others.front() + "'"
                                           : std::to_string(others.size()) + " groups do, '" + others.front() +
                                                 "' to '" + others.back() + "': name them with --group"));
    return {};
  }
  std::vector<std::string> groups;
  for (const std::string& pattern : patterns) {
    const bool wild = pattern.find_first_of("*?[") != std::string::npos;
    bool any = false;
    for (const std::string& group : file.match_groups(pattern)) {
      if (wild && !solvable(group)) continue;
      any = true;
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
    if (any) continue;
    std::string text = "--group " + pattern + " matches no group with " + needed;
    const std::string near = nearest(pattern, file.groups());
    if (!near.empty() && near != pattern) text += "; did you mean '" + near + "'?";
    problems.push_back(text);
  }
  return groups;
}

void set_offsets(const InputFile& file, Source& source, Problems& problems) {
  source.offsets.clear();
  if (!source.data.count("cu_seqlens")) {
    for (std::int64_t i = 0; i <= source.batch; ++i) source.offsets.push_back(i * source.tokens);
    return;
  }
  const DatasetInfo& info = source.data.at("cu_seqlens");
  const auto fail = [&](const std::string& text) { problems.push_back("dataset '" + info.path + "' " + text); };
  source.offsets = file.read_integers(info);
  const auto& at = source.offsets;
  if (source.batch != 1)
    return fail("packs sequences, but there is a batch of " + std::to_string(source.batch) + "; use one or the other");
  if (info.shape.size() != 1 || at.empty() || at.front() != 0)
    return fail("must be one axis of offsets that starts with 0");
  for (std::size_t i = 1; i < at.size(); ++i)
    if (at[i] < at[i - 1])
      return fail("decreases at entry " + std::to_string(i) + ": " + std::to_string(at[i]) + " after " +
                  std::to_string(at[i - 1]));
  if (at.back() != source.tokens)
    fail("ends at " + std::to_string(at.back()) + ", but there are " + std::to_string(source.tokens) + " tokens");
}

Sequences sequences_of(const std::vector<Source>& sources) {
  Sequences all;
  for (const Source& source : sources) {
    const std::int64_t base = all.offsets.back();
    for (std::size_t i = 1; i < source.offsets.size(); ++i) all.offsets.push_back(base + source.offsets[i]);
  }
  return all;
}

TokenPlace place_of(const std::vector<Source>& sources, std::int64_t token) {
  TokenPlace place;
  while (place.source + 1 < sources.size() && token >= sources[place.source].axis_tokens())
    token -= sources[place.source++].axis_tokens();
  const std::int64_t tokens = std::max<std::int64_t>(1, sources[place.source].tokens);
  place.batch = token / tokens, place.token = token % tokens;
  return place;
}

std::pair<std::size_t, std::int64_t> source_of_sequence(const std::vector<Source>& sources, std::int64_t sequence) {
  std::size_t source = 0;
  while (sequence >= sources[source].sequences()) sequence -= sources[source++].sequences();
  return {source, sequence};
}

std::string describe_token(const std::vector<Source>& sources, const std::string& file, const std::string& role,
                           std::int64_t token) {
  const TokenPlace place = place_of(sources, token);
  const Source& source = sources[place.source];
  std::string text = role.empty() ? "group '" + source.group + "'" : "dataset '" + source.data.at(role).path + "'";
  text += " of " + file + " at token " + std::to_string(place.token);
  if (source.batch > 1) text += " of batch entry " + std::to_string(place.batch);
  if (source.data.count("cu_seqlens")) {
    const auto next = std::upper_bound(source.offsets.begin(), source.offsets.end(), place.token);
    text += " (sequence " + std::to_string(next - source.offsets.begin() - 1) + ")";
  }
  return text;
}

std::string fingerprint_text(const InputFile& file, const std::vector<const Source*>& sources,
                             const std::vector<DatasetInfo>& others) {
  std::vector<DatasetInfo> datasets = others;
  for (const DatasetInfo& info : datasets_of(sources)) datasets.push_back(info);
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(file.fingerprint(datasets)));
  return text;
}

std::vector<FileStamp> stamps_of(const InputFile& file, const std::vector<const Source*>& sources) {
  return file.stamps(datasets_of(sources));
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void to_json(nlohmann::json& j, const DatasetInfo& d) {
  j = {{"path", d.path},
       {"shape", d.shape},
       {"storage", static_cast<int>(d.storage)},
       {"type", static_cast<int>(d.type)},
       {"foreign", d.foreign_byte_order},
       {"layout", d.layout},
       {"filters", d.filters},
       {"problem", d.problem}};
}
void from_json(const nlohmann::json& j, DatasetInfo& d) {
  d.path = j.at("path"), d.shape = j.at("shape").get<std::vector<std::int64_t>>();
  d.storage = static_cast<Storage>(j.at("storage").get<int>()), d.type = static_cast<DType>(j.at("type").get<int>());
  d.foreign_byte_order = j.at("foreign"), d.layout = j.at("layout");
  d.filters = j.at("filters").get<std::vector<std::string>>(), d.problem = j.at("problem");
}
void to_json(nlohmann::json& j, const Source& s) {
  j = {{"group", s.group}, {"data", s.data}, {"batch", s.batch}, {"tokens", s.tokens}, {"offsets", s.offsets}};
}
void from_json(const nlohmann::json& j, Source& s) {
  s.group = j.at("group"), s.data = j.at("data").get<std::map<std::string, DatasetInfo>>();
  s.batch = j.at("batch"), s.tokens = j.at("tokens"), s.offsets = j.at("offsets").get<std::vector<std::int64_t>>();
}

}  // namespace longscan
