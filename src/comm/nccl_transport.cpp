// SPDX-License-Identifier: Apache-2.0
// Device memory between ranks by NCCL, in order with the kernels of Kokkos' stream; everything else by another
// transport. Its start has a deadline, and so has the end of an exchange, where the stream and NCCL's own errors are
// polled.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "longscan/error.hpp"
#include "longscan/transport.hpp"

#ifdef LONGSCAN_NCCL
#include <cuda_runtime.h>
#include <nccl.h>

#include <Kokkos_Core.hpp>
#endif

namespace longscan {

#ifndef LONGSCAN_NCCL

std::string nccl_version() { return ""; }
std::unique_ptr<Transport> make_nccl_transport(Transport&, std::string& why) {
  why = "this build has no NCCL";
  return nullptr;
}

#else

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds init_deadline{60}, transfer_deadline{300};

/// A failure of this rank alone: not an Error, which would have been agreed on; the job ends.
[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("NCCL: " + what); }

std::string text(ncclResult_t result) { return ncclGetErrorString(result); }

/// Polls until NCCL has done what it was asked. Returns its verdict; ncclInProgress after the deadline.
ncclResult_t finished(ncclComm_t comm, std::chrono::seconds deadline) {
  const auto start = Clock::now();
  ncclResult_t state = ncclInProgress;
  for (;;) {
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    if (asked != ncclSuccess) return asked;
    const auto waited = Clock::now() - start;
    if (state != ncclInProgress || waited > deadline) return state;
    if (waited > std::chrono::milliseconds(1)) std::this_thread::sleep_for(std::chrono::microseconds(1));  // or 50
  }
}

class NcclTransport final : public Transport {
 public:
  NcclTransport(Transport& ranks, ncclComm_t parent, ncclComm_t comm) : ranks_(ranks), parent_(parent), comm_(comm) {}
  ~NcclTransport() override { abort(); }  // local, unlike ncclCommDestroy; all transfers are settled

  /// A byte each way between neighbours, so that the first states do not wait for connections. Collective.
  void greet_neighbours() {
    const Kokkos::View<char*, Kokkos::CudaSpace> bytes("longscan::nccl::greeting", 4);
    std::vector<Transfer> sends, receives;
    for (const int other : {rank() - 1, rank() + 1}) {
      if (other < 0 || other >= size()) continue;
      const int at = other < rank() ? 0 : 2;
      sends.push_back({other, bytes.data() + at, 1}), receives.push_back({other, bytes.data() + at + 1, 1});
    }
    exchange(sends, receives);
    settle();
    sent_ = 0;
  }

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  int local_rank() const override { return ranks_.local_rank(); }
  int local_size() const override { return ranks_.local_size(); }
  std::string name() const override { return "nccl"; }
  std::unique_ptr<Request> send(const void* data, std::int64_t bytes, int to, int tag) override {
    return ranks_.send(data, bytes, to, tag);
  }
  void receive(void* data, std::int64_t bytes, int from, int tag) override { ranks_.receive(data, bytes, from, tag); }
  void all_gather(const void* mine, std::int64_t bytes, void* all) override { ranks_.all_gather(mine, bytes, all); }
  void exclusive_scan(const void* mine, void* result, std::int64_t count, std::int64_t element_bytes,
                      const Operator& combine, bool reversed) override {
    ranks_.exclusive_scan(mine, result, count, element_bytes, combine, reversed);
  }
  void broadcast(void* data, std::int64_t bytes, int root) override { ranks_.broadcast(data, bytes, root); }
  void all_reduce(std::int64_t* values, int count, Reduction r) override { ranks_.all_reduce(values, count, r); }
  void all_reduce(double* values, int count, Reduction r) override { ranks_.all_reduce(values, count, r); }
  void barrier() override { ranks_.barrier(); }
  std::int64_t bytes_sent() const override { return ranks_.bytes_sent() + sent_; }

  Reach reach() const override { return Reach::stream; }

  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) override {
    const cudaStream_t stream = Kokkos::Cuda().cuda_stream();
    check(ncclGroupStart());
    for (const Transfer& t : receives)
      check(ncclRecv(t.data, static_cast<std::size_t>(t.bytes), ncclInt8, t.rank, comm_, stream));
    for (const Transfer& t : sends) {
      check(ncclSend(t.data, static_cast<std::size_t>(t.bytes), ncclInt8, t.rank, comm_, stream));
      sent_ += t.bytes;
    }
    check(ncclGroupEnd());
    queued_ = true;
  }

