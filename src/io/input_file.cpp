// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>

#include "io/float_bits.hpp"
#include "io/hdf5_types.hpp"
#include "io/mapping.hpp"
#include "io/posix_file.hpp"
#include "io/slab.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

using io::checked;
using io::Hdf5Session;
using io::Hid;

namespace {

constexpr std::size_t kOpenDatasets = 16;
constexpr std::size_t kSmallCache = 4 << 20, kLargestCache = 64 << 20;  // bytes of chunks held for a dataset
constexpr std::size_t kTinyChunk = 64 << 10;
constexpr std::int64_t kMappedLeast = 1 << 20;

std::string absolute(const std::string& path) {
  std::string result = path.empty() || path[0] != '/' ? "/" + path : path;
  while (result.size() > 1 && result.back() == '/') result.pop_back();
  return result;
}

std::string join_path(const std::string& group, const std::string& name) {
  return group == "/" ? "/" + name : group + "/" + name;
}

/// The names of the links in a group.
std::vector<std::string> list_links(hid_t file, const std::string& group, const std::string& file_name) {
  const Hid id(H5Gopen2(file, group.c_str(), H5P_DEFAULT));
  if (!id) throw Error(ExitCode::bad_input, "there is no group '" + group + "' in '" + file_name + "'");
  std::vector<std::string> names;
  hsize_t position = 0;
  const auto add = [](hid_t, const char* name, const H5L_info_t*, void* data) -> herr_t {
    static_cast<std::vector<std::string>*>(data)->emplace_back(name);
    return 0;
  };
  io::check(H5Literate(id, H5_INDEX_NAME, H5_ITER_INC, &position, add, &names), ExitCode::bad_input,
            "cannot list the group '" + group + "' of '" + file_name + "'");
  return names;
}

enum class Kind { none, group, dataset, other };

struct ObjectIdentity {
  Kind kind = Kind::none;
  std::string address;  // the same for two names of one object
};

ObjectIdentity identify(hid_t file, const std::string& path) {
  ObjectIdentity result;
#if H5_VERSION_GE(1, 12, 0)
  H5O_info2_t info{};
  if (H5Oget_info_by_name3(file, path.c_str(), &info, H5O_INFO_BASIC, H5P_DEFAULT) < 0) return result;
  result.address.assign(reinterpret_cast<const char*>(&info.token), sizeof info.token);
#else
  H5O_info_t info{};
  if (H5Oget_info_by_name2(file, path.c_str(), &info, H5O_INFO_BASIC, H5P_DEFAULT) < 0) return result;
  result.address = std::to_string(info.addr);
#endif
  result.address += "@" + std::to_string(info.fileno);
  result.kind = info.type == H5O_TYPE_GROUP ? Kind::group : info.type == H5O_TYPE_DATASET ? Kind::dataset : Kind::other;
  return result;
}

/// What a link leads to that cannot be opened, for `reason`.
std::string describe_link(hid_t file, const std::string& path, const std::string& reason) {
  H5L_info_t link{};
  if (H5Lget_info(file, path.c_str(), &link, H5P_DEFAULT) < 0 || link.type == H5L_TYPE_HARD)
    return "dataset '" + path + "' cannot be opened: " + reason;
  std::string target(link.u.val_size, '\0');
  if (H5Lget_val(file, path.c_str(), target.data(), target.size(), H5P_DEFAULT) < 0)
    return "dataset '" + path + "' is a link that cannot be read: " + reason;
  const char *other = nullptr, *object = target.c_str();
  if (link.type == H5L_TYPE_EXTERNAL && H5Lunpack_elink_val(target.data(), target.size(), nullptr, &other, &object) < 0)
    return "dataset '" + path + "' is a link that cannot be read: " + reason;
  return "dataset '" + path + "' is a link to '" + object + "'" +
         (other != nullptr ? std::string(" of the file '") + other + "'" : "") + ", which cannot be opened (" + reason +
         ")";
}

/// Throws unless the file is there, readable, and starts like an HDF5 file.
io::FileDescriptor open_signed(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw Error(ExitCode::file_io, "cannot open '" + path + "': it is not a regular file");
  io::FileDescriptor file = io::open_file(path, O_RDONLY, "open");
  constexpr std::array<char, 8> signature{'\x89', 'H', 'D', 'F', '\r', '\n', '\x1a', '\n'};
  const std::int64_t size = io::file_size(file, path);
  for (std::int64_t at = 0; at < size; at = at == 0 ? 512 : 2 * at) {  // a user block may come first
    std::array<char, 8> found{};
    if (pread(file.get(), found.data(), found.size(), at) == 8 && found == signature) return file;
  }
  throw Error(ExitCode::bad_input, "'" + path + "' is not an HDF5 file" + (size == 0 ? ": it is empty" : ""));
}

/// Bytes of chunks to hold for a chunked dataset. A compressed chunk that two windows share is unpacked once. Plain
/// chunks of whole rows are read straight to where they belong; of parts of rows HDF5 would read each run by itself,
/// 10 times slower than a whole chunk into its cache.
std::size_t choose_cache(hid_t dataset, hid_t creation, std::size_t element_bytes) {
  std::array<hsize_t, H5S_MAX_RANK> chunk{}, extent{};
  const int rank = H5Pget_chunk(creation, H5S_MAX_RANK, chunk.data());
  const Hid space(H5Dget_space(dataset));
  H5Sget_simple_extent_dims(space, extent.data(), nullptr);
  std::size_t chunk_bytes = element_bytes;
  bool whole_rows = true;
  for (int i = 0; i < rank; ++i) {
    chunk_bytes *= chunk[i];
    whole_rows = whole_rows && (i == 0 || chunk[i] == extent[i]);
  }
  if (H5Pget_nfilters(creation) == 0 && whole_rows && chunk_bytes >= kTinyChunk) return 0;
  return std::clamp(chunk_bytes, kSmallCache, kLargestCache);
}

/// Whether `path`, perhaps a link, leads to the file.
bool leads_to(const std::string& path, const io::FileDescriptor& file) {
  struct stat there {
  }, ours{};
  return stat(path.c_str(), &there) == 0 && fstat(file.get(), &ours) == 0 && there.st_dev == ours.st_dev &&
         there.st_ino == ours.st_ino;
}

/// Where the bytes of a contiguous dataset begin in `file`; none where they are elsewhere, or not there.
std::optional<std::int64_t> offset_in(const io::FileDescriptor& file, hid_t dataset, const DatasetInfo& info) {
  const std::vector<std::string> files = io::list_files(dataset);
  if (files.size() != 1 || !leads_to(files.front(), file)) return std::nullopt;
  const Hid space(H5Dget_space(dataset)), creation(H5Dget_create_plist(dataset));
  std::array<hsize_t, H5S_MAX_RANK> extent{};
  if (H5Pget_layout(creation) != H5D_CONTIGUOUS ||
      H5Sget_simple_extent_dims(space, extent.data(), nullptr) != static_cast<int>(info.shape.size()) ||
      !std::equal(info.shape.begin(), info.shape.end(), extent.begin(),
                  [](std::int64_t a, hsize_t b) { return static_cast<hsize_t>(a) == b; }))
    return std::nullopt;
  // H5Dget_offset has an answer for unallocated datasets too.
  H5D_space_status_t status = H5D_SPACE_STATUS_ERROR;
  if (H5Dget_space_status(dataset, &status) < 0 || status != H5D_SPACE_STATUS_ALLOCATED) return std::nullopt;
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) return std::nullopt;
  return static_cast<std::int64_t>(offset);
}

