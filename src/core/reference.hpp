// SPDX-License-Identifier: Apache-2.0
#pragma once
// The recurrences token by token in double precision: slow, obviously right, independent of chunks, maps and ranks.
// Tests and `longscan verify` compare with these.
#include "core/dtype.hpp"
#include "longscan/delta_rule.hpp"

namespace longscan::reference {

struct DeltaProblem {
  DeltaShape shape;
  DeltaOptions options;
  DeltaInputs in;  ///< host memory; initial_states is not looked at
};

/// Rows [row_begin, row_end) of the state of one head over tokens [begin, end): rows of S are independent, so a few of
/// them can be followed alone. `state` [rows][K] enters and leaves; o, unless null, receives [end - begin][rows].
void delta_rule(const DeltaProblem& problem, int head, std::int64_t begin, std::int64_t end, int row_begin, int row_end,
                double* state, double* o);

/// The map of tokens [begin, end) of one head: P [K][K] and L [V][K], S -> S P + L.
void delta_map(const DeltaProblem& problem, int head, std::int64_t begin, std::int64_t end, double* P, double* L);

}  // namespace longscan::reference
