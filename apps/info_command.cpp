// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <cstring>
#include <string>

#include "apps/memory.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

void run_info(Transport& ranks) {
  if (ranks.rank() != 0) return;
  char library[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(library, &length);
  std::string mpi(library, length);
  mpi = mpi.substr(0, mpi.find_first_of(",\n"));
  std::printf("longscan  %s\n", LONGSCAN_VERSION);
  std::printf("Kokkos    %d.%d.%d, device %s, host %s\n", KOKKOS_VERSION / 10000, KOKKOS_VERSION / 100 % 100,
              KOKKOS_VERSION % 100, device_name().c_str(), Kokkos::DefaultHostExecutionSpace::name());
  std::printf("MPI       %s\n", mpi.c_str());
  std::printf("HDF5      %s\n", hdf5_version().c_str());
  const std::string nccl = nccl_version();
  std::printf("NCCL      %s\n", nccl.empty() ? "not built in" : nccl.c_str());
  std::printf("ranks     %d (%d on this node)\n", ranks.size(), ranks.local_size());
  std::printf("memory    %s available on this node\n", bytes_text(static_cast<double>(available_memory())).c_str());
}

}  // namespace longscan
