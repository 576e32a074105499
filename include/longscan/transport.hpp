// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace longscan {

/// Bytes between the ranks of one job. Knows nothing of what they mean.
///
/// Messages between two ranks with equal tags arrive in the order they were sent. Sizes are 64 bits;
/// a message above the limit of the layer below travels in pieces. Every error of the layer below
/// becomes an `Error`. Nothing communicates in a destructor.
class Transport {
 public:
  /// A transfer under way; `wait` ends it. The buffer must live until then.
  class Request {
   public:
    virtual ~Request() = default;
    virtual void wait() = 0;
  };
  enum class Reduction { sum, min, max };

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Place among the ranks of the same node, and how many they are.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual std::string name() const = 0;

  /// Start to send `bytes` bytes to rank `to`. Not collective.
  virtual std::unique_ptr<Request> send(const void* data, std::int64_t bytes, int to, int tag) = 0;
  /// Receive exactly `bytes` bytes from rank `from`; returns when they are there. Not collective.
  virtual void receive(void* data, std::int64_t bytes, int from, int tag) = 0;
  /// Collective. Rank `root`'s bytes on every rank.
  virtual void broadcast(void* data, std::int64_t bytes, int root) = 0;
  /// Collective. Element by element over the ranks; the same bits on every rank.
  virtual void all_reduce(std::int64_t* values, int count, Reduction reduction) = 0;
  virtual void all_reduce(double* values, int count, Reduction reduction) = 0;
  /// Collective.
  virtual void barrier() = 0;
  /// Bytes this rank has sent so far.
  virtual std::int64_t bytes_sent() const = 0;
};

/// The ranks of MPI_COMM_WORLD. MPI must be initialised and outlive the transport.
std::unique_ptr<Transport> make_mpi_transport();
/// One rank and no communication; what a program without MPI uses.
std::unique_ptr<Transport> make_single_transport();

/// Collective. Runs `work` on this rank and lets all ranks know how it went: if it threw on any rank, `agree`
/// throws the same `Error` on every rank (that of the lowest failing rank, its message too). Whatever may fail
/// on one rank alone goes through this before the next collective call. Cost: one all_reduce.
void agree(Transport& ranks, const std::function<void()>& work);

/// Collective. The string of rank `root`, on every rank.
std::string broadcast(Transport& ranks, std::string text, int root);

}  // namespace longscan
