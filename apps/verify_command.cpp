// SPDX-License-Identifier: Apache-2.0
#include "apps/verify.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

void run_verify(Transport& ranks, const VerifyCommand& command) {
  std::string solver;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    const InputFile output(command.output);
    const auto text = output.text_attribute("/", "command");
    if (!text)
      throw Error(ExitCode::bad_input, command.output + " has no attribute 'command': it is not an output of longscan");
    solver = *text;
  });
  solver = broadcast(ranks, solver, 0);
  if (solver != "delta")
    throw Error(ExitCode::bad_input, command.output + " is an output of '" + solver + "', which verify does not know");
  verify_delta(ranks, command);
}

}  // namespace longscan
