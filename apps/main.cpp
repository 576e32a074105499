// SPDX-License-Identifier: Apache-2.0
#include <malloc.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "apps/options.hpp"
#include "apps/stop_request.hpp"
#include "apps/watchdog.hpp"

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

struct Outcome {
  int code = 0;
  std::string message;
};

Outcome run(longscan::Transport& ranks, int argc, char** argv) {
  try {
    refuse_separate_worlds(ranks);
    longscan::run_command_line(ranks, argc, argv);
    return {};
  } catch (const longscan::Error& e) {
    return {static_cast<int>(e.code()), e.what()};
  } catch (const std::bad_alloc&) {
    return {static_cast<int>(longscan::ExitCode::resources),
            "out of memory on rank " + std::to_string(ranks.rank()) + "; try more ranks or a smaller --window"};
  } catch (const std::system_error& e) {  // threads
    const bool memory =
        e.code() == std::errc::resource_unavailable_try_again || e.code() == std::errc::not_enough_memory;
    return {static_cast<int>(memory ? longscan::ExitCode::resources : longscan::ExitCode::internal),
            (memory ? "out of memory for threads on rank " : "internal error on rank ") + std::to_string(ranks.rank()) +
                ": " + e.what()};
  } catch (const std::exception& e) {
    const bool memory = std::strstr(e.what(), "Kokkos failed to allocate memory") != nullptr;
    return {static_cast<int>(memory ? longscan::ExitCode::resources : longscan::ExitCode::internal),
            (memory ? "out of memory on rank " : "internal error on rank ") + std::to_string(ranks.rank()) + ": " +
                e.what()};
  }
}

void say(const std::string& message) {
  std::fprintf(stderr, "longscan: %s\n", message.c_str());
  std::fflush(stderr);
}

/// Errors are agreed on before they leave a command, so that every rank is here with the same one: the lowest prints
/// it. A rank that comes with an error and waits in vain has it alone, and the others wait for it: it ends the job.
int agree_on(const Outcome& mine) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int found[] = {-(mine.code == 0 ? size : rank), mine.code};
  MPI_Request request;
  MPI_Iallreduce(MPI_IN_PLACE, found, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request);
  const longscan::Waiting waiting;
  const auto start = std::chrono::steady_clock::now();
  for (int done = 0;;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) break;
    if (mine.code != 0 && std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) {
      say(mine.message);
      MPI_Abort(MPI_COMM_WORLD, mine.code);
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (-found[0] == rank) say(mine.message);
  return found[1];
}

/// Descriptions of the command line need no ranks: builds and shells ask for them where MPI may not start.
bool asks_for_description(int argc, char** argv) {
  return argc > 1 && (std::strcmp(argv[1], "--man-page") == 0 || std::strcmp(argv[1], "--completion") == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (asks_for_description(argc, argv)) {
    const Outcome outcome = run(*longscan::make_single_transport(), argc, argv);
    if (!outcome.message.empty()) say(outcome.message);
    return outcome.code;
  }
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is an error of the write that meets it
#ifdef M_ARENA_MAX
  mallopt(M_ARENA_MAX, 2);  // every thread would take a range of addresses, of which a batch system may allow few
#endif
  // Ranks that wait for messages leave their core to the threads that read and write (Open MPI's word for it).
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  Outcome outcome;
  try {
    Kokkos::initialize();
    {
      const auto mpi = longscan::make_mpi_transport();
      const auto ranks = longscan::make_watched(*mpi);
      outcome = run(*ranks, argc, argv);
    }
    Kokkos::finalize();
  } catch (const std::exception& e) {
    outcome = {1, std::string("internal error: ") + e.what()};
  }
  const int code = agree_on(outcome);
  longscan::ignore_stop_signals();
  longscan::stop_watchdog();
  MPI_Finalize();
  return code;
}
