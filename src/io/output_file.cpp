// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>

#include "io/hdf5_types.hpp"
#include "io/posix_file.hpp"
#include "io/slab.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

using io::check;
using io::checked;
using io::Hid;

namespace {

constexpr std::int64_t kSlackBytes = 64 << 10;  // room for the attributes that `commit` adds
constexpr std::size_t kMarkBytes = 16;          // at the end of a temporary file
constexpr hsize_t kAlignedFrom = 64 << 10;      // data of this size starts
constexpr hsize_t kAlignment = 4096;            // at a page
constexpr std::int64_t kHeaderBytes = 4096;     // at most, of a dataset and the groups that it is in

void check_shapes(const std::string& path, const std::vector<OutputDataset>& datasets) {
  for (const OutputDataset& d : datasets)
    if (io::count_elements(d.shape, static_cast<std::int64_t>(size_of(d.type))) < 0)
      throw Error(ExitCode::file_io,
                  "the dataset '" + d.path + "' of '" + path + "' would have more bytes than 64 bits can count");
}

/// The bytes from the start of the file to the end of the last dataset.
std::int64_t end_of_data(const std::vector<OutputDataset>& datasets) {
  std::int64_t end = 0;
  for (const OutputDataset& d : datasets)
    if (d.offset >= 0) end = std::max(end, d.offset + d.elements() * static_cast<std::int64_t>(size_of(d.type)));
  return end;
}

void create_dataset(hid_t file, OutputDataset& dataset, const std::string& output) {
  const std::string what = "cannot create the dataset '" + dataset.path + "' of '" + output + "'";
  const std::vector<hsize_t> extent(dataset.shape.begin(), dataset.shape.end());
  const Hid space = checked(extent.empty() ? H5Screate(H5S_SCALAR)
                                           : H5Screate_simple(static_cast<int>(extent.size()), extent.data(), nullptr),
                            ExitCode::internal, what);
  const Hid links = checked(H5Pcreate(H5P_LINK_CREATE), ExitCode::internal, what);
  check(H5Pset_create_intermediate_group(links, 1), ExitCode::internal, what);
  check(H5Pset_char_encoding(links, H5T_CSET_UTF8), ExitCode::internal, what);
  const Hid creation = checked(H5Pcreate(H5P_DATASET_CREATE), ExitCode::internal, what);
  check(H5Pset_layout(creation, H5D_CONTIGUOUS), ExitCode::internal, what);
  check(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), ExitCode::internal, what);
  check(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), ExitCode::internal, what);
  check(H5Pset_obj_track_times(creation, false), ExitCode::internal, what);  // the same results, the same bytes
  const Hid type = dataset.integers ? Hid(H5Tcopy(H5T_NATIVE_INT64)) : io::make_type(dataset.type);
  const Hid id = checked(H5Dcreate2(file, dataset.path.c_str(), type, space, links, creation, H5P_DEFAULT),
                         ExitCode::file_io, what);
  dataset.offset = -1;
  if (dataset.elements() == 0) return;

  // H5Dget_offset has an answer for unallocated datasets too, and not always the undefined one.
  H5D_space_status_t status = H5D_SPACE_STATUS_ERROR;
  check(H5Dget_space_status(id, &status), ExitCode::file_io, what);
  const haddr_t offset = H5Dget_offset(id);
  if (status != H5D_SPACE_STATUS_ALLOCATED || offset == HADDR_UNDEF)
    throw Error(ExitCode::file_io, what + ": HDF5 allocated no space for it");
  dataset.offset = static_cast<std::int64_t>(offset);
}

// HDF5 1.10 does not survive a disk that fails: a file that it cannot flush crashes the program at its end. So HDF5
// writes the structure (all but the data, which is a hole) to memory, and we copy it to the disk.

/// The name under which HDF5 opens a file of ours that has no name.
std::string name_of_memory(const io::FileDescriptor& memory) { return "/proc/self/fd/" + std::to_string(memory.get()); }

/// How it opens it: through stdio, as the default driver looks for the real path behind such a name.
Hid access_to_memory(const std::string& what) {
  Hid access = checked(H5Pcreate(H5P_FILE_ACCESS), ExitCode::internal, what);
  check(H5Pset_fapl_stdio(access), ExitCode::internal, what);
  check(H5Pset_alignment(access, kAlignedFrom, kAlignment), ExitCode::internal, what);
  return access;
}

void write_attributes(hid_t file, const Attributes& attributes, const std::string& output) {
  for (const auto& [key, value] : attributes) {
    const auto slash = key.rfind('/');
    if (slash == std::string::npos) {
      io::write_attribute(file, key, value, output);
    } else {
      const std::string object = key.substr(0, std::max<std::size_t>(slash, 1)), what = "cannot open " + object;
      const Hid id = checked(H5Oopen(file, object.c_str(), H5P_DEFAULT), ExitCode::internal, what);
      io::write_attribute(id, key.substr(slash + 1), value, output);
    }
  }
}

