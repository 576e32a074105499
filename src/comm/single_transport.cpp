// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "longscan/error.hpp"
#include "longscan/transport.hpp"

namespace longscan {
namespace {

/// One rank. There is nobody to send to, so sending is a bug of the caller.
class SingleTransport final : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  std::string name() const override { return "none"; }
  std::unique_ptr<Request> send(const void*, std::int64_t, int, int) override { throw alone(); }
  void receive(void*, std::int64_t, int, int) override { throw alone(); }
  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) override {
    if (!sends.empty() || !receives.empty()) throw alone();
  }
  void all_gather(const void* mine, std::int64_t bytes, void* all) override {
    if (bytes > 0) std::memcpy(all, mine, static_cast<std::size_t>(bytes));
  }
  void exclusive_scan(const void*, void*, std::int64_t, std::int64_t, const Operator&, bool) override {}
  void broadcast(void*, std::int64_t, int) override {}
  void all_reduce(std::int64_t*, int, Reduction) override {}
  void all_reduce(double*, int, Reduction) override {}
  void barrier() override {}
  std::int64_t bytes_sent() const override { return 0; }

 private:
  static Error alone() { return Error(ExitCode::internal, "a single rank has nobody to exchange messages with"); }
};

}  // namespace

std::unique_ptr<Transport> make_single_transport() { return std::make_unique<SingleTransport>(); }

}  // namespace longscan
