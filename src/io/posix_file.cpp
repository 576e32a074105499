// SPDX-License-Identifier: Apache-2.0
#include "io/posix_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "io/slab.hpp"
#include "longscan/error.hpp"

namespace longscan::io {
namespace {

constexpr int kCreateAttempts = 100;
constexpr std::int64_t kCopyBytes = 1 << 20;
// Past the system's cache: pages of the file, blocks of a disk in memory, and how much is worth it.
constexpr std::int64_t kDirectPage = 4096, kDirectBlock = 512, kDirectLeast = 1 << 20, kDirectPiece = 16 << 20;

constexpr std::uint32_t kExt = 0xef53, kXfs = 0x58465342, kBtrfs = 0x9123683e, kTmpfs = 0x01021994;

/// By the number of its kind; 0 if the system does not say.
std::uint32_t file_system_of(const FileDescriptor& file) {
  struct statfs found {};
  return fstatfs(file.get(), &found) == 0 ? static_cast<std::uint32_t>(found.f_type) : 0;
}

/// A network's file systems keep written data in the client's memory for good reasons.
bool is_on_a_local_disk(const FileDescriptor& file) {
  const std::uint32_t type = file_system_of(file);
  return type == kExt || type == kXfs || type == kBtrfs;
}

[[noreturn]] void fail(const std::string& what, int code) {
  throw Error(ExitCode::file_io, what + ": " + std::strerror(code));
}

/// Repeats a call that a signal interrupted.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

enum class Lock { held, taken_by_other };

Lock lock(const FileDescriptor& file) {
  const bool locked = uninterrupted([&] { return flock(file.get(), LOCK_EX | LOCK_NB); }) == 0;
  return !locked && errno == EWOULDBLOCK ? Lock::taken_by_other : Lock::held;
}

[[noreturn]] void fail_for_room(const FileDescriptor& file, const std::string& path, std::int64_t bytes, int code) {
  std::string message = "no room for '" + path + "', which takes " + std::to_string(bytes) + " bytes";
  struct statvfs system {};
  if (fstatvfs(file.get(), &system) == 0)
    message += " (" + std::to_string(static_cast<std::int64_t>(system.f_bavail * system.f_frsize)) + " are free)";
  fail(message, code);
}

[[noreturn]] void fail_to_open(const std::string& verb, const std::string& path, int code) {
  std::error_code ignored;
  const std::string what = "cannot " + verb + " '" + path + "'";
  if (code == ENOENT && !std::filesystem::is_directory(folder_of(path), ignored))
    throw Error(ExitCode::file_io, what + ": there is no directory '" + folder_of(path) + "'");
  fail(what, code);
}

Error busy_error(const std::string& path, const std::string& output) {
  return {ExitCode::file_io,
          "another process is writing '" + output + "' (it holds '" + path + "'); wait for it, or give another name"};
}

/// Whether the file begins with `text`, or as much of that as was written; zeros stand for what was not.
bool begins_with(const FileDescriptor& file, const std::string& text) {
  std::string found(text.size(), '\0');
  const auto n = uninterrupted([&] { return pread(file.get(), found.data(), found.size(), 0); });
  found.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text.rfind(found, 0) == 0 || found.find_first_not_of('\0') == std::string::npos;
}

/// Removes `path`, unless another process holds its lock: then false. A file left by a dead process is not used again:
/// others of its job may still write into it.
bool remove_left(const std::string& path, const std::string& begins) {
  const FileDescriptor left(uninterrupted([&] { return open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC); }));
  if (!left && errno == ENOENT) return true;
  if (!left) fail("cannot replace '" + path + "'", errno);
  if (lock(left) == Lock::taken_by_other) return false;
  if (!begins_with(left, begins))
    throw Error(ExitCode::usage,
                "'" + path + "' is in the way, and is not a partial file of longscan; move it or give another name");
  if (is_same_file(left, path) && unlink(path.c_str()) != 0) fail("cannot remove '" + path + "'", errno);
  return true;
}

/// fallocate(2); false where the file system has no such thing.
bool allocate(const FileDescriptor& file, const std::string& path, int mode, std::int64_t bytes) {
  if (uninterrupted([&] { return fallocate(file.get(), mode, 0, bytes); }) == 0) return true;
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) fail_for_room(file, path, bytes, errno);
  return false;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

FileDescriptor open_file(const std::string& path, int flags, const std::string& verb) {
  FileDescriptor file(uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC); }));
  if (!file) fail_to_open(verb, path, errno);
  return file;
}

