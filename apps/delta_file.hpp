// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of a delta problem, between files and memory.
#include <functional>
#include <optional>

#include "apps/delta_problem.hpp"
#include "apps/output.hpp"
#include "apps/pipeline.hpp"
#include "apps/staging.hpp"

namespace longscan {

/// Memory for windows' parts, in the file's types: two slots on the host that are read into and written from, and what
/// the kernels work on. A slot is read and written on threads of their own.
class DeltaPartBuffers {
 public:
  DeltaPartBuffers(const DeltaProblem& problem, const DeltaCommand& command, Precision arithmetic, DType output_type);

  /// Bytes a token needs: of inputs and outputs together.
  static std::int64_t bytes_per_token(const DeltaProblem& problem, const DeltaCommand& command, DType output_type);

  /// Inputs of `tokens` tokens as a solve is given them: `memory` is that of a role.
  DeltaInputs inputs_in(std::int64_t tokens, const std::function<const void*(const std::string&)>& memory) const;
  /// The same of o; none with --state-only.
  MutableTokenArray output_in(std::int64_t tokens, void* memory) const;

  /// Memory to read tokens `part` of the axis, whose runs these are; `states_before` and `states_after`: recorded
  /// states before its ends. Arrays that the kernels can have where they are in the file take none.
  void prepare(int slot, const InputFile& file, TokenRange part, std::vector<Run> runs, std::int64_t states_before,
               std::int64_t states_after);
  /// The slot's tokens, and the states of the runs that start there. NaN, infinities, positive log-decays: throws
  /// bad_input naming the first by dataset, token and head, here where kernels run on the host, else in `check`.
  void read(int slot, const InputFile& file);
  /// Brings the slot to the device, looks at it there; memory for its output.
  void check(int slot);
  /// What `solve` left, from the device into the slot. Throws numerical, naming token, head and channel, where the
  /// output's type does not hold what was computed.
  void fetch(int slot);
  /// What is left of the slot's output.
  void write(int slot, SharedOutput& out) const;
  /// Has `now` begin a job that writes o of the slot that was checked last, as far as it is there, whenever the solve
  /// says so.
  void write_when_ready(int slot, SharedOutput& out, WindowStages::Writing now);

  /// Of the slot that was checked last.
  const DeltaInputs& inputs() const { return inputs_; }
  const DeltaOutputs& outputs() const { return outputs_; }
  std::int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Role {
    std::int64_t heads = 1, width = 1;
    DType type = DType::f32;
    DeviceArea device;
    std::int64_t token_bytes() const { return heads * width * static_cast<std::int64_t>(size_of(type)); }
  };
  struct Place {
    TokenRange part;
    std::vector<Run> runs;
    std::int64_t states_before = 0, states = 0, starts = 0, ends = 0;
    std::int64_t written = 0;  ///< tokens whose o is handed to the writer
  };
  /// While the input of a window is read, the output of the window before the one at hand is written.
  struct Slot {
    Place in, out;
    std::map<std::string, HostBytes> arrays;
    std::map<std::string, MappedSlab> mapped;  ///< instead of those arrays
    HostBytes initial, o, final, recorded;
    const std::byte* input(const std::string& name) const;
  };
  std::optional<MappedSlab> map_array(TokenRange part, const InputFile& file, const std::string& name,
                                      const Role& role) const;
  void read_array(Slot& slot, const InputFile& file, const std::string& name, const Role& role);
  void read_initial(Slot& slot, const InputFile& file);
  /// Throws where a value of the slot's input, which is in `memory` by role, is one that cannot be solved.
  void look(const Slot& slot, const std::map<std::string, const void*>& memory) const;
  TokenArray view(const std::string& name, std::int64_t tokens, const void* data) const;
  void write_outputs(const Slot& slot, SharedOutput& out, std::int64_t from, std::int64_t to) const;
  void check_output(TokenRange part) const;
  std::int64_t state_bytes() const;

  const DeltaProblem& problem_;
  const DeltaCommand& command_;
  DType state_type_;
  std::map<std::string, Role> roles_;
  Role o_;
  DeviceArea initial_, final_, recorded_;
  Slot slots_[2];
  DeltaInputs inputs_;
  DeltaOutputs outputs_;
  std::int64_t bytes_read_ = 0;
};

/// The datasets of an output.
std::vector<OutputDataset> delta_outputs(const std::vector<DeltaProblem>& problems, const DeltaCommand& command);
DType delta_output_type(const DeltaProblem& problem, const DeltaCommand& command);

}  // namespace longscan