/// The bytes of the file, rounded up.
std::int64_t bytes_at_most(const std::vector<OutputDataset>& datasets) {
  std::int64_t bytes = kSlackBytes + static_cast<std::int64_t>(datasets.size() * (kAlignment + kHeaderBytes));
  for (const OutputDataset& d : datasets)
    if (__builtin_add_overflow(bytes, d.elements() * static_cast<std::int64_t>(size_of(d.type)), &bytes))
      return std::numeric_limits<std::int64_t>::max();
  return bytes;
}

/// Everything but the data, in memory. Sets the offsets of the datasets.
io::FileDescriptor make_structure(const std::string& output, std::vector<OutputDataset>& datasets,
                                  const Attributes& attributes) {
  io::require_size_allowed(output, bytes_at_most(datasets));  // the file in memory meets the limit too
  const io::Hdf5Session session;
  const std::string what = "cannot lay out '" + output + "'";
  io::FileDescriptor memory = io::open_memory(output);
  Hid file = checked(H5Fcreate(name_of_memory(memory).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access_to_memory(what)),
                     ExitCode::file_io, what);
  for (OutputDataset& d : datasets) create_dataset(file, d, output);
  write_attributes(file, attributes, output);
  if (!file.close()) throw Error(ExitCode::file_io, what + ": " + io::hdf5_reason());
  return memory;
}

/// Not from the clock or the process number: nodes that share a file system may agree in both.
std::string new_mark() {
  std::random_device device;
  std::array<char, kMarkBytes + 1> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x", static_cast<unsigned>(device()), static_cast<unsigned>(device()));
  return text.data();
}

/// Copies what lies between the datasets.
void copy_structure(const io::FileDescriptor& memory, const io::FileDescriptor& file, const std::string& name,
                    const std::vector<OutputDataset>& datasets) {
  std::vector<std::pair<std::int64_t, std::int64_t>> data;  // begin and end
  for (const OutputDataset& d : datasets)
    if (d.offset >= 0)
      data.emplace_back(d.offset, d.offset + d.elements() * static_cast<std::int64_t>(size_of(d.type)));
  const std::int64_t size = io::file_size(memory, name);
  data.emplace_back(size, size);
  std::sort(data.begin(), data.end());
  std::int64_t done = 0;
  for (const auto& [begin, end] : data) {
    io::copy_bytes(memory, file, done, begin - done, "'" + name + "'");
    done = end;
  }
}

}  // namespace

std::int64_t OutputDataset::elements() const { return io::count_elements(shape); }

struct OutputFile::Impl {
  std::string path;
  std::string part;
  std::string mark;
  std::vector<OutputDataset> datasets;
  io::FileDescriptor file;       // in the creator it also holds the lock
  io::FileDescriptor direct;     // the same, for large writes
  io::FileDescriptor structure;  // in the creator: all but the data
  bool owner = false;            // of a temporary file that is neither committed nor abandoned
  bool kept = false;             // not to be removed
  bool added = false;            // attributes, to the structure alone

  ~Impl() { remove(); }

  void remove() noexcept {
    if (owner && !kept && io::is_same_file(file, part)) unlink(part.c_str());
    owner = false;
  }

  void require_owner(const char* call) const {
    if (!owner)
      throw Error(ExitCode::internal, std::string(call) + " of '" + path + "' by one who did not create it, or twice");
    if (!io::is_same_file(file, part))
      throw Error(ExitCode::file_io, "'" + part + "' was removed or replaced while it was written");
  }
};

OutputFile::OutputFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OutputFile::OutputFile(OutputFile&&) noexcept = default;
OutputFile& OutputFile::operator=(OutputFile&&) noexcept = default;
OutputFile::~OutputFile() = default;

std::string OutputFile::temporary_name(const std::string& path) { return path + ".part"; }

OutputFile OutputFile::create(const std::string& path, std::vector<OutputDataset> datasets,
                              const Attributes& attributes) {
  check_shapes(path, datasets);
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw Error(ExitCode::file_io, "cannot create '" + path + "': it is a directory");
  if (std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored))
    throw Error(ExitCode::file_io, "cannot replace '" + path + "': it is not a regular file");

  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->part = temporary_name(path);
  impl->datasets = std::move(datasets);
  impl->file = io::create_locked(impl->part, path, "\x89HDF\r\n\x1a\n");
  impl->owner = true;

  impl->structure = make_structure(path, impl->datasets, attributes);
  const std::int64_t size = io::file_size(impl->structure, path);
  io::reserve(impl->file, impl->part, size, kSlackBytes);
  copy_structure(impl->structure, impl->file, impl->part, impl->datasets);
  impl->mark = new_mark();
  io::write_all(impl->file, impl->mark.data(), kMarkBytes, size, "'" + impl->part + "'");
  if (!io::is_of_this_node(impl->file)) io::sync_file(impl->file, impl->part);  // other nodes are to see it
  impl->direct = io::open_direct(impl->file, impl->part);
  return OutputFile(std::move(impl));
}

