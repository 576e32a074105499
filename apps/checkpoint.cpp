// SPDX-License-Identifier: Apache-2.0
#include "apps/checkpoint.hpp"

#include <fcntl.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "io/hash.hpp"
#include "io/posix_file.hpp"
#include "longscan/error.hpp"

namespace longscan {
namespace {

const std::string first_line = "longscan checkpoint 3\n", any_version = "longscan checkpoint ";
constexpr std::size_t hash_digits = 16;

std::string temporary_name(const std::string& path) { return path + ".part"; }

nlohmann::json attribute_json(const Attribute& attribute) {
  nlohmann::json j;
  if (const auto* text = std::get_if<std::string>(&attribute))
    j["text"] = *text;
  else if (const auto* integer = std::get_if<std::int64_t>(&attribute))
    j["integer"] = *integer;
  else if (const auto* number = std::get_if<double>(&attribute))
    j["number"] = exact(*number);
  else
    for (const double x : std::get<std::vector<double>>(attribute)) j["numbers"].push_back(exact(x));
  return j;
}

Attribute attribute_from(const nlohmann::json& j) {
  if (j.contains("text")) return j["text"].get<std::string>();
  if (j.contains("integer")) return j["integer"].get<std::int64_t>();
  if (j.contains("number")) return exact(j["number"]);
  std::vector<double> numbers;
  for (const auto& x : j.value("numbers", nlohmann::json::array())) numbers.push_back(exact(x));
  return numbers;
}

[[noreturn]] void unusable(const std::string& path, const std::string& why) {
  throw Error(ExitCode::bad_input, "cannot resume from '" + path + "': " + why +
                                       "; without --resume and with --force the solve starts anew");
}

std::string read_file(const std::string& path) {
  const io::FileDescriptor file = io::open_file(path, O_RDONLY, "open the checkpoint");
  std::string bytes(io::file_size(file, path), '\0');
  if (!io::read_all(file, bytes.data(), static_cast<std::int64_t>(bytes.size()), 0, "'" + path + "'")) bytes.clear();
  return bytes;
}

}  // namespace

std::string text_hash(const std::string& text) {
  io::Hash hash;
  hash.add(text.data(), text.size());
  char digits[hash_digits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash.result()));
  return digits;
}

nlohmann::json exact(double value) { return std::bit_cast<std::int64_t>(value); }
double exact(const nlohmann::json& value) { return std::bit_cast<double>(value.get<std::int64_t>()); }

std::string to_text(const Checkpoint& c) {
  nlohmann::json j = {
      {"command", c.command}, {"fingerprint", c.fingerprint}, {"options", c.options}, {"mark", c.mark},
      {"ranks", c.ranks},     {"window", c.window},           {"problem", c.problem}, {"token", c.token},
      {"report", c.report}};
  for (const FileStamp& s : c.stamps) j["stamps"].push_back({s.bytes, s.nanoseconds});
  for (const auto& [name, value] : c.attributes) j["attributes"][name] = attribute_json(value);
  // file names need not be UTF-8
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Checkpoint checkpoint_from_text(const std::string& text) {
  const nlohmann::json j = nlohmann::json::parse(text);
  Checkpoint c;
  c.command = j.at("command"), c.fingerprint = j.at("fingerprint"), c.mark = j.at("mark"), c.ranks = j.at("ranks");
  c.options = j.at("options").get<std::map<std::string, std::string>>();
  c.window = j.at("window"), c.problem = j.at("problem"), c.token = j.at("token"), c.report = j.at("report");
  for (const auto& s : j.value("stamps", nlohmann::json::array())) c.stamps.push_back({s.at(0), s.at(1)});
  const nlohmann::json& attributes = j.at("attributes");
  for (const auto& [name, value] : attributes.items()) c.attributes[name] = attribute_from(value);
  return c;
}

void check_checkpoint_path(const std::string& path) {
  const io::FileDescriptor file = io::create_locked(temporary_name(path), path, any_version);
  std::remove(temporary_name(path).c_str());
}

void write_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  const std::string text = to_text(checkpoint);
  std::string bytes = first_line + std::to_string(text.size()) + "\n" + text;
  bytes.append(reinterpret_cast<const char*>(checkpoint.state.data()), checkpoint.state.size());
  bytes += text_hash(bytes);

  const std::string part = temporary_name(path);
  const io::FileDescriptor file = io::create_locked(part, path, any_version);
  try {
    io::write_all(file, bytes.data(), static_cast<std::int64_t>(bytes.size()), 0, "the checkpoint '" + part + "'");
    io::sync_file(file, part);
    if (std::rename(part.c_str(), path.c_str()) != 0)
      throw Error(ExitCode::file_io,
                  "cannot rename the checkpoint '" + part + "' to '" + path + "': " + std::strerror(errno));
  } catch (const Error&) {
    std::remove(part.c_str());
    throw;
  }
  io::sync_folder_of(path);
}

void remove_checkpoint(const std::string& path) noexcept {
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  io::remove_abandoned(temporary_name(path), any_version);
}

void check_is_checkpoint(const std::string& path) {
  const std::string begin = read_file(path).substr(0, any_version.size());
  if (any_version.rfind(begin, 0) != 0) unusable(path, "it is not a checkpoint");
}

Checkpoint read_checkpoint(const std::string& path) {
  const std::string bytes = read_file(path);
  if (bytes.rfind(first_line, 0) != 0)
    unusable(path, bytes.empty()                      ? "it is empty"
                   : bytes.rfind(any_version, 0) == 0 ? "it is of another version of longscan"
                                                      : "it is not a checkpoint");
  if (bytes.size() < first_line.size() + hash_digits ||
      text_hash(bytes.substr(0, bytes.size() - hash_digits)) != bytes.substr(bytes.size() - hash_digits))
    unusable(path, "it is damaged or cut short");
  try {
    std::size_t digits = 0;
    const std::size_t size = std::stoull(bytes.substr(first_line.size(), 20), &digits);
    const std::size_t begin = first_line.size() + digits + 1, end = bytes.size() - hash_digits;
    if (size > end - begin) unusable(path, "it is damaged");
    Checkpoint c = checkpoint_from_text(bytes.substr(begin, size));
    const auto* state = reinterpret_cast<const std::byte*>(bytes.data());
    c.state.assign(state + begin + size, state + end);
    return c;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    unusable(path, std::string("it is damaged: ") + e.what());
  }
}

}  // namespace longscan
