// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a problem is solved and what that takes: the same for the solve and for its plan.
#include "apps/delta_problem.hpp"
#include "apps/newton_problem.hpp"
#include "apps/window.hpp"

namespace longscan {

DeltaOptions options_of(const DeltaCommand& command, const DeltaProblem& problem);
NewtonOptions options_of(const NewtonCommand& command, Precision arithmetic);

/// f64 if one of the problems wants it: they share an output.
Precision newton_arithmetic(const NewtonCommand& command, const std::vector<NewtonProblem>& problems, DType weights);
DType newton_output_type(const NewtonProblem& problem, const NewtonCommand& command);

/// What a window takes on one of `ranks` ranks. The solver must outlive the result.
WindowNeeds needs_of(const DeltaCommand& command, const DeltaProblem& problem, const DeltaRule& rule, int ranks);
WindowNeeds needs_of(const NewtonCommand& command, const NewtonProblem& problem, const Newton& solver,
                     Precision arithmetic, int ranks);

/// "H = 4, K = 64, V = 64, head decay, f32"
std::string shape_text(const DeltaProblem& problem, Precision arithmetic);
/// "D = 64, D_in = 32, 2 layers, both directions"
std::string shape_text(const NetworkShape& network);

}  // namespace longscan
