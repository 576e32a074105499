// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "longscan/types.hpp"

/// Sequences in HDF5 files. Nothing here communicates: every rank opens an input by itself and reads what it
/// needs; one rank creates an output, all write into it, one rank finishes it. Errors are `Error` with
/// ExitCode::file_io (the file cannot be opened, read, written) or ExitCode::bad_input (its content cannot be used),
/// and name the file and the dataset.
namespace longscan {

/// How a dataset stores its numbers.
enum class Storage {
  floating,         ///< an HDF5 float that is one of DType
  bfloat16_bits,    ///< uint16 with the attribute dtype = "bfloat16": bit patterns
  bfloat16_opaque,  ///< 2-byte opaque, what ml_dtypes arrays become in h5py; taken as bfloat16
  integer,          ///< any integer type (offsets); `read_integers` reads it. `problem` says that it holds no floats
  unusable          ///< text, compounds, other float widths, a missing filter or source, … ; `problem` says which
};

/// What a dataset is, without its data.
struct DatasetInfo {
  std::string path;  ///< absolute, "/demo_0/q"
  std::vector<std::int64_t> shape;
  Storage storage = Storage::unusable;
  DType type = DType::f32;           ///< where storage is a floating one
  bool foreign_byte_order = false;   ///< stored in the other byte order; `read` swaps
  std::string layout;                ///< "contiguous", "chunked 16x2x8", "compact", "virtual", "external"
  std::vector<std::string> filters;  ///< names, in order: "shuffle", "deflate"
  std::string problem;               ///< why it cannot be read as floats (empty: it can), ready for a message
  bool usable() const { return problem.empty(); }
  std::int64_t elements() const;
  bool operator==(const DatasetInfo&) const = default;
};

/// A rectangular piece of a dataset: `count[i]` from `begin[i]` on, along each axis.
struct Slab {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> count;
};

/// A value of an attribute.
using Attribute = std::variant<std::string, std::int64_t, double, std::vector<double>>;
/// By name; "/cell/type" is the attribute `type` of the group or dataset /cell, a name without a slash one of the root.
using Attributes = std::map<std::string, Attribute>;

/// When a file was written last, and how long it is.
struct FileStamp {
  std::int64_t bytes = 0;
  std::int64_t nanoseconds = 0;  ///< since 1970
  bool operator==(const FileStamp&) const = default;
};

/// A slab that is looked at where the system's cache has it, dense and in native byte order. Move-only; outlives its
/// `InputFile` if need be.
class MappedSlab {
 public:
  MappedSlab(MappedSlab&&) noexcept;
  MappedSlab& operator=(MappedSlab&&) noexcept;
  ~MappedSlab();
  const std::byte* data() const;

