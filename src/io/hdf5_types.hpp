// SPDX-License-Identifier: Apache-2.0
#pragma once
// A parallel hdf5.h includes mpi.h, whose old C++ bindings nobody links.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>

#include "longscan/error.hpp"
#include "longscan/sequence_file.hpp"

/// The HDF5 library as the rest of src/io sees it: handles that close themselves, errors as text, and what a dataset
/// is. Serial (sec2) access only: no MPI here.
namespace longscan::io {

/// An HDF5 identifier of any kind, closed when it goes out of scope. Move-only.
class Hid {
 public:
  Hid() = default;
  explicit Hid(hid_t id) : id_(id) {}
  Hid(Hid&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)) {}
  Hid& operator=(Hid&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Hid() { close(); }
  hid_t get() const { return id_; }
  operator hid_t() const { return id_; }
  explicit operator bool() const { return id_ >= 0; }
  /// Close now; false if HDF5 reports an error (data may not have been written).
  bool close() { return id_ < 0 || H5Idec_ref(std::exchange(id_, H5I_INVALID_HID)) >= 0; }

 private:
  hid_t id_ = H5I_INVALID_HID;
};

/// Starts HDF5 (no file locks unless the user asked for them, no printing of errors) and keeps other threads out of
/// it, as the library may have been built without thread safety. Every function of src/io that calls HDF5 holds one.
class Hdf5Session {
 public:
  Hdf5Session();
  enum class Reads { structure, values };
  /// The session reads this file, whose bytes may be anything: where the library crashes on them (it does: a length out
  /// of range, a pointer of a freed object) or follows a list without end, the program ends with exit code 3 and a
  /// message that names the file. Takes the place of the handlers of SIGSEGV, SIGBUS, SIGFPE, SIGABRT and SIGVTALRM
  /// and, for the structure, of the timer of that, as long as it lives. `path` outlives it.
  Hdf5Session(const std::string& path, Reads reads);
  ~Hdf5Session();
  Hdf5Session(const Hdf5Session&) = delete;
  Hdf5Session& operator=(const Hdf5Session&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  bool guards_ = false, timed_ = false;
};

/// Why the last HDF5 call failed: the innermost message, or the system's own if there is one. `in_filter` tells
/// whether a filter failed (damaged or unreadable content) rather than the file system.
std::string hdf5_reason(bool* in_filter = nullptr);

/// `id` in a handle; throws Error(code, what + reason) if the call that made it failed.
Hid checked(hid_t id, ExitCode code, const std::string& what);
/// The same for calls that return a status.
void check(herr_t status, ExitCode code, const std::string& what);

/// What an open dataset is. `file` is the name of its file, for virtual and external sources beside it. Throws
/// nothing for unusable content: that becomes `problem`.
DatasetInfo describe_dataset(hid_t dataset, const std::string& path, const std::string& file);
/// The names of the files that an open dataset is read from: its own first, then external ones, or the sources of a
/// virtual dataset and theirs. A name may come twice.
std::vector<std::string> list_files(hid_t dataset);

/// A text attribute of an open object, scalar or of one element.
std::optional<std::string> read_text_attribute(hid_t object, const std::string& name);
/// A numeric attribute (also a boolean of h5py), scalar or of one element.
std::optional<double> read_number_attribute(hid_t object, const std::string& name);
/// Create or replace an attribute; text as variable-length UTF-8, integers as int64, vectors as 1-D.
void write_attribute(hid_t object, const std::string& name, const Attribute& value, const std::string& file);

/// The HDF5 type of a DType in native byte order.
Hid make_type(DType type);

}  // namespace longscan::io
