// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an input file holds for `longscan newton`: the sequences, and the cell.
#include <string>
#include <vector>

#include "apps/sources.hpp"
#include "longscan/newton.hpp"

namespace longscan {

/// Groups that are solved together, their tokens end to end on one axis.
struct NewtonProblem {
  bool batched = false;  ///< x is [B, T, D_in]
  bool packed = false;   ///< cu_seqlens are there
  int inputs = 0;        ///< D_in
  std::vector<Source> sources;
  /// Where h0 and c0 have their axes; by role.
  std::map<std::string, bool> layers_first;  ///< the first of two axes counts layers and directions

  DType type() const { return sources.front().data.at("x").type; }
  bool has(const std::string& role) const { return sources.front().data.count(role) > 0; }
  Sequences sequences() const { return sequences_of(sources); }
  std::int64_t tokens() const { return sequences().tokens(); }
  /// States have an axis for sequences.
  bool many() const { return batched || packed; }
};

/// The cell, as `--cell` says: FILE, FILE:/group or nothing (group /cell of the input).
struct CellSource {
  CellWeights weights;
  std::vector<DatasetInfo> datasets;
  DType widest = DType::f32;
  std::string where;  ///< "/cell of IN.h5", for messages
};
/// FILE[:/group] as --cell has it: the file (empty: the input) and the group. A colon that is part of an existing
/// file's name is not a separator.
std::pair<std::string, std::string> split_cell(const std::string& cell);
/// The cell that --cell names. Throws bad_input with all that is wrong with its datasets.
CellSource read_cell(const InputFile& input, const std::string& cell);
/// What its tensors make of it. Throws bad_input, naming where the cell is.
NetworkShape shape_of(const CellSource& cell);

/// Everything that `command` asks to solve. Throws bad_input with all that is wrong.
std::vector<NewtonProblem> find_newton_problems(const InputFile& file, const NewtonCommand& command,
                                                const NetworkShape& network);

/// The same, but adds what is wrong to `problems`; returns the groups that nothing is wrong with.
std::vector<NewtonProblem> find_newton_problems(const InputFile& file, const NewtonCommand& command,
                                                const NetworkShape& network, Problems& problems);

/// Arithmetic of a solve: f64 or f32.
Precision newton_arithmetic(Precision wanted, DType x, DType weights);

/// The slab of h0, c0, h_final or c_final that holds one sequence's layers, [layers, D]; with two axes `layers_first`
/// says which they are.
Slab state_slab(const std::vector<std::int64_t>& shape, bool layers_first, std::int64_t sequence);

std::string to_text(const std::vector<NewtonProblem>& problems);
std::vector<NewtonProblem> newton_problems_from_text(const std::string& text);
std::string to_text(const CellSource& cell);
CellSource cell_from_text(const std::string& text);

}  // namespace longscan
