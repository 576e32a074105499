// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <memory>
#include <string>

#include "longscan/transport.hpp"

namespace longscan {

/// What carries the states of a solve between the ranks: NCCL between GPUs where that can be, else MPI (by way of
/// pinned memory, unless MPI takes device memory and a test of that passes).
class Carrier {
 public:
  /// Collective. `wanted` is auto, mpi or nccl.
  Carrier(Transport& ranks, const std::string& wanted);
  Transport& transport() { return nccl_ ? *nccl_ : ranks_; }
  /// Why it is not what was wanted; empty if it is.
  const std::string& note() const { return note_; }

 private:
  Transport& ranks_;
  std::unique_ptr<Transport> nccl_;
  std::string note_;
};

}  // namespace longscan
