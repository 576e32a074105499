// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "longscan/scan.hpp"
#include "longscan/transport.hpp"

namespace longscan {

/// Seconds of the phases of a run on this rank; `scan` is part of `solve`.
struct Seconds {
  double read = 0, solve = 0, scan = 0, write = 0, total = 0;
};

/// The fields that every report has. Collective: times are the largest over the ranks, bytes and memory sums.
nlohmann::json common_report(Transport& ranks, const std::string& command,
                             const std::map<std::string, std::string>& options, const Seconds& seconds,
                             std::int64_t bytes_read, std::int64_t bytes_written);

/// The report of a run that found its output complete: the common fields, and sizes. Collective.
nlohmann::json complete_report(Transport& ranks, const std::string& command,
                               const std::map<std::string, std::string>& options, const Seconds& seconds,
                               std::int64_t tokens, std::int64_t sequences, const std::string& precision);

/// Why states pass over the ranks as they do, and the costs that decided it.
nlohmann::json scan_json(const ScanChoice& choice, int ranks);

/// As text; what is not UTF-8 (names of files need not be) is replaced.
std::string printable(const nlohmann::json& j);

/// Write `report` to `path`, complete or not at all. On one rank.
void write_report(const std::string& path, const nlohmann::json& report);

/// Whether states go by way of the host's memory, since kernels run where the transport does not reach.
bool staged(const Transport& ranks);

/// "Serial" or "Cuda (NVIDIA H200)": what the kernels run on.
std::string device_name();

}  // namespace longscan
