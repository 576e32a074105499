// SPDX-License-Identifier: Apache-2.0
#include "apps/carrier.hpp"

#include "core/portable.hpp"

namespace longscan {

Carrier::Carrier(Transport& ranks, const std::string& wanted) : ranks_(ranks) {
  constexpr bool on_device = !is_host_space<Kokkos::DefaultExecutionSpace>;
  std::string why;
  if (wanted == "nccl" || (wanted == "auto" && on_device && ranks.size() > 1)) {
    nccl_ = make_nccl_transport(ranks, why);
    if (nccl_) return;
    note_ = (wanted == "nccl" ? "--transport nccl: " : "") + why + "; states travel by MPI";
  }
  if (on_device && ranks.size() > 1 && !ranks.enable_device_memory() && !note_.empty())
    note_ += ", by way of the host's memory";
}

}  // namespace longscan
