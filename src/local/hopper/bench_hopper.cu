// SPDX-License-Identifier: Apache-2.0
// Tests and times of the Hopper kernels on their own: no Kokkos, no MPI.
//     nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a *.cu -o bench_hopper
//     bench_hopper [descriptors] [check] [channels] [wide] [small] [least] [least_wide] [maps]
//                  [time] [time_channels] [time_wide] [brief] [long] [rows=NAME]
//     (default: all but small, least, least_wide; rows=, as often as wanted, times only the rows of these names)
#include <cstdio>
#include <cstring>
#include <string>

#include "local/hopper/bench_hopper.cuh"

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    for (int i = 1; i < argc; ++i)
      if (std::string(argv[i]) == name) return true;
    return argc == 1;
  };
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "rows=", 5) == 0) bench::only.push_back(argv[i] + 5);
  if (wanted("descriptors")) bench::test_operands();
  if (wanted("check")) bench::check(false);
  if (wanted("check") || wanted("channels")) bench::check_channels(false);
  if (wanted("check") || wanted("wide")) bench::check_wide(false);
  if (argc > 1 && wanted("small")) bench::check(true), bench::check_channels(true), bench::check_wide(true);
  if (argc > 1 && wanted("least")) bench::check_least();
  if (argc > 1 && wanted("least_wide")) bench::check_least_wide();
  if (wanted("maps")) bench::check_segments();
#ifdef LONGSCAN_HOPPER_PROFILE
  bench::profile_all();
  return 0;
#endif
  if (wanted("time") || wanted("long") || wanted("brief")) bench::time_all(wanted("long"), wanted("brief"));
  if (wanted("time") || wanted("long") || wanted("brief") || wanted("time_channels"))
    bench::time_channels(wanted("long"), wanted("brief"));
  if (wanted("time") || wanted("long") || wanted("brief") || wanted("time_wide"))
    bench::time_wide(wanted("long"), wanted("brief"));
  std::printf("%d failures\n", bench::failures);
  return bench::failures != 0;
}
