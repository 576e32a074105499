// SPDX-License-Identifier: Apache-2.0
#include "apps/report.hpp"

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "apps/memory.hpp"
#include "core/portable.hpp"
#include "longscan/error.hpp"

namespace longscan {

std::string device_name() {
  std::string name = Kokkos::DefaultExecutionSpace::name();
#ifdef KOKKOS_ENABLE_CUDA
  name += std::string(" (") + Kokkos::Cuda().cuda_device_prop().name + ")";
#endif
  return name;
}

bool staged(const Transport& ranks) {
  return !is_host_space<Kokkos::DefaultExecutionSpace> && ranks.size() > 1 && ranks.reach() == Transport::Reach::host;
}

nlohmann::json common_report(Transport& ranks, const std::string& command,
                             const std::map<std::string, std::string>& options, const Seconds& seconds,
                             std::int64_t bytes_read, std::int64_t bytes_written) {
  double times[] = {seconds.read, seconds.solve, seconds.scan, seconds.write, seconds.total};
  std::vector<double> by_rank(static_cast<std::size_t>(ranks.size()) * 5, 0.0);
  std::copy_n(times, 5, &by_rank[static_cast<std::size_t>(ranks.rank()) * 5]);
  ranks.all_reduce(by_rank.data(), static_cast<int>(by_rank.size()), Transport::Reduction::sum);
  ranks.all_reduce(times, 5, Transport::Reduction::max);
  std::int64_t bytes[] = {bytes_read, bytes_written};
  ranks.all_reduce(bytes, 2, Transport::Reduction::sum);
  std::int64_t peak = peak_memory();
  ranks.all_reduce(&peak, 1, Transport::Reduction::max);
  nlohmann::json j;
  j["version"] = LONGSCAN_VERSION;
  j["command"] = command;
  j["options"] = options;
  j["ranks"] = ranks.size();
  j["devices"] = device_name();
  j["transport"] = ranks.name(), j["staged"] = staged(ranks);
  j["seconds"] = {
      {"read", times[0]}, {"solve", times[1]}, {"scan", times[2]}, {"write", times[3]}, {"total", times[4]}};
  const char* phases[] = {"read", "solve", "scan", "write", "total"};
  for (std::size_t i = 0; i < by_rank.size(); ++i) j["seconds_by_rank"][phases[i % 5]].push_back(by_rank[i]);
  j["bytes"] = {{"read", bytes[0]}, {"written", bytes[1]}};
  j["peak_memory_bytes"] = peak;
  return j;
}

nlohmann::json complete_report(Transport& ranks, const std::string& command,
                               const std::map<std::string, std::string>& options, const Seconds& seconds,
                               std::int64_t tokens, std::int64_t sequences, const std::string& precision) {
  nlohmann::json j = common_report(ranks, command, options, seconds, 0, 0);
  j["complete_already"] = true;
  j["scan"] = "none", j["precision"] = precision, j["checks"] = nlohmann::json::object();
  j["tokens"] = tokens, j["sequences"] = sequences, j["tokens_per_second"] = 0.0;
  j["bytes"]["exchanged"] = 0;
  return j;
}

nlohmann::json scan_json(const ScanChoice& choice, int ranks) {
  nlohmann::json j = {{"reason", choice.reason}};
  j["elements"] = choice.size.elements, j["maps_per_element"] = choice.size.maps;
  j["point_bytes"] = choice.size.point_bytes, j["map_bytes"] = choice.size.map_bytes;
  if (!choice.costs.measured) return j;
  const ScanCosts& c = choice.costs;
  j["costs"] = {{"alpha_us", c.latency * 1e6},
                {"beta_ns_per_byte", c.byte * 1e9},
                {"apply_us", c.apply * 1e6},
                {"launch_us", c.launch * 1e6}};
  for (const ScanAlgorithm a : {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather})
    j["predicted_ms"][std::string(name_of(a))] = 1e3 * predict(a, choice.size, ranks, c);
  return j;
}

std::string printable(const nlohmann::json& j) {
  return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

void write_report(const std::string& path, const nlohmann::json& report) {
  std::error_code ignored;
  const bool special = std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored);
  const std::string part = special ? path : path + ".part";  // /dev/stdout is written to, not replaced
  std::ofstream file(part);
  file << printable(report) << "\n";
  file.close();
  if (!file || (!special && std::rename(part.c_str(), path.c_str()) != 0)) {
    const std::string why = std::strerror(errno);
    if (!special) std::remove(part.c_str());
    throw Error(ExitCode::file_io, "cannot write the report " + path + ": " + why);
  }
}

}  // namespace longscan
