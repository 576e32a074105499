// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "io/hdf5_types.hpp"
#include "io/posix_file.hpp"
#include "io/slab.hpp"

namespace longscan {

std::int64_t DatasetInfo::elements() const { return io::count_elements(shape); }

namespace io {
namespace {

constexpr int kDeepestVirtual = 4;  // virtual datasets of virtual datasets; deeper ones are not looked into

struct FloatFormat {
  DType type;
  std::size_t sign, exponent_at, exponent_bits, mantissa_at, mantissa_bits, bias;
};
constexpr std::array<FloatFormat, 4> kFloatFormats{{{DType::f64, 63, 52, 11, 0, 52, 1023},
                                                    {DType::f32, 31, 23, 8, 0, 23, 127},
                                                    {DType::f16, 15, 10, 5, 0, 10, 15},
                                                    {DType::bf16, 15, 7, 8, 0, 7, 127}}};

std::optional<DType> match_float(hid_t type) {
  std::size_t sign = 0, exponent_at = 0, exponent_bits = 0, mantissa_at = 0, mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0) return std::nullopt;
  if (H5Tget_norm(type) != H5T_NORM_IMPLIED || H5Tget_offset(type) != 0) return std::nullopt;
  for (const FloatFormat& f : kFloatFormats)
    if (H5Tget_size(type) == size_of(f.type) && sign == f.sign && exponent_at == f.exponent_at &&
        exponent_bits == f.exponent_bits && mantissa_at == f.mantissa_at && mantissa_bits == f.mantissa_bits &&
        H5Tget_ebias(type) == f.bias)
      return f.type;
  return std::nullopt;
}

std::string name_of_class(H5T_class_t kind) {
  switch (kind) {
    case H5T_STRING:
      return "text";
    case H5T_COMPOUND:
      return "compounds (complex numbers, or records)";
    case H5T_ENUM:
      return "booleans or enumerated values";
    case H5T_VLEN:
      return "arrays of varying length";
    case H5T_ARRAY:
      return "arrays as elements";
    case H5T_REFERENCE:
      return "references";
    case H5T_BITFIELD:
      return "bit fields";
    case H5T_OPAQUE:
      return "opaque bytes";
    default:
      return "values of an unknown type";
  }
}

void classify_type(hid_t dataset, DatasetInfo& info) {
  const std::string holds = "dataset '" + info.path + "' holds ";
  const std::string needed = "; floating-point numbers are needed";
  const Hid type(H5Dget_type(dataset));
  const H5T_class_t kind = H5Tget_class(type);
  const std::size_t size = H5Tget_size(type);
  const H5T_order_t order = kind == H5T_FLOAT || kind == H5T_INTEGER ? H5Tget_order(type) : H5T_ORDER_NONE;
  info.foreign_byte_order = order != H5T_ORDER_NONE && size > 1 && order != H5Tget_order(H5T_NATIVE_INT);

  if (kind == H5T_FLOAT) {
    const auto matched = match_float(type);
    if (matched && (order == H5T_ORDER_LE || order == H5T_ORDER_BE)) {
      info.storage = Storage::floating;
      info.type = *matched;
    } else {
      info.problem =
          holds + std::to_string(8 * size) +
          "-bit floating-point numbers of an unusual format; float64, float32, float16 or bfloat16 is needed";
    }
  } else if (kind == H5T_INTEGER && size == 2 && read_text_attribute(dataset, "dtype") == "bfloat16") {
    info.storage = Storage::bfloat16_bits;
    info.type = DType::bf16;
  } else if (kind == H5T_INTEGER && size <= 8) {
    info.storage = Storage::integer;
    if (size == 2 && H5Tget_sign(type) == H5T_SGN_NONE)
      info.problem =
          holds + "unmarked uint16; if these are bfloat16 bit patterns, say so with an attribute dtype = 'bfloat16'";
    else
      info.problem = holds + std::to_string(8 * size) + "-bit integers" + needed;
  } else if (kind == H5T_OPAQUE && size == 2) {
    info.storage = Storage::bfloat16_opaque;
    info.type = DType::bf16;
  } else {
    info.problem = holds + name_of_class(kind) + needed;
  }
}

std::string name_of_filter(H5Z_filter_t filter, const char* stored) {
  static constexpr std::array<std::pair<H5Z_filter_t, const char*>, 14> known{{{H5Z_FILTER_DEFLATE, "deflate"},
                                                                               {H5Z_FILTER_SHUFFLE, "shuffle"},
                                                                               {H5Z_FILTER_FLETCHER32, "fletcher32"},
                                                                               {H5Z_FILTER_SZIP, "szip"},
                                                                               {H5Z_FILTER_NBIT, "nbit"},
                                                                               {H5Z_FILTER_SCALEOFFSET, "scaleoffset"},
                                                                               {307, "bzip2"},
                                                                               {32000, "lzf"},
                                                                               {32001, "blosc"},
                                                                               {32004, "lz4"},
                                                                               {32008, "bitshuffle"},
                                                                               {32013, "zfp"},
                                                                               {32015, "zstd"},
                                                                               {32026, "blosc2"}}};
  for (const auto& [id, name] : known)
    if (id == filter) return name;
  return stored[0] != '\0' ? stored : "number " + std::to_string(filter);
}

/// Lists the filters; returns what is wrong with them.
std::string look_at_filters(hid_t creation, std::vector<std::string>& names) {
  std::string problem;
  const int count = H5Pget_nfilters(creation);
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0, config = 0;
    std::size_t values = 0;
    std::array<char, 64> stored{};
    const H5Z_filter_t filter = H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &values, nullptr,
                                               stored.size(), stored.data(), &config);
    if (filter < 0) return "has a filter that cannot be read: " + hdf5_reason();
    stored.back() = '\0';
    names.push_back(name_of_filter(filter, stored.data()));
    // Chunks that did not compress are stored plain, so that a missing filter may show only at the millionth token.
    const bool usable = H5Zfilter_avail(filter) > 0 && H5Zget_filter_info(filter, &config) >= 0 &&
                        (config & H5Z_FILTER_CONFIG_DECODE_ENABLED) != 0;
    if (!usable && problem.empty())
      problem = "is compressed with the filter " + names.back() + " (" + std::to_string(filter) +
                "), which this HDF5 does not have; name the folder of its plugin in HDF5_PLUGIN_PATH, or rewrite the "
                "dataset with gzip where the filter is at hand (h5py has lzf; hdf5plugin has most others)";
  }
  return problem;
}