struct OpenDataset {
  Hid id;
  Hid type;
  std::size_t element_bytes = 0;
  bool looked_for = false;                  // its place
  std::optional<std::int64_t> offset = {};  // of contiguous bytes in the file itself
};

}  // namespace

struct MappedSlab::Impl {
  io::Mapping mapping;
};

struct InputFile::Impl {
  std::string path;
  io::FileDescriptor bytes;  // the same file, to see whether it is still as long as it was
  std::int64_t size = 0;
  FileStamp stamp;                                                      // of `bytes`
  mutable std::atomic<bool> mapped = false;                             // some of it
  io::Mapping::Lost lost = std::make_shared<std::atomic<bool>>(false);  // bytes of a mapped slab
  Hid file;
  std::map<std::string, OpenDataset> open;  // recently read datasets keep their chunks

  ~Impl() {
    const Hdf5Session session(path, Hdf5Session::Reads::structure);
    open.clear();
    file.close();
  }

  std::string name_of_dataset(const std::string& dataset) const {
    return "the dataset '" + dataset + "' of '" + path + "'";
  }

  void check_length() const {
    const std::int64_t now = io::file_size(bytes, path);
    if (now < size)
      throw Error(ExitCode::file_io, "'" + path + "' was cut short while it was read: it has " + std::to_string(now) +
                                         " bytes and had " + std::to_string(size));
  }

