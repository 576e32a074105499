// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "io/posix_file.hpp"

/// Bytes of a file where the system's cache has them: no copy, and no new memory. No HDF5 here.
namespace longscan::io {

/// Read-only pages of a file in this process's memory, as long as it lives. Move-only. Where the system cannot bring a
/// page any more (the file was cut short, the disk fails), zeros take the place of the rest of the mapping and `lost`
/// is set, instead of the SIGBUS that would end the program.
class Mapping {
 public:
  using Lost = std::shared_ptr<std::atomic<bool>>;
  /// None where the file is not on a disk (or in the memory) of this node, or the system does not map it.
  static std::optional<Mapping> of(const FileDescriptor& file, std::int64_t offset, std::int64_t bytes, Lost lost);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  const std::byte* data() const { return data_; }
  std::int64_t size() const { return bytes_; }
  /// Brings all pages into memory, so that looking at them waits for nothing. 0, or the system's error number.
  int load() const;

 private:
  Mapping() = default;
  std::byte* pages_ = nullptr;  // data_ at a page's start
  const std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0, page_bytes_ = 0;
  int watched_ = -1;  // its place in what the handler of SIGBUS knows
  Lost lost_;
};

/// Installs the handler of SIGBUS, once: to be called before the first mapping, while nobody has handlers of his own
/// for a time, who would put the old one back. False if that fails.
bool can_mend_mappings();

/// For a handler of SIGBUS that took the place of ours: whether the address was one of a mapping, which now has zeros
/// there.
bool mend_mapping(const void* address) noexcept;

}  // namespace longscan::io
