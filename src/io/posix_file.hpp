// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <utility>

/// Files through POSIX calls, each return code looked at. Failures throw Error(file_io) with the system's reason.
/// No HDF5 here.
namespace longscan::io {

/// A file descriptor, closed when it goes out of scope. Move-only.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// The folder that holds `path`.
std::string folder_of(const std::string& path);

/// open(2); "cannot <verb> '<path>': reason".
FileDescriptor open_file(const std::string& path, int flags, const std::string& verb);

/// Creates `path` anew and locks it for as long as the descriptor lives; a file of that name that a dead process left
/// is removed if it begins with `begins` (as far as that was written), else refused. Throws if another process (or
/// another descriptor of this one) holds the lock: `output` names what it is writing. Where the file system knows no
/// locks, none is held.
FileDescriptor create_locked(const std::string& path, const std::string& output, const std::string& begins);

/// Removes a file that a dead process left, if it is there; one that is locked, begins otherwise, or cannot be removed,
/// stays.
void remove_abandoned(const std::string& path, const std::string& begins) noexcept;

/// Opens `path`, which is there, for reading and writing and locks it likewise.
FileDescriptor open_locked(const std::string& path, const std::string& output);

/// A file in memory, without a name. `purpose` is for the message.
FileDescriptor open_memory(const std::string& purpose);

/// Whether the file is on a disk or in the memory of this node, not behind a network.
bool is_of_this_node(const FileDescriptor& file);
/// Whether files in this folder take memory (tmpfs).
bool takes_memory(const std::string& folder);

/// Whether `path` is the very file that the descriptor has open.
bool is_same_file(const FileDescriptor& file, const std::string& path);

std::int64_t file_size(const FileDescriptor& file, const std::string& path);

/// Throws unless this process may write files of `bytes` bytes (RLIMIT_FSIZE).
void require_size_allowed(const std::string& path, std::int64_t bytes);

/// Makes sure that the disk has room for `bytes` bytes in a new file, which becomes that long, and for `slack` bytes
/// after them.
void reserve(const FileDescriptor& file, const std::string& path, std::int64_t bytes, std::int64_t slack);

/// pwrite(2) until all is written; pieces of at most 1 GiB. `what` is for the message: "dataset '/o' of 'OUT.h5'".
void write_all(const FileDescriptor& file, const void* data, std::int64_t bytes, std::int64_t offset,
               const std::string& what);

/// `path`, which `file` has open, for `write_direct`; none where it is not on a disk of this node.
FileDescriptor open_direct(const FileDescriptor& file, const std::string& path);

/// As write_all. Whole pages of much data go from memory to the disk, not through the system's cache, which would cost
/// a copy and new pages: where `direct` is open and `data` + n lies at a multiple of 512 if `offset` + n does at one of
/// 4096. Returns when the disk has taken them.
void write_direct(const FileDescriptor& direct, const FileDescriptor& file, const void* data, std::int64_t bytes,
                  std::int64_t offset, const std::string& what);

/// pread(2) until all is read; false if the file ends before that.
bool read_all(const FileDescriptor& file, void* data, std::int64_t bytes, std::int64_t offset, const std::string& what);

/// ftruncate(2).
void cut(const FileDescriptor& file, const std::string& path, std::int64_t bytes);

/// Copies bytes from one file to the same place in another.
void copy_bytes(const FileDescriptor& from, const FileDescriptor& to, std::int64_t offset, std::int64_t bytes,
                const std::string& what);

/// The system may begin to bring these bytes to disk, so that `sync_file` has less to wait for. Errors come from there.
void begin_sync(const FileDescriptor& file, std::int64_t offset, std::int64_t bytes);

/// fsync(2).
void sync_file(const FileDescriptor& file, const std::string& path);

/// fsync(2) of the folder that holds `path`, where the system lets us.
void sync_folder_of(const std::string& path);

}  // namespace longscan::io
