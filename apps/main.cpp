// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "apps/options.hpp"

namespace {

/// A job of several tasks whose MPI world has one rank was started with the wrong launcher: P copies would all solve
/// everything and write the same file.
void refuse_separate_worlds(const longscan::Transport& ranks) {
  const char* tasks = std::getenv("SLURM_NTASKS");
  const char* step = std::getenv("SLURM_STEP_ID");
  if (ranks.size() > 1 || !tasks || !step || std::atoi(tasks) <= 1) return;
  throw longscan::Error(
      longscan::ExitCode::usage,
      std::string("srun started ") + tasks +
          " tasks, but MPI sees one rank: they would run as separate programs; use srun --mpi=pmix, or mpirun");
}

/// Runs the command; returns the exit code, the same on every rank. One rank has printed the message, if there is one.
int run(longscan::Transport& ranks, int argc, char** argv) {
  try {
    refuse_separate_worlds(ranks);
    longscan::run_command_line(ranks, argc, argv);
    return 0;
  } catch (const longscan::Error& e) {
    // Errors are agreed on before they leave a command, so every rank is here with the same one.
    if (ranks.rank() == 0) std::fprintf(stderr, "longscan: %s\n", e.what());
    return static_cast<int>(e.code());
  }
}

/// An error that only this rank has: the others wait for it, so the job ends here.
[[noreturn]] void abort_job(int rank, const char* what) {
  std::fprintf(stderr, "longscan: internal error on rank %d: %s\n", rank, what);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

/// Descriptions of the command line need no ranks: builds and shells ask for them where MPI may not start.
bool asks_for_description(int argc, char** argv) {
  return argc > 1 && (std::strcmp(argv[1], "--man-page") == 0 || std::strcmp(argv[1], "--completion") == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (asks_for_description(argc, argv)) return run(*longscan::make_single_transport(), argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int code = 1, rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    Kokkos::initialize();
    {
      const auto ranks = longscan::make_mpi_transport();
      code = run(*ranks, argc, argv);
    }
    Kokkos::finalize();
  } catch (const std::exception& e) {
    abort_job(rank, e.what());
  }
  std::fflush(stderr);
  MPI_Finalize();
  return code;
}
