// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace longscan {

/// "1 token", "2 tokens"
std::string count_of(std::int64_t n, const std::string& what);

/// What a person sees of a run: on rank 0, on stderr. A bar on a terminal; otherwise a line at the start, at most every
/// ten seconds, and at the end.
/// "1 token", "2 tokens"
std::string count_of(std::int64_t n, const std::string& what);

class Progress {
 public:
  /// `show`: this rank prints and the user did not say --quiet.
  Progress(bool show, std::string command, std::int64_t tokens);
  ~Progress();
  /// A line of its own, above the bar.
  void say(const std::string& line);
  /// So many tokens are done; `doing` says what comes next.
  void at(std::int64_t tokens, const std::string& doing);
  /// The closing line, with tokens per second.
  void done(const std::string& where);

 private:
  void draw(bool last);
  double elapsed() const;
  bool show_, terminal_;
  std::string command_, doing_;
  std::int64_t total_, tokens_ = 0;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_, printed_;
};

}  // namespace longscan
