// SPDX-License-Identifier: Apache-2.0
#pragma once
// An output that all ranks write together.
#include "apps/options.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

/// A value of `dataset`, finite as it was computed in `computed`, is not in its narrower `type`; `where` says which.
Error overflow_of_output(const std::string& dataset, DType type, DType computed, const std::string& where);

/// Created by rank 0 under its temporary name, joined by the others, renamed when every rank is done. If it goes out of
/// scope before that, rank 0 removes the temporary file unless it is to be kept.
class SharedOutput {
 public:
  /// Collective. Refuses an existing `path` unless `force` (usage), and `path` = `input`. With a `mark` it continues
  /// the temporary file that has it.
  SharedOutput(Transport& ranks, const std::string& path, const std::string& input, bool force,
               const std::vector<OutputDataset>& datasets, const Attributes& attributes, const std::string& mark = "");
  SharedOutput(const SharedOutput&) = delete;
  SharedOutput& operator=(const SharedOutput&) = delete;

  /// Not collective.
  void write(const std::string& dataset, const Slab& slab, const void* data);
  /// Collective. What was written so far is on disk.
  void sync();
  /// Not collective. The temporary file stays there whatever happens, until `commit`.
  void keep();
  /// On rank 0: the mark of the temporary file.
  std::string mark() const { return file_->mark(); }
  /// Collective. Attributes of the committed file; others may write meanwhile.
  void add(const Attributes& attributes);
  /// Collective.
  void commit();
  std::int64_t bytes_written() const { return bytes_; }

 private:
  Transport& ranks_;
  std::optional<OutputFile> file_;
  std::int64_t bytes_ = 0;
  bool of_one_node_ = false;  ///< for every rank
};

/// Throws usage errors about an output that is there already, is the input, or is no regular file; not collective.
void check_output_path(const std::string& path, const std::string& input, bool force);
/// Before anything is computed: throws if a file that the solve writes, its temporary name included, is one that it
/// reads or another that it writes (usage), or if the report's directory cannot be written (file_io). Not collective.
void check_files(const SolveOptions& options, const std::string& cell_file = "");
/// What --checkpoint names, or OUT.checkpoint.
std::string checkpoint_path(const SolveOptions& options);
/// Throws Error(file_io) unless files can be made in the directory of `path`; `what` it is to be.
void check_folder_of(const std::string& path, const std::string& what);
/// Whether two names are, or would be, the same file.
bool same_file(const std::string& a, const std::string& b);

}  // namespace longscan
