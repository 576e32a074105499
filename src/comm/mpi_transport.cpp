// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <algorithm>
#include <source_location>
#include <vector>

#include "longscan/error.hpp"
#include "longscan/transport.hpp"

namespace longscan {
namespace {

void check(int code, std::source_location where = std::source_location::current()) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ExitCode::internal,
              std::string("MPI failed in ") + where.function_name() + ": " + std::string(text, length));
}

/// MPI counts are ints: messages travel in pieces of at most this many bytes.
constexpr std::int64_t piece_bytes = std::int64_t{1} << 30;

template <class F>
void for_pieces(std::int64_t bytes, F f) {
  for (std::int64_t at = 0; at < bytes || at == 0; at += piece_bytes) {
    f(at, static_cast<int>(std::min(piece_bytes, bytes - at)));
    if (bytes == 0) break;
  }
}

class MpiRequest final : public Transport::Request {
 public:
  std::vector<MPI_Request> pieces;
  void wait() override {
    check(MPI_Waitall(static_cast<int>(pieces.size()), pieces.data(), MPI_STATUSES_IGNORE));
    pieces.clear();
  }
};

MPI_Op operation(Transport::Reduction reduction) {
  return reduction == Transport::Reduction::sum ? MPI_SUM : reduction == Transport::Reduction::min ? MPI_MIN : MPI_MAX;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport() {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    check(MPI_Comm_rank(comm_, &rank_));
    check(MPI_Comm_size(comm_, &size_));
    MPI_Comm node;
    check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node));
    check(MPI_Comm_rank(node, &local_rank_));
    check(MPI_Comm_size(node, &local_size_));
    check(MPI_Comm_free(&node));
  }
  // The communicator is left to MPI_Finalize: freeing it is collective, and a destructor may run on one rank alone.

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }
  std::string name() const override { return "mpi"; }

  std::unique_ptr<Request> send(const void* data, std::int64_t bytes, int to, int tag) override {
    auto request = std::make_unique<MpiRequest>();
    for_pieces(bytes, [&](std::int64_t at, int count) {
      request->pieces.emplace_back();
      check(MPI_Isend(static_cast<const char*>(data) + at, count, MPI_BYTE, to, tag, comm_, &request->pieces.back()));
    });
    sent_ += bytes;
    return request;
  }

  void receive(void* data, std::int64_t bytes, int from, int tag) override {
    for_pieces(bytes, [&](std::int64_t at, int count) {
      MPI_Status status;
      check(MPI_Recv(static_cast<char*>(data) + at, count, MPI_BYTE, from, tag, comm_, &status));
      int got = 0;
      check(MPI_Get_count(&status, MPI_BYTE, &got));
      if (got != count)
        throw Error(ExitCode::internal, "a message from rank " + std::to_string(from) + " has " + std::to_string(got) +
                                            " bytes, expected " + std::to_string(count));
    });
  }

  void broadcast(void* data, std::int64_t bytes, int root) override {
    for_pieces(bytes, [&](std::int64_t at, int count) {
      check(MPI_Bcast(static_cast<char*>(data) + at, count, MPI_BYTE, root, comm_));
    });
    if (rank_ == root) sent_ += bytes;
  }

  void all_reduce(std::int64_t* values, int count, Reduction reduction) override {
    check(MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_INT64_T, operation(reduction), comm_));
  }
  void all_reduce(double* values, int count, Reduction reduction) override {
    check(MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, operation(reduction), comm_));
  }
  void barrier() override { check(MPI_Barrier(comm_)); }
  std::int64_t bytes_sent() const override { return sent_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::int64_t sent_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport() { return std::make_unique<MpiTransport>(); }

}  // namespace longscan
