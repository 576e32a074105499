// SPDX-License-Identifier: Apache-2.0
#pragma once
// An output that all ranks write together.
#include "apps/options.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

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
  /// Collective.
  void commit(const Attributes& attributes = {});
  std::int64_t bytes_written() const { return bytes_; }

 private:
  Transport& ranks_;
  std::optional<OutputFile> file_;
  std::int64_t bytes_ = 0;
};

/// Throws usage errors about an output that is there already or is the input; not collective.
void check_output_path(const std::string& path, const std::string& input, bool force);

}  // namespace longscan
