// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of a delta problem, between files and memory.
#include <Kokkos_Core.hpp>

#include "apps/delta_problem.hpp"
#include "apps/output.hpp"

namespace longscan {

/// Memory for one window's part, in the file's types; read into, solved from, written from.
class DeltaPartBuffers {
 public:
  using Memory = Kokkos::DefaultExecutionSpace::memory_space;
  using Bytes = Kokkos::View<std::byte*, Memory>;

  DeltaPartBuffers(const DeltaProblem& problem, const DeltaCommand& command, Precision arithmetic, DType output_type);

  /// Bytes a token needs, and states a sequence.
  static std::int64_t bytes_per_token(const DeltaProblem& problem, const DeltaCommand& command, DType output_type);

  /// Read tokens [part.begin, part.end) of the axis and the states of the runs that start there; not collective.
  void read(const InputFile& file, TokenRange part, const std::vector<Run>& runs, std::int64_t states);
  /// NaN, infinities, positive log-decays: throws bad_input naming the first by dataset, token and head.
  void check(const std::string& file, TokenRange part) const;
  /// Write what `solve` left; not collective.
  void write(SharedOutput& out, TokenRange part, const std::vector<Run>& runs, std::int64_t states_before);

  const DeltaInputs& inputs() const { return inputs_; }
  const DeltaOutputs& outputs() const { return outputs_; }
  std::int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Array {
    Bytes device;
    Bytes::HostMirror host;
    std::int64_t heads = 1, width = 1;
    DType type = DType::f32;
  };
  void reserve(Array& array, std::int64_t bytes);
  void read_array(const InputFile& file, const std::string& role, TokenRange part);
  TokenArray view(const std::string& role, std::int64_t tokens) const;

  const DeltaProblem& problem_;
  const DeltaCommand& command_;
  DType state_type_;
  std::map<std::string, Array> arrays_;
  Array o_, initial_, final_, states_;
  DeltaInputs inputs_;
  DeltaOutputs outputs_;
  std::int64_t bytes_read_ = 0;
};

/// The datasets of an output.
std::vector<OutputDataset> delta_outputs(const std::vector<DeltaProblem>& problems, const DeltaCommand& command);
DType delta_output_type(const DeltaProblem& problem, const DeltaCommand& command);

}  // namespace longscan
