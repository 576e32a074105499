// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>
#if defined(OPEN_MPI) && OPEN_MPI
#include <mpi-ext.h>  // MPIX_Query_cuda_support
#endif

#include <Kokkos_Macros.hpp>
#ifdef KOKKOS_ENABLE_CUDA
#include <Kokkos_Core.hpp>
#endif
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

/// The operator of the MPI_Exscan under way, which MPI calls without a context.
thread_local const Transport::Operator* combining = nullptr;
thread_local std::int64_t combining_failed = 0;
extern "C" void combine_elements(void* earlier, void* later, int* count, MPI_Datatype*) {
  try {
    (*combining)(earlier, later, *count);
  } catch (...) {  // must not leave through MPI
    ++combining_failed;
  }
}

/// One element as MPI sees it, so that MPI never cuts one.
class ElementType {
 public:
  explicit ElementType(std::int64_t bytes) {
    // counts are ints: in words where the size is a multiple of one
    const bool words = bytes % 8 == 0;
    check(MPI_Type_contiguous(static_cast<int>(words ? bytes / 8 : bytes), words ? MPI_INT64_T : MPI_BYTE, &type));
    check(MPI_Type_commit(&type));
  }
  ~ElementType() { MPI_Type_free(&type); }
  ElementType(const ElementType&) = delete;
  ElementType& operator=(const ElementType&) = delete;
  MPI_Datatype type = MPI_DATATYPE_NULL;
};

/// Whether this MPI says that it takes pointers to device memory.
bool says_device_memory() {
#if defined(KOKKOS_ENABLE_CUDA) && defined(MPIX_CUDA_AWARE_SUPPORT) && MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
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
  Reach reach() const override { return reach_; }

  bool enable_device_memory() override {
    std::int64_t good = size_ > 1 && says_device_memory() ? 1 : 0;
    all_reduce(&good, 1, Reduction::min);
    if (good == 0) return false;
    good = device_memory_arrives() ? 1 : 0;
    all_reduce(&good, 1, Reduction::min);
    if (good != 0) reach_ = Reach::device;
    return good != 0;
  }

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

  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) override {
    MpiRequest all;
    for (const Transfer& t : receives)
      for_pieces(t.bytes, [&](std::int64_t at, int count) {
        all.pieces.emplace_back();
        check(MPI_Irecv(static_cast<char*>(t.data) + at, count, MPI_BYTE, t.rank, 0, comm_, &all.pieces.back()));
      });
    for (const Transfer& t : sends) {
      for_pieces(t.bytes, [&](std::int64_t at, int count) {
        all.pieces.emplace_back();
        check(MPI_Isend(static_cast<char*>(t.data) + at, count, MPI_BYTE, t.rank, 0, comm_, &all.pieces.back()));
      });
      sent_ += t.bytes;
    }
    all.wait();
  }

  void all_gather(const void* mine, std::int64_t bytes, void* all) override {
    check(MPI_Allgather(mine, static_cast<int>(bytes), MPI_BYTE, all, static_cast<int>(bytes), MPI_BYTE, comm_));
    sent_ += bytes;
  }

  void exclusive_scan(const void* mine, void* result, std::int64_t count, std::int64_t element_bytes,
                      const Operator& combine, bool reversed) override {
    if (reversed && backwards_ == MPI_COMM_NULL) check(MPI_Comm_split(comm_, 0, size_ - rank_, &backwards_));
    const ElementType element(element_bytes);
    MPI_Op operation;
    check(MPI_Op_create(combine_elements, 0, &operation));
    combining = &combine, combining_failed = 0;
    const bool first = rank_ == (reversed ? size_ - 1 : 0);
    const std::int64_t each = std::max<std::int64_t>(1, piece_bytes / element_bytes);
    std::vector<char> ignored;  // what MPI leaves on the first rank is undefined
    if (first) ignored.resize(static_cast<std::size_t>(std::min(each, count) * element_bytes));
    for (std::int64_t at = 0; at < count; at += each) {
      const auto n = static_cast<int>(std::min(each, count - at));
      check(MPI_Exscan(static_cast<const char*>(mine) + at * element_bytes,
                       first ? ignored.data() : static_cast<char*>(result) + at * element_bytes, n, element.type,
                       operation, reversed ? backwards_ : comm_));
    }
    sent_ += rank_ == (reversed ? 0 : size_ - 1) ? 0 : count * element_bytes;
    check(MPI_Op_free(&operation));
    if (combining_failed > 0) throw Error(ExitCode::resources, "out of memory in the scan; try more ranks");
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
  /// From rank to rank around, a message that goes at once and one that is announced first.
  bool device_memory_arrives() {
#ifdef KOKKOS_ENABLE_CUDA
    using Bytes = Kokkos::View<char*, Kokkos::CudaSpace>;
    for (const std::int64_t bytes : {std::int64_t{64}, std::int64_t{1} << 21}) {
      Bytes out("longscan::mpi::test", bytes), in("longscan::mpi::test", bytes);
      Kokkos::deep_copy(out, static_cast<char>(1 + rank_ % 100));
      Kokkos::fence();  // MPI does not wait for kernels
      const int before = (rank_ + size_ - 1) % size_;
      exchange({{(rank_ + 1) % size_, out.data(), bytes }}, {{ before, in.data(), bytes }});
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), in);
      for (std::int64_t i = 0; i < bytes; ++i)
        if (host(i) != static_cast<char>(1 + before % 100)) return false;
    }
    return true;
#else
    return false;
#endif
  }

  Reach reach_ = Reach::host;
  MPI_Comm comm_ = MPI_COMM_NULL, backwards_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::int64_t sent_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport() { return std::make_unique<MpiTransport>(); }

}  // namespace longscan
