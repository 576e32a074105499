// SPDX-License-Identifier: Apache-2.0
#pragma once
// A solve that stopped between two windows, as a file.
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "longscan/sequence_file.hpp"

namespace longscan {

/// What it takes to go on. The file is
///
///     the line "longscan checkpoint 2"
///     bytes of the text that follows, as a decimal number and a line feed
///     the text: JSON of everything but `state`
///     `state`
///     16 hexadecimal digits: the hash of all before
///
/// written under another name, brought to disk and renamed, so that there is a whole one at any moment.
struct Checkpoint {
  std::string command;                         ///< "delta" or "newton"
  std::string fingerprint;                     ///< of the input (and the cell)
  std::vector<FileStamp> stamps;               ///< of the files that were read
  std::map<std::string, std::string> options;  ///< those that change the result
  Attributes attributes;                       ///< of the output, as it was created
  std::string mark;                            ///< of the partial output
  int ranks = 0;
  std::int64_t window = 0;       ///< tokens a rank, as it was chosen
  std::int64_t problem = 0;      ///< problems that are done
  std::int64_t token = 0;        ///< tokens of the next problem that are done
  nlohmann::json report;         ///< what the windows so far had to say
  std::vector<std::byte> state;  ///< the solver's, as `DeltaRule::state` and `Newton::state` give it
};

/// On one rank. Throws file_io if none could be written there: better now than when the first is due.
void check_checkpoint_path(const std::string& path);

/// On one rank. Throws file_io.
void write_checkpoint(const std::string& path, const Checkpoint& checkpoint);

/// On one rank. Removes it if it is there, and what a job that died while it wrote one left.
void remove_checkpoint(const std::string& path) noexcept;

/// On one rank. Throws file_io, or bad_input if it is damaged, cut short, of another version, or no checkpoint at all.
Checkpoint read_checkpoint(const std::string& path);

/// On one rank. Throws bad_input unless the file is a checkpoint, which may be damaged, or empty.
void check_is_checkpoint(const std::string& path);

/// Everything but the state, for the other ranks.
std::string to_text(const Checkpoint& checkpoint);
Checkpoint checkpoint_from_text(const std::string& text);

/// 16 hexadecimal digits that change when the text does.
std::string text_hash(const std::string& text);

/// Doubles as JSON that gives the same bits back, infinities and NaN too.
nlohmann::json exact(double value);
double exact(const nlohmann::json& value);

}  // namespace longscan