  FileStamp stamp_now() const {
    struct stat status {};
    if (fstat(bytes.get(), &status) != 0)
      throw Error(ExitCode::file_io, "cannot look at '" + path + "': " + std::strerror(errno));
    return {status.st_size, status.st_mtim.tv_sec * std::int64_t{1000000000} + status.st_mtim.tv_nsec};
  }

  OpenDataset& open_dataset(const std::string& name);
  /// Where the slab lies, in one run and as it is read, in `bytes`; none otherwise.
  std::optional<std::int64_t> place_of(OpenDataset& dataset, const DatasetInfo& info, const Slab& slab) const;
  void read_raw(const OpenDataset& dataset, const DatasetInfo& info, const Slab& slab, hid_t memory_type,
                std::size_t element_bytes, void* out) const;
  void list_groups(const std::string& group, std::vector<std::string>& above, std::vector<std::string>& found) const;
};

OpenDataset& InputFile::Impl::open_dataset(const std::string& name) {
  const auto known = open.find(name);
  if (known != open.end()) return known->second;
  if (open.size() >= kOpenDatasets) open.clear();

  const std::string what = "cannot open " + name_of_dataset(name);
  Hid id = checked(H5Dopen2(file, name.c_str(), H5P_DEFAULT), ExitCode::bad_input, what);
  Hid type = checked(H5Dget_type(id), ExitCode::bad_input, what);
  const std::size_t bytes = H5Tget_size(type);
  const Hid creation = checked(H5Dget_create_plist(id), ExitCode::bad_input, what);
  if (H5Pget_layout(creation) == H5D_CHUNKED) {
    const std::size_t cache = choose_cache(id, creation, bytes);
    const Hid access = checked(H5Pcreate(H5P_DATASET_ACCESS), ExitCode::internal, what);
    io::check(H5Pset_chunk_cache(access, 4093, cache, H5D_CHUNK_CACHE_W0_DEFAULT), ExitCode::internal, what);
    id.close();
    id = checked(H5Dopen2(file, name.c_str(), access), ExitCode::bad_input, what);
  }
  return open.emplace(name, OpenDataset{std::move(id), std::move(type), bytes}).first->second;
}

std::optional<std::int64_t> InputFile::Impl::place_of(OpenDataset& dataset, const DatasetInfo& info,
                                                      const Slab& slab) const {
  const auto size = static_cast<std::int64_t>(size_of(info.type));
  if (info.foreign_byte_order || info.layout != "contiguous" || dataset.element_bytes != size_of(info.type))
    return std::nullopt;
  io::check_slab(name_of_dataset(info.path), info.shape, slab);
  // Behind the axis that is cut all is whole, before it there is one of each.
  std::size_t cut = info.shape.size();
  while (cut > 0 && slab.count[cut - 1] == info.shape[cut - 1]) --cut;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < info.shape.size(); ++i) {
    if (slab.count[i] == 0 || (i + 1 < cut && slab.count[i] != 1)) return std::nullopt;
    first = first * info.shape[i] + slab.begin[i];
  }
  first *= size;
  if (!dataset.looked_for) dataset.offset = offset_in(bytes, dataset.id, info), dataset.looked_for = true;
  if (!dataset.offset || *dataset.offset + first + io::count_elements(slab.count) * size > this->size)
    return std::nullopt;
  return *dataset.offset + first;
}

