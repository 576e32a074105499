// SPDX-License-Identifier: Apache-2.0
#pragma once
// Windows one after another: while one is solved, the next is read and the one before is written.
#include <functional>
#include <vector>

#include "apps/report.hpp"
#include "longscan/partition.hpp"
#include "longscan/transport.hpp"

namespace longscan {

/// What is done with a window. There are two slots of host memory; neighbouring windows have different ones. `read` and
/// `write` run on threads of their own and neither communicate nor launch kernels; the others run on the thread that
/// called `run_windows`.
struct WindowStages {
  std::function<void(TokenRange window, int slot)> prepare;  ///< memory for what is read; not collective. The slot's
                                                             ///< output may still be on its way to the file
  std::function<void(int slot)> read;
  std::function<void()> begin;          ///< collective; once, while the first window is read, or if there is none
  std::function<void(int slot)> check;  ///< what was read can be solved; memory for the output; not collective
  /// The writer's thread, while a window is solved.
  struct Writing {
    std::function<bool(std::function<void()> job)> begin;  ///< if it has nothing to do; whether it had not
    std::function<void()> wait;                            ///< until it has nothing to do
  };
  /// Collective; leaves the results in the slot. What stands before all does may be written by `now`. Returns whether
  /// there is more to write.
  std::function<bool(TokenRange window, int slot, const Writing& now)> solve;
  std::function<void(int slot)> write;
  std::function<void()> end = [] {};  ///< collective; the last window is solved, and may be on its way to the file
  /// Collective, after a window was solved and handed to the writer, but for the last one. `written` waits until every
  /// rank has written all windows so far.
  std::function<void(TokenRange solved, const std::function<void()>& written)> between;
};

/// Collective. Throws the same error on every rank. The times of reading and writing are those of their threads.
void run_windows(Transport& ranks, const std::vector<TokenRange>& windows, const WindowStages& stages,
                 Seconds& seconds);

}  // namespace longscan
