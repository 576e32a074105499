// SPDX-License-Identifier: Apache-2.0
#include "apps/memory.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

#include "longscan/error.hpp"

namespace longscan {
namespace {

/// The value of "name: N kB" in a /proc file, in bytes; -1 if it is not there.
std::int64_t kilobytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.rfind(name + ":", 0) == 0) {
      std::istringstream words(line.substr(name.size() + 1));
      std::int64_t value = 0;
      if (words >> value) return value * 1024;
    }
  return -1;
}

std::int64_t number(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = -1;
  return file >> value ? value : -1;  // "max" is no number
}

/// What the control group (version 2) of this process leaves, up to the root; a very large number if there is none.
std::int64_t group_leaves() {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    for (std::string group = line.substr(3);; group = group.substr(0, group.rfind('/'))) {
      const std::string folder = "/sys/fs/cgroup" + (group == "/" ? "" : group);
      const std::int64_t limit = number(folder + "/memory.max"), used = number(folder + "/memory.current");
      if (limit >= 0 && used >= 0) least = std::min(least, std::max<std::int64_t>(0, limit - used));
      if (group.empty() || group == "/") break;
    }
  }
  return least;
}

}  // namespace

std::int64_t available_memory(int processes) {
  std::int64_t least = kilobytes("/proc/meminfo", "MemAvailable");
  if (least < 0) least = std::numeric_limits<std::int64_t>::max();
  least = std::min(least, group_leaves()) / processes;
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const std::int64_t used = std::max<std::int64_t>(0, kilobytes("/proc/self/status", "VmSize"));
    least = std::min(least, std::max<std::int64_t>(0, static_cast<std::int64_t>(limit.rlim_cur) - used));
  }
  return least;
}

std::int64_t resident_memory() { return std::max<std::int64_t>(0, kilobytes("/proc/self/status", "VmRSS")); }

std::int64_t peak_memory() { return std::max<std::int64_t>(0, kilobytes("/proc/self/status", "VmHWM")); }

void require_memory(double bytes, const std::string& what) {
  const auto free = static_cast<double>(available_memory());
  if (bytes > free)
    throw Error(ExitCode::resources,
                what + " would take " + bytes_text(bytes) + ", but " + bytes_text(free) + " are free");
}

double state_bytes(int heads, int d_key, int d_value) {
  return 8.0 * heads * d_key * (static_cast<double>(d_key) + 2.0 * d_value);
}

std::string bytes_text(double bytes) {
  char text[32];
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

}  // namespace longscan