void InputFile::Impl::read_raw(const OpenDataset& dataset, const DatasetInfo& info, const Slab& slab, hid_t memory_type,
                               std::size_t element_bytes, void* out) const {
  const std::string what = "cannot read " + name_of_dataset(info.path);
  io::check_slab(name_of_dataset(info.path), info.shape, slab);
  const auto size = static_cast<std::int64_t>(element_bytes);
  const Hid in_file = checked(H5Dget_space(dataset.id), ExitCode::file_io, what);
  const int rank = H5Sget_simple_extent_ndims(in_file);
  if (rank != static_cast<int>(info.shape.size()))
    throw Error(ExitCode::internal, what + ": it has " + std::to_string(rank) + " axes, " +
                                        std::to_string(info.shape.size()) + " are expected");
  io::for_each_piece(slab, size, io::kPieceBytes, [&](const Slab& piece, std::int64_t first) {
    const std::vector<hsize_t> begin(piece.begin.begin(), piece.begin.end());
    const std::vector<hsize_t> count(piece.count.begin(), piece.count.end());
    Hid in_memory;
    if (rank > 0) {
      io::check(H5Sselect_hyperslab(in_file, H5S_SELECT_SET, begin.data(), nullptr, count.data(), nullptr),
                ExitCode::internal, what);
      in_memory = checked(H5Screate_simple(rank, count.data(), nullptr), ExitCode::internal, what);
    }
    char* target = static_cast<char*>(out) + first * size;
    if (H5Dread(dataset.id, memory_type, rank > 0 ? in_memory.get() : H5S_ALL, in_file, H5P_DEFAULT, target) < 0) {
      bool in_filter = false;
      const std::string reason = io::hdf5_reason(&in_filter);
      throw Error(in_filter ? ExitCode::bad_input : ExitCode::file_io, what + ": " + reason);
    }
  });
}

void InputFile::Impl::list_groups(const std::string& group, std::vector<std::string>& above,
                                  std::vector<std::string>& found) const {
  found.push_back(group);
  for (const std::string& name : list_links(file, group, path)) {
    const std::string child = join_path(group, name);
    const ObjectIdentity object = identify(file, child);
    // Links can lead back up: a group inside itself is not followed.
    if (object.kind != Kind::group || std::find(above.begin(), above.end(), object.address) != above.end()) continue;
    above.push_back(object.address);
    list_groups(child, above, found);
    above.pop_back();
  }
}

InputFile::InputFile(const std::string& path) {
  const Hdf5Session session(path, Hdf5Session::Reads::structure);
  impl_ = std::make_unique<Impl>();
  impl_->bytes = open_signed(path);
  impl_->path = path;
  impl_->stamp = impl_->stamp_now();
  impl_->size = impl_->stamp.bytes;
  impl_->file = Hid(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  if (!impl_->file)
    throw Error(ExitCode::bad_input, "'" + path +
                                         "' is not a whole HDF5 file (cut short, damaged, or not closed by its "
                                         "writer): " +
                                         io::hdf5_reason());
}

InputFile::InputFile(InputFile&&) noexcept = default;
InputFile& InputFile::operator=(InputFile&&) noexcept = default;
InputFile::~InputFile() = default;

const std::string& InputFile::path() const { return impl_->path; }

std::vector<FileStamp> InputFile::stamps(const std::vector<DatasetInfo>& datasets) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  std::vector<FileStamp> stamps;
  std::set<std::pair<dev_t, ino_t>> seen;
  const auto add = [&](const struct stat& s) {
    if (seen.emplace(s.st_dev, s.st_ino).second)
      stamps.push_back({s.st_size, s.st_mtim.tv_sec * std::int64_t{1000000000} + s.st_mtim.tv_nsec});
  };
  struct stat status {};
  if (fstat(impl_->bytes.get(), &status) != 0)
    throw Error(ExitCode::file_io, "cannot look at '" + impl_->path + "': " + std::strerror(errno));
  add(status);
  for (const DatasetInfo& dataset : datasets) {
    const Hid id = checked(H5Dopen2(impl_->file, dataset.path.c_str(), H5P_DEFAULT), ExitCode::bad_input,
                           "cannot open " + impl_->name_of_dataset(dataset.path));
    for (const std::string& name : io::list_files(id))
      if (stat(name.c_str(), &status) == 0) add(status);
  }
  return stamps;
}