FileDescriptor create_locked(const std::string& path, const std::string& output, const std::string& begins) {
  const Error busy = busy_error(path, output);
  for (int attempt = 0; attempt < kCreateAttempts; ++attempt) {
    if (!remove_left(path, begins)) throw busy;
    FileDescriptor file(uninterrupted([&] { return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }));
    if (!file && errno != EEXIST) fail_to_open("create", path, errno);
    if (!file) continue;
    if (lock(file) == Lock::taken_by_other) throw busy;
    // Between our open and our lock another process may have taken ours for one that was left.
    if (is_same_file(file, path)) return file;
  }
  throw busy;
}

void remove_abandoned(const std::string& path, const std::string& begins) noexcept {
  try {
    remove_left(path, begins);
  } catch (const Error&) {  // it stays
  }
}

FileDescriptor open_locked(const std::string& path, const std::string& output) {
  FileDescriptor file = open_file(path, O_RDWR, "continue");
  if (lock(file) == Lock::taken_by_other) throw busy_error(path, output);
  return file;
}

FileDescriptor open_memory(const std::string& purpose) {
  FileDescriptor memory(memfd_create("longscan", MFD_CLOEXEC));
  if (!memory) fail("no file in memory for '" + purpose + "'", errno);
  return memory;
}

bool takes_memory(const std::string& folder) {
  struct statfs system {};
  return statfs(folder.c_str(), &system) == 0 && static_cast<std::uint32_t>(system.f_type) == kTmpfs;
}

bool is_of_this_node(const FileDescriptor& file) { return is_on_a_local_disk(file) || file_system_of(file) == kTmpfs; }

bool is_same_file(const FileDescriptor& file, const std::string& path) {
  struct stat ours {
  }, theirs{};
  return fstat(file.get(), &ours) == 0 && lstat(path.c_str(), &theirs) == 0 && ours.st_dev == theirs.st_dev &&
         ours.st_ino == theirs.st_ino;
}

std::int64_t file_size(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("cannot look at '" + path + "'", errno);
  return status.st_size;
}

void require_size_allowed(const std::string& path, std::int64_t bytes) {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      static_cast<std::uint64_t>(bytes) <= limit.rlim_cur)
    return;
  throw Error(ExitCode::file_io, "'" + path + "' takes up to " + std::to_string(bytes) +
                                     " bytes, but the limit of file sizes is " + std::to_string(limit.rlim_cur) +
                                     " bytes (ulimit -f); raise it");
}

void reserve(const FileDescriptor& file, const std::string& path, std::int64_t bytes, std::int64_t slack) {
  // Asked first: some file systems take all there is from everybody before they say no.
  struct statvfs system {};
  if (fstatvfs(file.get(), &system) == 0 && system.f_frsize > 0 &&
      static_cast<std::uint64_t>(bytes + slack) / system.f_frsize > system.f_bavail)
    fail_for_room(file, path, bytes, ENOSPC);
  if (allocate(file, path, 0, bytes)) {
    if (slack > 0) allocate(file, path, FALLOC_FL_KEEP_SIZE, bytes + slack);
  } else if (uninterrupted([&] { return ftruncate(file.get(), bytes); }) != 0) {
    // Without fallocate the look at what is free has to do: glibc's posix_fallocate would write into every block.
    fail("cannot extend '" + path + "'", errno);
  }
}

