// SPDX-License-Identifier: Apache-2.0
#include "apps/output.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/posix_file.hpp"

namespace longscan {
namespace {

std::string to_text(const std::vector<OutputDataset>& datasets) {
  nlohmann::json j = nlohmann::json::array();
  for (const OutputDataset& d : datasets) j.push_back({d.path, d.shape, static_cast<int>(d.type), d.offset});
  const auto bytes = nlohmann::json::to_cbor(j);  // names need not be UTF-8
  return {bytes.begin(), bytes.end()};
}

std::vector<OutputDataset> from_text(const std::string& text) {
  std::vector<OutputDataset> datasets;
  for (const auto& j : nlohmann::json::from_cbor(text))
    datasets.push_back({j[0], j[1].get<std::vector<std::int64_t>>(), static_cast<DType>(j[2].get<int>()), j[3]});
  return datasets;
}

}  // namespace

void check_output_path(const std::string& path, const std::string& input, bool force) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (path.empty()) throw Error(ExitCode::usage, "the output's name is empty");
  if (!input.empty() && same_file(path, input))
    throw Error(ExitCode::usage, "the output " + path + " is the input; give another name");
  if (!input.empty() && same_file(OutputFile::temporary_name(path), input))
    throw Error(ExitCode::usage, "the temporary file of the output " + path + " is the input; give another name");
  if (!fs::exists(path, ignored)) return;
  if (fs::is_directory(path, ignored))
    throw Error(ExitCode::usage, "the output " + path + " is a directory; give a file name");
  if (!fs::is_regular_file(path, ignored))
    throw Error(ExitCode::usage, "the output " + path + " is not a regular file; give another name");
  if (!force) throw Error(ExitCode::usage, "the output " + path + " exists; --force replaces it");
}

namespace {
/// A file's name without links, if it can be told; it need not be there.
std::filesystem::path whole_name(const std::string& path) {
  std::error_code failed;
  return std::filesystem::weakly_canonical(path, failed);
}
}  // namespace

bool same_file(const std::string& a, const std::string& b) {
  std::error_code failed;
  if (a == b || std::filesystem::equivalent(a, b, failed)) return true;
  const auto whole = whole_name(a);
  return !whole.empty() && whole == whole_name(b);
}

void check_folder_of(const std::string& path, const std::string& what) {
  const std::string folder = io::folder_of(path), text = "cannot write the " + what + " " + path + ": ";
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    throw Error(ExitCode::file_io, text + "there is no directory '" + folder + "'");
  if (access(folder.c_str(), W_OK) != 0)
    throw Error(ExitCode::file_io, text + "directory '" + folder + "': " + std::strerror(errno));
}

void check_files(const SolveOptions& o, const std::string& cell_file) {
  struct Named {
    std::string path, name;
    std::filesystem::path whole = whole_name(path);
    bool is(const Named& other) const {
      std::error_code failed;
      return path == other.path || std::filesystem::equivalent(path, other.path, failed) ||
             (!whole.empty() && whole == other.whole);
    }
  };
  const std::vector<Named> read = {{o.input, "input"}, {cell_file, "cell's file"}};
  std::vector<Named> written;
  const auto writes = [&](const std::string& path, const std::string& name) {
    if (path.empty()) return;
    written.push_back({path, name});
    written.push_back({path + ".part", "temporary file of the " + name});
  };
  writes(o.output, "output"), writes(checkpoint_path(o), "checkpoint"), writes(o.report, "report");
  for (std::size_t i = 0; i < written.size(); ++i) {
    std::vector<Named> others = read;
    others.insert(others.end(), written.begin(), written.begin() + static_cast<std::ptrdiff_t>(i));
    for (const Named& other : others)
      if (!other.path.empty() && written[i].is(other))
        throw Error(ExitCode::usage,
                    "the " + written[i].name + " " + written[i].path + " is the " + other.name + "; give another name");
  }
  if (o.report.empty()) return;
  std::error_code ignored;
  if (std::filesystem::is_directory(o.report, ignored))
    throw Error(ExitCode::usage, "the report " + o.report + " is a directory; give a file name");
  if (!std::filesystem::exists(o.report, ignored) || std::filesystem::is_regular_file(o.report, ignored))
    check_folder_of(o.report, "report");
}

std::string checkpoint_path(const SolveOptions& o) {
  return o.checkpoint.empty() ? o.output + ".checkpoint" : o.checkpoint;
}

Error overflow_of_output(const std::string& dataset, DType type, DType computed, const std::string& where) {
  return {ExitCode::numerical, "the output '" + dataset + "' overflows its type " + std::string(name_of(type)) +
                                   " in " + where + "; use --output-dtype " + std::string(name_of(computed))};
}

SharedOutput::SharedOutput(Transport& ranks, const std::string& path, const std::string& input, bool force,
                           const std::vector<OutputDataset>& datasets, const Attributes& attributes,
                           const std::string& mark)
    : ranks_(ranks) {
  std::string layout;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    check_output_path(path, input, force);
    file_ = mark.empty() ? OutputFile::create(path, datasets, attributes)
                         : OutputFile::reopen(path, datasets, attributes, mark);
    layout = to_text(file_->datasets());
  });
  layout = broadcast(ranks, layout, 0);
  agree(ranks, [&] {
    if (ranks.rank() != 0) file_ = OutputFile::join(path, from_text(layout));
  });
  std::int64_t shared = !file_->is_of_one_node();
  ranks.all_reduce(&shared, 1, Transport::Reduction::max);
  of_one_node_ = shared == 0;
}

void SharedOutput::write(const std::string& dataset, const Slab& slab, const void* data) {
  const OutputDataset& d = file_->dataset(dataset);
  std::int64_t elements = 1;
  for (std::int64_t n : slab.count) elements *= n;
  if (elements == 0) return;
  file_->write(d, slab, data);
  bytes_ += elements * static_cast<std::int64_t>(size_of(d.type));
}

void SharedOutput::sync() {
  agree(ranks_, [&] { file_->sync(); });
}

void SharedOutput::keep() {
  if (ranks_.rank() == 0) file_->keep();
}

void SharedOutput::add(const Attributes& attributes) {
  agree(ranks_, [&] {
    if (ranks_.rank() == 0) file_->add(attributes);
  });
}

void SharedOutput::commit() {
  if (!of_one_node_) sync();  // else what rank 0 brings to disk is what all have written
  agree(ranks_, [&] {
    if (ranks_.rank() == 0) file_->commit();
  });
}

}  // namespace longscan