 private:
  friend class InputFile;
  struct Impl;
  explicit MappedSlab(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// An input, open for reading. Move-only. Any chunking, byte order, virtual dataset, and filter that the installed
/// HDF5 can read.
class InputFile {
 public:
  /// Opens read-only; no lock is needed. Throws file_io if it cannot be opened (missing, no permission) or bad_input
  /// if it is not a whole HDF5 file.
  explicit InputFile(const std::string& path);
  InputFile(InputFile&&) noexcept;
  InputFile& operator=(InputFile&&) noexcept;
  ~InputFile();

  const std::string& path() const;
  /// Size and time of the last change, now, of this file and then of each other file that the datasets are read from:
  /// sources of virtual datasets, external files, targets of external links. The same order each time.
  std::vector<FileStamp> stamps(const std::vector<DatasetInfo>& datasets = {}) const;
  /// All groups, absolute paths ("/", "/demo_0"), in natural order (demo_2 before demo_10).
  std::vector<std::string> groups() const;
  /// The groups that match a shell pattern ('/demo_*', also without the leading slash); natural order.
  std::vector<std::string> match_groups(const std::string& pattern) const;
  /// The datasets directly in a group, sorted by name; a link that leads nowhere is an unusable one.
  std::vector<DatasetInfo> datasets(const std::string& group) const;
  /// The names of the groups directly in a group, natural order.
  std::vector<std::string> subgroups(const std::string& group) const;
  std::optional<DatasetInfo> find(const std::string& path) const;
  /// A text attribute of a group or dataset, if it is there and is text.
  std::optional<std::string> text_attribute(const std::string& object, const std::string& name) const;
  /// A numeric scalar attribute.
  std::optional<double> number_attribute(const std::string& object, const std::string& name) const;

  /// Read a slab of a floating dataset, row-major and dense, as stored but in native byte order (16-bit types stay
  /// 16 bits), into `out` (elements * size_of(type) bytes). Pieces of at most 1 GiB inside. A slab of no elements
  /// reads nothing. Throws file_io if the file is no longer as long as it was when it was opened: HDF5 would
  /// take zeros for what is gone.
  void read(const DatasetInfo& dataset, const Slab& slab, void* out) const;
  /// The same without a copy, where that can be had: contiguous bytes (1 MiB or more) of a dataset that is stored as
  /// it is read, in this very file, on a disk of this node. Costs a call of the system; `load` brings the bytes.
  std::optional<MappedSlab> map(const DatasetInfo& dataset, const Slab& slab) const;
  /// Brings a mapped slab into memory. Throws as `read` does. Any thread may call it.
  void load(const MappedSlab& slab) const;
  /// Throws file_io if the file is no longer as long as it was when it was opened, or if, with slabs mapped, it has
  /// been written since, or the system could not bring bytes of them: zeros stand for them. To be asked when a mapped
  /// slab has been used.
  void require_whole() const;
  /// A whole floating dataset as doubles.
  std::vector<double> read_doubles(const DatasetInfo& dataset) const;
  /// A whole integer dataset. bad_input if a value does not fit.
  std::vector<std::int64_t> read_integers(const DatasetInfo& dataset) const;
  /// 64 bits that change when the named datasets change: shape, type, and a bounded sample of the data (the first
  /// and last rows and some between; all of it up to 1 MiB). Independent of path, byte order and compression.
  std::uint64_t fingerprint(const std::vector<DatasetInfo>& datasets) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A dataset that an output will hold.
struct OutputDataset {
  std::string path;  ///< absolute; groups on the way are made
  std::vector<std::int64_t> shape;
  DType type = DType::f32;
  std::int64_t offset = -1;  ///< of its first byte in the file, once created; -1 if it has no bytes
  bool integers = false;     ///< holds 64-bit integers; `type`, which says how wide a value is, is f64
  std::int64_t elements() const;
};

/// An output under its temporary name (`path` + ".part", in the same directory). Space is allocated first, so that a
/// full disk shows before anything is computed. Data is written with pwrite into contiguous datasets, every return
/// code looked at. The final name appears only in `commit`, and then complete and on disk. Move-only. A temporary
/// file that is not committed is removed by `abandon` or, as far as possible, by the destructor of its creator, unless
/// `keep` was called: then `reopen` can continue it.
class OutputFile {
 public:
  /// Create the temporary file with `datasets` (contiguous, allocated, not filled; bfloat16 as an HDF5 float of 16 bits
  /// with 8 exponent bits) and attributes. On one rank. file_io if the directory is missing or not writable, if
  /// the disk has no room, or if another process is writing the same output.
  static OutputFile create(const std::string& path, std::vector<OutputDataset> datasets, const Attributes& attributes);
  /// Join a file that another rank created; `datasets` as its `datasets()` says.
  static OutputFile join(const std::string& path, std::vector<OutputDataset> datasets);
  /// Continue a temporary file that was kept: the same datasets and attributes as it was created with, and its `mark`.
  /// On one rank, which is then the creating one. file_io if it is not there or another process is writing it,
  /// bad_input if it is another file than that with the mark, or cut short.
  static OutputFile reopen(const std::string& path, std::vector<OutputDataset> datasets, const Attributes& attributes,
                           const std::string& mark);
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) noexcept;
  ~OutputFile();

  static std::string temporary_name(const std::string& path);
  const std::vector<OutputDataset>& datasets() const;
  const OutputDataset& dataset(const std::string& path) const;
  /// Write a slab, row-major and dense in `data`, which holds elements of the dataset's type. Slabs of different ranks
  /// must not overlap. One write a run of contiguous bytes, at most 1 GiB; short writes are continued. Calls no HDF5.
  void write(const OutputDataset& dataset, const Slab& slab, const void* data);
  /// This rank's data is on disk (fsync).
  void sync();
  /// The file is on a file system of this node alone: what one process brings to disk is what all have written.
  bool is_of_one_node() const;
  /// On the creating rank, while others may write: attributes that the committed file has besides.
  void add(const Attributes& attributes);
  /// On the creating rank, after every rank has synced (written, if the file is of one node): add attributes, sync,
  /// rename to the final name, sync the directory.
  void commit(const Attributes& attributes = {});
  /// On the creating rank: remove the temporary file.
  void abandon() noexcept;
  /// On the creating rank: the temporary file stays if it is not committed.
  void keep() noexcept;
  /// 16 characters that this temporary file has at its end and no other has; gone from the committed file.
  const std::string& mark() const;

 private:
  struct Impl;
  explicit OutputFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// "1.10.8": the HDF5 library in use.
std::string hdf5_version();

/// "demo_2" before "demo_10": runs of digits compare as numbers.
bool natural_less(const std::string& a, const std::string& b);

}  // namespace longscan