OutputFile OutputFile::reopen(const std::string& path, std::vector<OutputDataset> datasets,
                              const Attributes& attributes, const std::string& mark) {
  check_shapes(path, datasets);
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->part = temporary_name(path);
  impl->datasets = std::move(datasets);
  impl->mark = mark;
  impl->file = io::open_locked(impl->part, path);
  impl->structure = make_structure(path, impl->datasets, attributes);
  const std::int64_t size = io::file_size(impl->structure, path);
  std::string found(kMarkBytes, '\0');
  const bool whole = io::file_size(impl->file, impl->part) == size + static_cast<std::int64_t>(kMarkBytes) &&
                     io::read_all(impl->file, found.data(), kMarkBytes, size, "'" + impl->part + "'");
  if (!whole || found != mark)
    throw Error(ExitCode::bad_input, "'" + impl->part + "' is not the partial output that was left");
  copy_structure(impl->structure, impl->file, impl->part, impl->datasets);
  impl->owner = impl->kept = true;
  impl->direct = io::open_direct(impl->file, impl->part);
  return OutputFile(std::move(impl));
}

OutputFile OutputFile::join(const std::string& path, std::vector<OutputDataset> datasets) {
  check_shapes(path, datasets);
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->part = temporary_name(path);
  impl->datasets = std::move(datasets);
  impl->file = io::open_file(impl->part, O_WRONLY, "write");
  const std::int64_t size = io::file_size(impl->file, impl->part), end = end_of_data(impl->datasets);
  if (size < end)
    throw Error(ExitCode::file_io, "'" + impl->part + "' has " + std::to_string(size) + " bytes here and " +
                                       std::to_string(end) +
                                       " where it was created; is its directory shared by all nodes?");
  io::require_size_allowed(path, size);
  impl->direct = io::open_direct(impl->file, impl->part);
  return OutputFile(std::move(impl));
}

const std::vector<OutputDataset>& OutputFile::datasets() const { return impl_->datasets; }

const OutputDataset& OutputFile::dataset(const std::string& path) const {
  for (const OutputDataset& d : impl_->datasets)
    if (d.path == path) return d;
  throw Error(ExitCode::internal, "no dataset '" + path + "' in the output '" + impl_->path + "'");
}

void OutputFile::write(const OutputDataset& dataset, const Slab& slab, const void* data) {
  const std::string what = "the dataset '" + dataset.path + "' of '" + impl_->part + "'";
  io::check_slab(what, dataset.shape, slab);
  if (io::count_elements(slab.count) == 0) return;
  if (dataset.offset < 0) throw Error(ExitCode::internal, what + " has no place in the file");
  const auto size = static_cast<std::int64_t>(size_of(dataset.type));
  const auto* bytes = static_cast<const char*>(data);
  std::int64_t begin = 0, end = 0;
  // What lies between two runs belongs to other ranks: each run is a write of its own, none is read and written back.
  io::for_each_run(dataset.shape, slab, [&](std::int64_t in_dataset, std::int64_t in_slab, std::int64_t elements) {
    if (in_slab == 0) begin = dataset.offset + in_dataset * size;
    end = dataset.offset + (in_dataset + elements) * size;
    io::write_direct(impl_->direct, impl_->file, bytes + in_slab * size, elements * size,
                     dataset.offset + in_dataset * size, what);
  });
  io::begin_sync(impl_->file, begin, end - begin);
}

bool OutputFile::is_of_one_node() const { return io::is_of_this_node(impl_->file); }

void OutputFile::sync() { io::sync_file(impl_->file, impl_->part); }

void OutputFile::add(const Attributes& attributes) {
  impl_->require_owner("commit");
  if (attributes.empty()) return;
  const io::Hdf5Session session;
  const std::string what = "cannot finish '" + impl_->part + "'";
  Hid file = checked(H5Fopen(name_of_memory(impl_->structure).c_str(), H5F_ACC_RDWR, access_to_memory(what)),
                     ExitCode::file_io, what);
  write_attributes(file, attributes, impl_->path);
  if (!file.close()) throw Error(ExitCode::file_io, what + ": " + io::hdf5_reason());
  impl_->added = true;
}

void OutputFile::commit(const Attributes& attributes) {
  impl_->require_owner("commit");
  add(attributes);
  if (impl_->added) copy_structure(impl_->structure, impl_->file, impl_->part, impl_->datasets);
  io::cut(impl_->file, impl_->part, io::file_size(impl_->structure, impl_->path));  // the mark goes
  sync();
  if (std::rename(impl_->part.c_str(), impl_->path.c_str()) != 0)
    throw Error(ExitCode::file_io,
                "cannot rename '" + impl_->part + "' to '" + impl_->path + "': " + std::strerror(errno));
  impl_->owner = false;
  impl_->file = {};  // and with it the lock
  io::sync_folder_of(impl_->path);
}

void OutputFile::abandon() noexcept {
  if (!impl_) return;
  impl_->kept = false;
  impl_->remove();
}

void OutputFile::keep() noexcept {
  if (impl_) impl_->kept = true;
}

const std::string& OutputFile::mark() const { return impl_->mark; }

}  // namespace longscan