/// A prefix from the environment, as HDF5 takes it: ${ORIGIN} is the folder of `file`.
std::string prefix_from(const char* variable, const std::filesystem::path& folder) {
  const char* value = std::getenv(variable);
  std::string prefix = value != nullptr ? value : "";
  if (prefix.rfind("${ORIGIN}", 0) == 0) prefix.replace(0, 9, folder.string());
  return prefix;
}

/// Where HDF5 looks for an external file.
std::string place_external(const std::filesystem::path& stored, const std::string& prefix) {
  return (stored.is_relative() && !prefix.empty() ? std::filesystem::path(prefix) / stored : stored).string();
}

/// HDF5 takes missing bytes at the end of an external file for zeros: better said than read.
std::string look_at_external(hid_t creation, int count, const std::string& file) {
  const std::string prefix = prefix_from("HDF5_EXTFILE_PREFIX", folder_of(file));
  for (int i = 0; i < count; ++i) {
    std::array<char, 4096> stored{};
    off_t offset = 0;
    hsize_t size = 0;
    if (H5Pget_external(creation, static_cast<unsigned>(i), stored.size() - 1, stored.data(), &offset, &size) < 0)
      return "names an external file that cannot be read: " + hdf5_reason();
    const std::string name = place_external(stored.data(), prefix);
    struct stat status {};
    if (stat(name.c_str(), &status) != 0)
      return "has its data in '" + name +
             "', which is not there (a relative name starts at the current directory; HDF5_EXTFILE_PREFIX='${ORIGIN}' "
             "makes it start beside the HDF5 file)";
    if (size != H5F_UNLIMITED && static_cast<hsize_t>(status.st_size) < static_cast<hsize_t>(offset) + size)
      return "has its data in '" + name + "', which is too short: " + std::to_string(status.st_size) + " bytes of " +
             std::to_string(static_cast<hsize_t>(offset) + size);
  }
  return "";
}

std::string storage_problem(hid_t dataset, hid_t creation, const std::string& file, std::vector<std::string>& filters,
                            int depth);

/// The file that HDF5 will take for a source of a virtual dataset; empty if there is none.
std::string find_source(const std::string& name, const std::string& file) {
  const std::filesystem::path folder = folder_of(file), source = name;
  std::vector<std::filesystem::path> places;
  if (const std::string prefix = prefix_from("HDF5_VDS_PREFIX", folder); !prefix.empty())
    places.push_back(std::filesystem::path(prefix) / (source.is_absolute() ? source.filename() : source));
  if (source.is_absolute()) places.push_back(source);
  places.push_back(folder / (source.is_absolute() ? source.filename() : source));
  places.push_back(source);
  std::error_code ignored;
  for (const auto& place : places)
    if (std::filesystem::is_regular_file(place, ignored)) return place.string();
  return "";
}

