// SPDX-License-Identifier: Apache-2.0
#include "apps/pipeline.hpp"

#include <exception>
#include <utility>

#include "apps/stopwatch.hpp"
#include "apps/watchdog.hpp"
#include "apps/worker.hpp"

namespace longscan {

void run_windows(Transport& ranks, const std::vector<TokenRange>& windows, const WindowStages& stages,
                 Seconds& seconds) {
  Worker reader, writer;
  const auto begin_reading = [&](std::size_t w) {
    const int slot = static_cast<int>(w % 2);
    stages.prepare(windows[w], slot);
    reader.start([&, slot] {
      const Stopwatch watch(seconds.read);
      stages.read(slot);
    });
  };
  std::exception_ptr lost;  // what the writer threw, until it is agreed on
  const auto wait_for_writer = [&] {
    try {
      writer.wait();
    } catch (...) {
      lost = std::current_exception();
    }
  };
  const auto begin_writing = [&](int slot) {
    wait_for_writer();
    if (lost) return;
    writer.start([&, slot] {
      const Stopwatch watch(seconds.write);
      stages.write(slot);
    });
  };
  const WindowStages::Writing now{[&](std::function<void()> job) {
                                    if (lost || !writer.idle()) return false;
                                    writer.start([&seconds, job = std::move(job)] {
                                      const Stopwatch watch(seconds.write);
                                      job();
                                    });
                                    return true;
                                  },
                                  wait_for_writer};
  const auto written = [&] {
    agree(ranks, [&] {
      if (lost) std::rethrow_exception(lost);
      writer.wait();
    });
  };

  agree(ranks, [&] {
    if (!windows.empty()) begin_reading(0);
  });
  note_phase("making the output", 0);
  stages.begin();
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const int slot = static_cast<int>(w % 2);
    note_phase("reading a window", windows[w].begin);
    agree(ranks, [&] {
      if (lost) std::rethrow_exception(lost);
      reader.wait();
      stages.check(slot);
      if (w + 1 < windows.size()) begin_reading(w + 1);
    });
    bool more = true;
    {
      const Stopwatch watch(seconds.solve);
      note_phase("solving a window", windows[w].begin);
      more = stages.solve(windows[w], slot, now);
    }
    note_phase("writing a window", windows[w].begin);
    if (more) begin_writing(slot);  // else it is on its way, which need not be waited for
    if (w + 1 < windows.size()) stages.between(windows[w], written);
  }
  stages.end();
  note_phase("writing the last window", windows.empty() ? 0 : windows.back().begin);
  written();
}

}  // namespace longscan
