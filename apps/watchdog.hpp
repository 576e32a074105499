// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ends a job in which nothing moves any more.
#include <pthread.h>

#include <cstdint>
#include <memory>

#include "longscan/transport.hpp"

namespace longscan {

/// What the main thread of this rank does from now on, for a message: "reading a window" of this first token. `phase`
/// is a literal.
void note_phase(const char* phase, std::int64_t token);

/// While it lives, the main thread waits for other ranks.
class Waiting {
 public:
  Waiting();
  ~Waiting();
};

/// Threads beside the main one whose work counts as this rank's.
void watch_thread(pthread_t thread);
void forget_thread(pthread_t thread);

/// `ranks`, with a note for the watchdog whenever this rank waits for others. `ranks` must outlive it.
std::unique_ptr<Transport> make_watched(Transport& ranks);

/// Collective; from the thread that solves. Starts a thread on each rank that tells the others every now and then that
/// it is alive, and whether its rank has moved: a thread has worked, or a message was passed. The job ends with one
/// message and MPI_Abort when a rank has not been heard of for `seconds` (killed without anybody noticing, or stopped),
/// or when no rank has moved for as long. 0: never. Needs MPI_THREAD_MULTIPLE; returns false without.
bool start_watchdog(double seconds);

/// Collective, before MPI_Finalize; every rank passes here. Nothing to do if none was started.
void stop_watchdog();

}  // namespace longscan