std::string get_virtual_name(ssize_t (*get)(hid_t, size_t, char*, size_t), hid_t creation, std::size_t i) {
  const ssize_t length = get(creation, i, nullptr, 0);
  std::string name(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  if (length > 0) get(creation, i, name.data(), name.size() + 1);
  return name;
}

/// HDF5 reads fill values, without an error, where a source is missing or too small.
std::string look_at_virtual(hid_t dataset, hid_t creation, const std::string& file, int depth) {
  std::size_t count = 0;
  if (H5Pget_virtual_count(creation, &count) < 0) return "is virtual, of sources that cannot be read: " + hdf5_reason();
  std::set<std::pair<std::string, std::string>> good;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string source_file = get_virtual_name(H5Pget_virtual_filename, creation, i);
    const std::string source_path = get_virtual_name(H5Pget_virtual_dsetname, creation, i);
    if (source_file.find("%b") != std::string::npos || source_path.find("%b") != std::string::npos) continue;
    const std::string from = "takes data from '" + source_path + "' in '" + source_file + "', ";
    const std::string found = source_file == "." ? file : find_source(source_file, file);
    if (found.empty()) return from + "which is not there";
    const Hid other(source_file == "." ? H5Iget_file_id(dataset) : H5Fopen(found.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
    const Hid source(other ? H5Dopen2(other, source_path.c_str(), H5P_DEFAULT) : H5I_INVALID_HID);
    if (!source) return from + "which cannot be opened: " + hdf5_reason();

    const Hid space(H5Dget_space(source)), taken(H5Pget_virtual_srcspace(creation, i));
    std::array<hsize_t, H5S_MAX_RANK> extent{}, first{}, last{};
    const int rank = H5Sget_simple_extent_dims(space, extent.data(), nullptr);
    if (rank > 0 && rank == H5Sget_simple_extent_ndims(taken) && H5Sget_select_type(taken) == H5S_SEL_HYPERSLABS &&
        H5Sget_select_bounds(taken, first.data(), last.data()) >= 0)
      for (int axis = 0; axis < rank; ++axis)
        if (last[axis] >= extent[axis])
          return from + "which is too small: " + std::to_string(extent[axis]) + " along axis " + std::to_string(axis) +
                 ", " + std::to_string(last[axis] + 1) + " are needed";
    if (depth < kDeepestVirtual && good.emplace(source_file, source_path).second) {
      const Hid source_creation(H5Dget_create_plist(source));
      std::vector<std::string> filters;
      const std::string problem = storage_problem(source, source_creation, found, filters, depth + 1);
      if (!problem.empty()) return from + "which " + problem;
    }
  }
  return "";
}

/// A damaged shape may ask for more than there is: said before memory is taken for it.
std::string look_at_contiguous(hid_t dataset) {
  H5D_space_status_t status = H5D_SPACE_STATUS_ERROR;
  if (H5Dget_space_status(dataset, &status) < 0 || status != H5D_SPACE_STATUS_ALLOCATED) return "";
  const Hid file(H5Iget_file_id(dataset)), space(H5Dget_space(dataset)), type(H5Dget_type(dataset));
  hsize_t there = 0;
  if (H5Fget_filesize(file, &there) < 0) return "";
  const hssize_t elements = H5Sget_simple_extent_npoints(space);
  if (elements <= 0 || static_cast<hsize_t>(elements) <= there / H5Tget_size(type)) return "";
  return "has " + std::to_string(elements) + " elements of " + std::to_string(H5Tget_size(type)) +
         " bytes in a file of " + std::to_string(there) + " bytes: the file is damaged";
}

std::string storage_problem(hid_t dataset, hid_t creation, const std::string& file, std::vector<std::string>& filters,
                            int depth) {
  const std::string problem = look_at_filters(creation, filters);
  if (!problem.empty()) return problem;
  if (H5Pget_layout(creation) == H5D_VIRTUAL) return look_at_virtual(dataset, creation, file, depth);
  if (H5Pget_layout(creation) != H5D_CONTIGUOUS) return "";
  const int external = H5Pget_external_count(creation);
  return external > 0 ? look_at_external(creation, external, file) : look_at_contiguous(dataset);
}

std::string describe_layout(hid_t creation, int rank) {
  switch (H5Pget_layout(creation)) {
    case H5D_COMPACT:
      return "compact";
    case H5D_VIRTUAL:
      return "virtual";
    case H5D_CHUNKED: {
      std::array<hsize_t, H5S_MAX_RANK> chunk{};
      H5Pget_chunk(creation, rank, chunk.data());
      std::string text = "chunked ";
      for (int i = 0; i < rank; ++i) text += (i > 0 ? "x" : "") + std::to_string(chunk[i]);
      return text;
    }
    default:
      return H5Pget_external_count(creation) > 0 ? "external" : "contiguous";
  }
}

std::string name_of_file(hid_t object) {
  const ssize_t length = H5Fget_name(object, nullptr, 0);
  std::string name(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  if (length > 0) H5Fget_name(object, name.data(), name.size() + 1);
  return name;
}

/// The name of a numbered source: "%b" stands for its number.
std::string fill_block(std::string name, std::size_t block) {
  for (std::size_t at = 0; (at = name.find("%b", at)) != std::string::npos;) name.replace(at, 2, std::to_string(block));
  return name;
}

/// `seen`: files and datasets whose files are listed already.
void add_files(hid_t dataset, std::vector<std::string>& files, std::set<std::pair<std::string, std::string>>& seen) {
  const std::string own = name_of_file(dataset);
  files.push_back(own);
  const Hid creation(H5Dget_create_plist(dataset));
  if (!creation) return;
  const H5D_layout_t layout = H5Pget_layout(creation);
  if (layout == H5D_CONTIGUOUS) {
    const std::string prefix = prefix_from("HDF5_EXTFILE_PREFIX", folder_of(own));
    const int external = H5Pget_external_count(creation);
    for (int i = 0; i < external; ++i) {
      std::array<char, 4096> stored{};
      if (H5Pget_external(creation, static_cast<unsigned>(i), stored.size() - 1, stored.data(), nullptr, nullptr) >= 0)
        files.push_back(place_external(stored.data(), prefix));
    }
  }
  std::size_t sources = 0;
  if (layout != H5D_VIRTUAL || H5Pget_virtual_count(creation, &sources) < 0) return;
  for (std::size_t i = 0; i < sources; ++i) {
    const std::string file = get_virtual_name(H5Pget_virtual_filename, creation, i);
    const std::string path = get_virtual_name(H5Pget_virtual_dsetname, creation, i);
    const bool numbered = file.find("%b") != std::string::npos || path.find("%b") != std::string::npos;
    for (std::size_t block = 0; block == 0 || numbered; ++block) {
      const std::string name = fill_block(file, block), source_path = fill_block(path, block);
      const std::string found = name == "." ? own : find_source(name, own);
      if (found.empty()) break;
      if (seen.count({found, source_path})) continue;
      files.push_back(found);
      const Hid other(H5Fopen(found.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
      const Hid source(other ? H5Dopen2(other, source_path.c_str(), H5P_DEFAULT) : H5I_INVALID_HID);
      if (!source) break;
      seen.emplace(found, source_path);
      add_files(source, files, seen);
    }
  }
}

}  // namespace

std::vector<std::string> list_files(hid_t dataset) {
  std::vector<std::string> files;
  std::set<std::pair<std::string, std::string>> seen;
  add_files(dataset, files, seen);
  return files;
}

DatasetInfo describe_dataset(hid_t dataset, const std::string& path, const std::string& file) {
  DatasetInfo info;
  info.path = path;
  const auto refuse = [&info](const std::string& problem) {
    info.storage = Storage::unusable;
    info.problem = "dataset '" + info.path + "' " + problem;
  };
  const Hid space(H5Dget_space(dataset)), creation(H5Dget_create_plist(dataset));
  if (!space || !creation) {
    refuse("cannot be read: " + hdf5_reason());
    return info;
  }
  std::array<hsize_t, H5S_MAX_RANK> extent{};
  const int rank = std::max(0, H5Sget_simple_extent_dims(space, extent.data(), nullptr));
  for (int i = 0; i < rank; ++i) info.shape.push_back(static_cast<std::int64_t>(extent[i]));
  info.layout = describe_layout(creation, rank);
  classify_type(dataset, info);

  const std::string storage = storage_problem(dataset, creation, file, info.filters, 0);
  if (H5Sget_simple_extent_type(space) == H5S_NULL)
    refuse("holds nothing, not even a shape (a null dataspace)");
  else if (count_elements(info.shape, 8) < 0)
    refuse("is larger than 64 bits can count");
  else if (!storage.empty() && info.storage != Storage::unusable)
    refuse(storage);
  return info;
}

}  // namespace io
}  // namespace longscan
