// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `longscan plan` is asked.
#include <string>

#include "apps/options.hpp"

namespace longscan {

struct PlanCommand {
  std::string solver = "auto";  ///< delta or newton; auto: what the file holds, delta without one
  DeltaCommand delta;           ///< input (may be empty), rules, window
  NewtonCommand newton;
  GenerateDelta sizes;  ///< of the problem, without a file
  GenerateNewton cell;
  std::int64_t sequences = 1;
  int ranks = 1, ranks_per_node = 0;
  double memory = 0;        ///< bytes a rank may use; 0: what is free here
  double file_rate = 1e9;   ///< bytes a second, all ranks together
  double solve_rate = 0;    ///< tokens and heads (newton: tokens) a second and rank; 0: measured here on a few tokens
  double latency = 2e-6;    ///< seconds of a message between ranks
  double bandwidth = 1e10;  ///< bytes a second between two ranks
  double apply_rate = 0;    ///< multiplications a second of a scan's maps; 0: measured here
  bool json = false;
};

}  // namespace longscan