std::vector<std::string> InputFile::groups() const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  std::vector<std::string> above{identify(impl_->file, "/").address}, found;
  impl_->list_groups("/", above, found);
  std::sort(found.begin(), found.end(), natural_less);
  return found;
}

std::vector<std::string> InputFile::match_groups(const std::string& pattern) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const std::string wanted = absolute(pattern);
  if (identify(impl_->file, wanted).kind == Kind::group) return {wanted};
  std::vector<std::string> found = groups();
  std::erase_if(found, [&](const std::string& g) { return fnmatch(wanted.c_str(), g.c_str(), FNM_PATHNAME) != 0; });
  return found;
}

std::vector<DatasetInfo> InputFile::datasets(const std::string& group) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const std::string parent = absolute(group);
  std::vector<std::string> names = list_links(impl_->file, parent, impl_->path);
  std::sort(names.begin(), names.end());
  std::vector<DatasetInfo> found;
  for (const std::string& name : names)
    if (auto info = find(join_path(parent, name))) found.push_back(std::move(*info));
  return found;
}

std::vector<std::string> InputFile::subgroups(const std::string& group) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const std::string parent = absolute(group);
  std::vector<std::string> names = list_links(impl_->file, parent, impl_->path);
  std::erase_if(names,
                [&](const std::string& n) { return identify(impl_->file, join_path(parent, n)).kind != Kind::group; });
  std::sort(names.begin(), names.end(), natural_less);
  return names;
}

std::optional<DatasetInfo> InputFile::find(const std::string& path) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const std::string name = absolute(path);
  const Kind kind = identify(impl_->file, name).kind;
  if (kind == Kind::group || kind == Kind::other) return std::nullopt;
  const Hid id(kind == Kind::dataset ? H5Dopen2(impl_->file, name.c_str(), H5P_DEFAULT) : H5I_INVALID_HID);
  if (id) return io::describe_dataset(id, name, impl_->path);
  // Not there, or a link to something that is not there: the latter is worth telling.
  const std::string reason = io::hdf5_reason();
  if (H5Lexists(impl_->file, name.c_str(), H5P_DEFAULT) <= 0) return std::nullopt;
  DatasetInfo info;
  info.path = name;
  info.problem = describe_link(impl_->file, name, reason);
  return info;
}

std::optional<std::string> InputFile::text_attribute(const std::string& object, const std::string& name) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const Hid id(H5Oopen(impl_->file, absolute(object).c_str(), H5P_DEFAULT));
  return id ? io::read_text_attribute(id, name) : std::nullopt;
}

std::optional<double> InputFile::number_attribute(const std::string& object, const std::string& name) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::structure);
  const Hid id(H5Oopen(impl_->file, absolute(object).c_str(), H5P_DEFAULT));
  return id ? io::read_number_attribute(id, name) : std::nullopt;
}

void InputFile::read(const DatasetInfo& dataset, const Slab& slab, void* out) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::values);
  if (!dataset.usable()) throw Error(ExitCode::bad_input, dataset.problem + " ('" + impl_->path + "')");
  OpenDataset& open = impl_->open_dataset(dataset.path);
  if (open.element_bytes != size_of(dataset.type))
    throw Error(ExitCode::internal, impl_->name_of_dataset(dataset.path) + " has elements of " +
                                        std::to_string(open.element_bytes) + " bytes, " +
                                        std::to_string(size_of(dataset.type)) + " are expected");
  // HDF5 would fetch 64 KiB for less.
  if (const auto place = impl_->place_of(open, dataset, slab)) {
    const std::int64_t bytes = io::count_elements(slab.count) * static_cast<std::int64_t>(open.element_bytes);
    const bool whole = io::read_all(impl_->bytes, out, bytes, *place, impl_->name_of_dataset(dataset.path));
    impl_->check_length();
    if (whole) return;
  }
  // The memory type is the file's own, so that HDF5 converts nothing.
  try {
    impl_->read_raw(open, dataset, slab, open.type, open.element_bytes, out);
  } catch (const Error&) {
    impl_->check_length();
    throw;
  }
  impl_->check_length();
  if (dataset.foreign_byte_order) io::swap_bytes(out, io::count_elements(slab.count), open.element_bytes);
}