void write_all(const FileDescriptor& file, const void* data, std::int64_t bytes, std::int64_t offset,
               const std::string& what) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto piece = static_cast<std::size_t>(std::min(bytes, kPieceBytes));
    const ssize_t written = uninterrupted([&] { return pwrite(file.get(), next, piece, offset); });
    if (written < 0) fail("cannot write " + what, errno);
    if (written == 0) throw Error(ExitCode::file_io, "cannot write " + what + ": the system takes no more bytes");
    next += written;
    offset += written;
    bytes -= written;
  }
}

FileDescriptor open_direct(const FileDescriptor& file, const std::string& path) {
  if (!is_on_a_local_disk(file)) return {};
  FileDescriptor direct(uninterrupted([&] { return open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC); }));
  return direct && is_same_file(file, path) ? std::move(direct) : FileDescriptor();
}

void write_direct(const FileDescriptor& direct, const FileDescriptor& file, const void* data, std::int64_t bytes,
                  std::int64_t offset, const std::string& what) {
  const auto* next = static_cast<const char*>(data);
  const std::int64_t head = (kDirectPage - offset % kDirectPage) % kDirectPage;
  std::int64_t whole = (bytes - head) / kDirectPage * kDirectPage;
  if (!direct || whole < kDirectLeast || reinterpret_cast<std::uintptr_t>(next + head) % kDirectBlock != 0)
    return write_all(file, data, bytes, offset, what);
  write_all(file, next, head, offset, what);
  next += head, offset += head, bytes -= head;
  while (whole > 0) {
    const auto piece = static_cast<std::size_t>(std::min(whole, kDirectPiece));
    const ssize_t written = uninterrupted([&] { return pwrite(direct.get(), next, piece, offset); });
    if (written <= 0 || written % kDirectPage != 0) break;  // the rest goes as it can, or says why not
    next += written, offset += written, bytes -= written, whole -= written;
  }
  write_all(file, next, bytes, offset, what);
}

bool read_all(const FileDescriptor& file, void* data, std::int64_t bytes, std::int64_t offset,
              const std::string& what) {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const auto piece = static_cast<std::size_t>(std::min(bytes, kPieceBytes));
    const ssize_t got = uninterrupted([&] { return pread(file.get(), next, piece, offset); });
    if (got < 0) fail("cannot read " + what, errno);
    if (got == 0) return false;
    next += got;
    offset += got;
    bytes -= got;
  }
  return true;
}

void cut(const FileDescriptor& file, const std::string& path, std::int64_t bytes) {
  if (uninterrupted([&] { return ftruncate(file.get(), bytes); }) != 0) fail("cannot cut '" + path + "'", errno);
}

void copy_bytes(const FileDescriptor& from, const FileDescriptor& to, std::int64_t offset, std::int64_t bytes,
                const std::string& what) {
  std::vector<char> buffer(static_cast<std::size_t>(std::min(bytes, kCopyBytes)));
  while (bytes > 0) {
    const auto piece = std::min<std::size_t>(buffer.size(), static_cast<std::size_t>(bytes));
    const ssize_t got = uninterrupted([&] { return pread(from.get(), buffer.data(), piece, offset); });
    if (got <= 0) fail("cannot copy " + what, got < 0 ? errno : EIO);
    write_all(to, buffer.data(), got, offset, what);
    offset += got;
    bytes -= got;
  }
}

void begin_sync(const FileDescriptor& file, std::int64_t offset, std::int64_t bytes) {
  (void)sync_file_range(file.get(), offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void sync_file(const FileDescriptor& file, const std::string& path) {
  if (uninterrupted([&] { return fsync(file.get()); }) != 0) fail("cannot bring '" + path + "' to disk", errno);
}

void sync_folder_of(const std::string& path) {
  const FileDescriptor folder(open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return;  // a folder that may be written but not read
  if (uninterrupted([&] { return fsync(folder.get()); }) != 0 && errno != EINVAL && errno != ENOTSUP)
    fail("cannot bring the directory of '" + path + "' to disk", errno);
}

}  // namespace longscan::io
