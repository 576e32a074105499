// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace longscan {

/// From now on SIGTERM, SIGUSR1 and SIGUSR2 ask this process to stop at the next good place; a second one ends it at
/// once, as if nothing had been installed. Copies that arrive within a fifth of a second count once: mpirun and Slurm
/// may both pass a signal on. To be called when MPI and the device are up, as their start may install handlers too.
void install_stop_signals();

/// Once the exit code is settled: launchers end the other ranks when the first has ended with an error, and that must
/// not become their exit code.
void ignore_stop_signals();

/// The signal that asked to stop; 0: none.
int stop_requested();

}  // namespace longscan
