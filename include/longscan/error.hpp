// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace longscan {

/// How a command ends. Batch scripts rely on the numbers.
enum class ExitCode : int {
  ok = 0,
  internal = 1,     ///< a bug, or an error nobody foresaw
  usage = 2,        ///< wrong options
  bad_input = 3,    ///< the input's content cannot be solved
  file_io = 4,      ///< a file cannot be opened, read, written
  resources = 5,    ///< not enough memory, or no GPU
  numerical = 6,    ///< not converged, non-finite, verification failed
  interrupted = 75  ///< stopped after a checkpoint
};

/// An error with its exit code. The message says what is wrong, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// A recurrence left the range of its arithmetic; the same on every rank.
class NonFinite : public Error {
 public:
  NonFinite(std::int64_t token, int head, const std::string& arithmetic)
      : Error(ExitCode::numerical, "the recurrence overflows " + arithmetic + " at token " + std::to_string(token) +
                                       " of the axis, head " + std::to_string(head)),
        token(token),
        head(head),
        arithmetic(arithmetic) {}
  std::int64_t token;  ///< the first one, on the axis of all tokens
  int head;
  std::string arithmetic;  ///< "float32"
};

}  // namespace longscan