std::optional<MappedSlab> InputFile::map(const DatasetInfo& dataset, const Slab& slab) const {
  {
    const Hdf5Session alone;  // no other has handlers for what it reads
    if (!io::can_mend_mappings()) return std::nullopt;
  }
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::values);
  const auto size = static_cast<std::int64_t>(size_of(dataset.type));
  const std::int64_t bytes = io::count_elements(slab.count) * size;
  if (!dataset.usable() || dataset.layout != "contiguous" || bytes < kMappedLeast) return std::nullopt;
  const auto place = impl_->place_of(impl_->open_dataset(dataset.path), dataset, slab);
  if (!place || *place % size != 0) return std::nullopt;
  auto mapping = io::Mapping::of(impl_->bytes, *place, bytes, impl_->lost);
  if (!mapping) return std::nullopt;
  impl_->mapped = true;
  return MappedSlab(std::make_unique<MappedSlab::Impl>(MappedSlab::Impl{std::move(*mapping)}));
}

void InputFile::load(const MappedSlab& slab) const {
  const int failed = slab.impl_->mapping.load();
  impl_->check_length();
  if (failed != 0)
    throw Error(failed == ENOMEM ? ExitCode::resources : ExitCode::file_io,
                "cannot read '" + impl_->path + "': " + std::strerror(failed == EFAULT ? EIO : failed));
}

void InputFile::require_whole() const {
  impl_->check_length();
  if (*impl_->lost)
    throw Error(ExitCode::file_io, "cannot read '" + impl_->path + "': the system could not bring all of its bytes");
  if (impl_->mapped && impl_->stamp_now() != impl_->stamp)
    throw Error(ExitCode::file_io,
                "'" + impl_->path + "' was written while it was read; solve it again (--force) when nobody writes it");
}

MappedSlab::MappedSlab(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MappedSlab::MappedSlab(MappedSlab&&) noexcept = default;
MappedSlab& MappedSlab::operator=(MappedSlab&&) noexcept = default;
MappedSlab::~MappedSlab() = default;
const std::byte* MappedSlab::data() const { return impl_->mapping.data(); }

std::vector<double> InputFile::read_doubles(const DatasetInfo& dataset) const {
  const std::int64_t elements = dataset.elements();
  std::vector<std::byte> stored(elements * size_of(dataset.type));
  read(dataset, {std::vector<std::int64_t>(dataset.shape.size(), 0), dataset.shape}, stored.data());
  std::vector<double> values(elements);
  for (std::int64_t i = 0; i < elements; ++i) values[i] = io::load_double(stored.data(), dataset.type, i);
  return values;
}

std::vector<std::int64_t> InputFile::read_integers(const DatasetInfo& dataset) const {
  const Hdf5Session session(impl_->path, Hdf5Session::Reads::values);
  if (dataset.storage != Storage::integer)
    throw Error(ExitCode::bad_input,
                (dataset.usable() ? "dataset '" + dataset.path + "' holds floating-point numbers; integers are needed"
                                  : dataset.problem) +
                    " ('" + impl_->path + "')");
  const OpenDataset& open = impl_->open_dataset(dataset.path);
  const bool is_unsigned = H5Tget_sign(open.type) == H5T_SGN_NONE;
  std::vector<std::int64_t> values(dataset.elements());
  // HDF5 clips what does not fit, in silence: unsigned numbers are read as such and looked at here.
  impl_->read_raw(open, dataset, {std::vector<std::int64_t>(dataset.shape.size(), 0), dataset.shape},
                  is_unsigned ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64, sizeof(std::int64_t), values.data());
  const auto too_large = std::find_if(values.begin(), values.end(), [](std::int64_t v) { return v < 0; });
  if (is_unsigned && too_large != values.end())
    throw Error(ExitCode::bad_input,
                "value " + std::to_string(too_large - values.begin()) + " of " + impl_->name_of_dataset(dataset.path) +
                    " is " + std::to_string(static_cast<std::uint64_t>(*too_large)) + ", which does not fit 63 bits");
  return values;
}

}  // namespace longscan