  void settle() override {
    if (!queued_) return;
    const cudaStream_t stream = Kokkos::Cuda().cuda_stream();
    const auto start = Clock::now();
    for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess;) {
      state = cudaStreamQuery(stream);
      if (state != cudaSuccess && state != cudaErrorNotReady) give_up(cudaGetErrorString(state));
      ncclResult_t found = ncclSuccess;
      if (ncclCommGetAsyncError(comm_, &found) != ncclSuccess || (found != ncclSuccess && found != ncclInProgress))
        give_up(text(found));
      if (Clock::now() - start > transfer_deadline)
        give_up("no answer from another rank for " + std::to_string(transfer_deadline.count()) + " s");
    }
    queued_ = false;
  }

 private:
  void check(ncclResult_t result) {
    if (result == ncclInProgress) result = finished(comm_, transfer_deadline);
    if (result == ncclInProgress) give_up("no answer from another rank");
    if (result != ncclSuccess) give_up(text(result));
  }
  [[noreturn]] void give_up(const std::string& what) {
    abort();  // else its kernels would wait for ever, and the end of the program for them
    fail(what + " (NCCL_DEBUG=WARN says more; --transport mpi does without)");
  }

  void abort() {
    if (comm_) ncclCommAbort(comm_);
    if (parent_ != comm_) ncclCommAbort(parent_);
    comm_ = parent_ = nullptr;
  }

  Transport& ranks_;
  ncclComm_t parent_, comm_;
  std::int64_t sent_ = 0;
  bool queued_ = false;
};

/// The same ranks, but calls are made by the caller's thread: a communicator that does not block, which is what a
/// deadline at its start takes, starts a thread for each exchange. `comm` itself where NCCL cannot; null is a failure.
/// Collective.
ncclComm_t without_threads(ncclComm_t comm, int rank) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1, config.splitShare = 1;
  std::atomic<ncclComm_t> split = nullptr;  // NCCL's thread sets it last, and may say success before
  static_assert(sizeof split == sizeof(ncclComm_t));
  const auto start = Clock::now();
  ncclResult_t made = ncclCommSplit(comm, 0, rank, reinterpret_cast<ncclComm_t*>(&split), &config);
  while (!split && (made == ncclSuccess || made == ncclInProgress) && Clock::now() - start < init_deadline)
    made = finished(comm, init_deadline);
  return split;
#else
  return comm;
#endif
}

/// Whether two ranks have the same GPU; its identity is the same in every process.
bool share_a_device(Transport& ranks) {
  cudaDeviceProp properties{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
    properties = {};
  using Id = std::array<char, 16>;
  static_assert(sizeof(Id) == sizeof properties.uuid);
  Id mine;
  std::memcpy(mine.data(), &properties.uuid, sizeof mine);
  std::vector<Id> all(ranks.size());
  ranks.all_gather(mine.data(), sizeof mine, all.data());
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) != all.end();
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::unique_ptr<Transport> make_nccl_transport(Transport& ranks, std::string& why) {
  if (ranks.size() == 1) {
    why = "one rank has nobody to send to";
    return nullptr;
  }
  if (share_a_device(ranks)) {
    why = "ranks share a GPU, which NCCL refuses; use one rank a GPU";
    return nullptr;
  }
  ncclUniqueId id{};
  std::int64_t verdict = ncclSuccess;
  if (ranks.rank() == 0) verdict = ncclGetUniqueId(&id);
  ranks.all_reduce(&verdict, 1, Transport::Reduction::max);
  ncclComm_t comm = nullptr;
  if (verdict == ncclSuccess) {
    ranks.broadcast(&id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t started = ncclCommInitRankConfig(&comm, ranks.size(), id, ranks.rank(), &config);
    if (started == ncclSuccess || started == ncclInProgress) started = finished(comm, init_deadline);
    verdict = started;
    ranks.all_reduce(&verdict, 1, Transport::Reduction::max);
  }
  if (verdict != ncclSuccess) {
    if (comm) ncclCommAbort(comm);
    why = verdict == ncclInProgress ? "NCCL did not start within " + std::to_string(init_deadline.count()) + " s"
                                    : "NCCL did not start: " + text(static_cast<ncclResult_t>(verdict));
    return nullptr;
  }
  const ncclComm_t direct = without_threads(comm, ranks.rank());
  std::int64_t good = direct ? 1 : 0;
  ranks.all_reduce(&good, 1, Transport::Reduction::min);
  if (good == 0) {
    if (direct && direct != comm) ncclCommAbort(direct);
    ncclCommAbort(comm);
    why = "NCCL made no second communicator";
    return nullptr;
  }
  auto transport = std::make_unique<NcclTransport>(ranks, comm, direct);
  transport->greet_neighbours();
  return transport;
}

#endif

}  // namespace longscan
