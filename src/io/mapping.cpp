// SPDX-License-Identifier: Apache-2.0
#include "io/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>

namespace longscan::io {
namespace {

/// What the handler looks at: lock-free, without memory to take.
struct Watched {
  std::atomic<bool> taken = false;
  std::atomic<std::uintptr_t> begin = 0, end = 0;
  std::atomic<std::atomic<bool>*> lost = nullptr;
};
std::array<Watched, 64> watched;
struct sigaction before;

extern "C" void no_such_page(int signal, siginfo_t* info, void*) {
  const int kept = errno;
  if (info->si_code <= 0 || !mend_mapping(info->si_addr)) {  // sent by somebody, or not of ours
    sigaction(signal, &before, nullptr);
    if (info->si_code <= 0) raise(signal);  // else the same access fails again
  }
  errno = kept;
}

std::uintptr_t page_size() {
  static const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

bool can_mend_mappings() {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = no_such_page;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &before) == 0;
  }();
  return installed;
}

bool mend_mapping(const void* address) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (Watched& w : watched) {
    const std::uintptr_t end = w.end;
    if (at < w.begin || at >= end) continue;
    const std::uintptr_t from = at / page_size() * page_size();
    w.lost.load()->store(true);
    return mmap(reinterpret_cast<void*>(from), end - from, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) !=
           MAP_FAILED;
  }
  return false;
}

std::optional<Mapping> Mapping::of(const FileDescriptor& file, std::int64_t offset, std::int64_t bytes, Lost lost) {
#ifdef MADV_POPULATE_READ
  if (bytes <= 0 || !is_of_this_node(file)) return std::nullopt;
  const auto skip = offset % static_cast<std::int64_t>(page_size());
  Mapping mapping;
  for (std::size_t i = 0; i < watched.size() && mapping.watched_ < 0; ++i)
    if (!watched[i].taken.exchange(true)) mapping.watched_ = static_cast<int>(i);
  if (mapping.watched_ < 0) return std::nullopt;
  void* pages = mmap(nullptr, static_cast<std::size_t>(skip + bytes), PROT_READ, MAP_SHARED, file.get(), offset - skip);
  if (pages == MAP_FAILED) {
    watched[mapping.watched_].taken = false;
    mapping.watched_ = -1;
    return std::nullopt;
  }
  madvise(pages, static_cast<std::size_t>(skip + bytes), MADV_SEQUENTIAL);  // what is not in the cache, in long runs
  mapping.pages_ = static_cast<std::byte*>(pages), mapping.page_bytes_ = skip + bytes;
  mapping.data_ = mapping.pages_ + skip, mapping.bytes_ = bytes, mapping.lost_ = std::move(lost);
  Watched& w = watched[mapping.watched_];
  const auto begin = reinterpret_cast<std::uintptr_t>(pages);
  w.lost = mapping.lost_.get(), w.begin = begin;
  w.end = begin + (static_cast<std::uintptr_t>(skip + bytes) + page_size() - 1) / page_size() * page_size();
  return mapping;
#else
  (void)file, (void)offset, (void)bytes, (void)lost;
  return std::nullopt;
#endif
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(pages_, other.pages_), std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_), std::swap(page_bytes_, other.page_bytes_);
  std::swap(watched_, other.watched_), std::swap(lost_, other.lost_);
  return *this;
}

Mapping::~Mapping() {
  if (watched_ < 0) return;
  Watched& w = watched[watched_];
  w.end = 0, w.begin = 0;
  munmap(pages_, static_cast<std::size_t>(page_bytes_));
  w.lost = nullptr;
  w.taken = false;
}

int Mapping::load() const {
#ifdef MADV_POPULATE_READ
  while (madvise(pages_, static_cast<std::size_t>(page_bytes_), MADV_POPULATE_READ) != 0) {
    if (errno == EINVAL) return 0;  // an older system, which brings them as they are looked at
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
#endif
  return 0;
}

}  // namespace longscan::io
