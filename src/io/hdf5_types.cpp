// SPDX-License-Identifier: Apache-2.0
#include "io/hdf5_types.hpp"

#include <pthread.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "io/mapping.hpp"

namespace longscan::io {
namespace {

std::recursive_mutex& session_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

struct InnermostError {
  bool found = false;
  bool in_filter = false;
  std::string text;
};

herr_t look_at_error(unsigned, const H5E_error2_t* error, void* data) {
  auto& innermost = *static_cast<InnermostError*>(data);
  if (error->maj_num == H5E_PLINE) innermost.in_filter = true;
  if (innermost.found) return 0;
  if (error->desc != nullptr && error->desc[0] != '\0') {
    innermost.text = error->desc;
    innermost.found = true;
  }
  return 0;
}

/// An attribute of one element, its type beside it.
struct OpenAttribute {
  Hid id;
  Hid type;
};

std::optional<OpenAttribute> open_single(hid_t object, const std::string& name) {
  if (H5Aexists(object, name.c_str()) <= 0) return std::nullopt;
  OpenAttribute attribute{Hid(H5Aopen(object, name.c_str(), H5P_DEFAULT)), Hid()};
  if (!attribute.id) return std::nullopt;
  attribute.type = Hid(H5Aget_type(attribute.id));
  const Hid space(H5Aget_space(attribute.id));
  if (!attribute.type || !space || H5Sget_simple_extent_npoints(space) != 1) return std::nullopt;
  return attribute;
}

template <class T>
void write_values(hid_t object, const std::string& name, hid_t type, const T* values, std::optional<hsize_t> count,
                  const std::string& what) {
  const Hid space =
      checked(count ? H5Screate_simple(1, &*count, nullptr) : H5Screate(H5S_SCALAR), ExitCode::internal, what);
  const Hid attribute =
      checked(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), ExitCode::file_io, what);
  if (!count || *count > 0) check(H5Awrite(attribute, type, values), ExitCode::file_io, what);
}

}  // namespace

namespace {

constexpr int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGVTALRM};
/// Seconds on a core after which HDF5 is taken to go round in circles in a file's structure.
constexpr int structure_seconds = 30;

void set_timer(int seconds) {
  itimerval timer = {};
  timer.it_value.tv_sec = seconds;
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

/// The input that a thread is reading, for the handler. One thread at a time has a session.
struct Reading {
  std::atomic<const char*> path = nullptr;
  std::atomic<pthread_t> thread = pthread_t();
  struct sigaction before[std::size(crashes)];
} reading;

extern "C" void crashed(int signal, siginfo_t* info, void*) {
  if (signal == SIGBUS && info->si_code > 0 && mend_mapping(info->si_addr)) return;
  const char* path = reading.path;
  if (path && pthread_equal(reading.thread, pthread_self())) {  // write and _exit alone are safe here
    const auto say = [](const char* text) {
      if (write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(static_cast<int>(ExitCode::bad_input));
    };
    say("longscan: '"), say(path);
    say(signal == SIGVTALRM ? "' is damaged: the HDF5 library comes to no end with it"
                            : "' is damaged: the HDF5 library crashes on it");
    say("; write the file again, or see what h5dump makes of it\n");
    _exit(static_cast<int>(ExitCode::bad_input));
  }
  for (std::size_t i = 0; i < std::size(crashes); ++i)
    if (crashes[i] == signal) sigaction(signal, &reading.before[i], nullptr);
  raise(signal);
}

}  // namespace

Hdf5Session::Hdf5Session(const std::string& path, Reads reads) : Hdf5Session() {
  if (reading.path) return;  // inside another
  guards_ = true;
  reading.thread = pthread_self();
  struct sigaction action = {};
  action.sa_sigaction = crashed, action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < std::size(crashes); ++i) sigaction(crashes[i], &action, &reading.before[i]);
  reading.path = path.c_str();
  timed_ = reads == Reads::structure;
  if (timed_) set_timer(structure_seconds);
}

Hdf5Session::~Hdf5Session() {
  if (!guards_) return;
  if (timed_) set_timer(0);
  reading.path = nullptr;
  for (std::size_t i = 0; i < std::size(crashes); ++i) sigaction(crashes[i], &reading.before[i], nullptr);
}

Hdf5Session::Hdf5Session() : lock_(session_mutex()) {
  static const bool started = [] {
    setenv("HDF5_USE_FILE_LOCKING", "FALSE", 0);
    H5dont_atexit();  // every file has an owner that closes it; an abrupt end must not wait for HDF5
    return H5open() >= 0 && H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  }();
  if (!started) throw Error(ExitCode::internal, "the HDF5 library does not start");
}

std::string hdf5_reason(bool* in_filter) {
  InnermostError innermost;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, look_at_error, &innermost);
  if (in_filter != nullptr) *in_filter = innermost.in_filter;
  if (!innermost.found) return "HDF5 gives no reason";
  // Drivers put the system's message among numbers that help nobody.
  const std::string marker = "error message = '";
  const std::size_t begin = innermost.text.find(marker);
  if (begin == std::string::npos) return innermost.text;
  const std::size_t end = innermost.text.find('\'', begin + marker.size());
  return innermost.text.substr(begin + marker.size(), end - begin - marker.size());
}

Hid checked(hid_t id, ExitCode code, const std::string& what) {
  if (id < 0) throw Error(code, what + ": " + hdf5_reason());
  return Hid(id);
}

void check(herr_t status, ExitCode code, const std::string& what) {
  if (status < 0) throw Error(code, what + ": " + hdf5_reason());
}

std::optional<std::string> read_text_attribute(hid_t object, const std::string& name) {
  const auto attribute = open_single(object, name);
  if (!attribute || H5Tget_class(attribute->type) != H5T_STRING) return std::nullopt;
  if (H5Tis_variable_str(attribute->type) > 0) {
    char* text = nullptr;
    if (H5Aread(attribute->id, attribute->type, &text) < 0) return std::nullopt;
    std::string result = text != nullptr ? text : "";
    H5free_memory(text);
    return result;
  }
  std::string text(H5Tget_size(attribute->type), '\0');
  if (H5Aread(attribute->id, attribute->type, text.data()) < 0) return std::nullopt;
  if (H5Tget_strpad(attribute->type) == H5T_STR_SPACEPAD)
    text.erase(text.find_last_not_of(' ') + 1);
  else
    text.resize(std::strlen(text.c_str()));
  return text;
}

std::optional<double> read_number_attribute(hid_t object, const std::string& name) {
  const auto attribute = open_single(object, name);
  if (!attribute) return std::nullopt;
  const H5T_class_t kind = H5Tget_class(attribute->type);
  if (kind != H5T_INTEGER && kind != H5T_FLOAT && kind != H5T_ENUM) return std::nullopt;
  double value = 0;
  if (H5Aread(attribute->id, H5T_NATIVE_DOUBLE, &value) < 0) return std::nullopt;
  return value;
}

void write_attribute(hid_t object, const std::string& name, const Attribute& value, const std::string& file) {
  const std::string what = "cannot write the attribute '" + name + "' of '" + file + "'";
  if (H5Aexists(object, name.c_str()) > 0) check(H5Adelete(object, name.c_str()), ExitCode::file_io, what);
  if (const auto* text = std::get_if<std::string>(&value)) {
    const Hid type = checked(H5Tcopy(H5T_C_S1), ExitCode::internal, what);
    check(H5Tset_size(type, H5T_VARIABLE), ExitCode::internal, what);
    check(H5Tset_cset(type, H5T_CSET_UTF8), ExitCode::internal, what);
    const char* pointer = text->c_str();
    write_values(object, name, type, &pointer, std::nullopt, what);
  } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    write_values(object, name, H5T_NATIVE_INT64, integer, std::nullopt, what);
  } else if (const auto* number = std::get_if<double>(&value)) {
    write_values(object, name, H5T_NATIVE_DOUBLE, number, std::nullopt, what);
  } else {
    const auto& numbers = std::get<std::vector<double>>(value);
    write_values(object, name, H5T_NATIVE_DOUBLE, numbers.data(), numbers.size(), what);
  }
}

Hid make_type(DType type) {
  const std::string what = "cannot make the HDF5 type " + std::string(name_of(type));
  Hid id = checked(H5Tcopy(type == DType::f64 ? H5T_NATIVE_DOUBLE : H5T_NATIVE_FLOAT), ExitCode::internal, what);
  if (type != DType::f16 && type != DType::bf16) return id;
  // Fields first, size last: the fields must fit the type at every moment.
  const bool brain = type == DType::bf16;
  check(H5Tset_fields(id, 15, brain ? 7 : 10, brain ? 8 : 5, 0, brain ? 7 : 10), ExitCode::internal, what);
  check(H5Tset_ebias(id, brain ? 127 : 15), ExitCode::internal, what);
  check(H5Tset_size(id, 2), ExitCode::internal, what);
  return id;
}

}  // namespace longscan::io

namespace longscan {

std::string hdf5_version() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

}  // namespace longscan
