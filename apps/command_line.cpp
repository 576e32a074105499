// SPDX-License-Identifier: Apache-2.0
#include "apps/command_line.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace longscan {
namespace {

bool everything(const CLI::App*) { return true; }

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(everything)) names.push_back(command->get_name());
  return names;
}

/// "generate.delta", "inspect", …: the commands that take options, below `app`.
void list_sections(const CLI::App& app, const std::string& before, std::vector<std::string>& sections) {
  for (const CLI::App* command : app.get_subcommands(everything)) {
    const std::string name = before + command->get_name();
    if (command->get_subcommands(everything).empty()) sections.push_back(name);
    list_sections(*command, name + ".", sections);
  }
}

std::vector<std::string> section_names(const CLI::App& app) {
  const CLI::App* top = &app;
  while (top->get_parent()) top = top->get_parent();
  std::vector<std::string> sections;
  list_sections(*top, "", sections);
  return sections;
}

std::string section_of(const CLI::App& app) {
  const std::string path = path_of(app);
  std::string section = path.substr(std::min(path.size(), path.find(' ') + 1));
  std::replace(section.begin(), section.end(), ' ', '.');
  return section;
}

/// CLI11 takes a word in brackets for a list; as a path from the root the pattern is the same.
std::string rooted(const std::string& word) {
  return word.size() > 1 && word.front() == '[' && word.back() == ']' ? "/" + word : word;
}
std::vector<std::string> with_rooted_patterns(std::vector<std::string> words) {
  for (std::string& word : words) word = rooted(word);
  return words;
}

/// `name = value` of a file for the option of that name, if the command line did not give it.
void take_from_config(CLI::App& app, const std::string& path, const CLI::ConfigItem& item) {
  CLI::Option* option = app.get_option_no_throw("--" + item.name);
  if (!option) {
    std::string dashed = item.name;
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    option = app.get_option_no_throw("--" + dashed);
  }
  if (!option) option = app.get_option_no_throw(item.name);
  if (!option) throw_unknown("option in " + path, "--" + item.name, option_names(app));
  if (!option->get_configurable())
    throw Error(ExitCode::usage, path + ": '" + item.name + "' is for the command line alone; take it out of the file");
  if (!option->empty()) return;
  try {
    if (option->get_expected_min() == 0)
      option->add_result(option->get_flag_value(item.name, CLI::ConfigBase().to_flag(item)));
    else
      option->add_result(item.name == "group" ? with_rooted_patterns(item.inputs) : item.inputs);
    option->run_callback();
  } catch (const CLI::ParseError& e) {
    throw Error(ExitCode::usage, path + ": " + e.what());
  } catch (const Error& e) {
    throw Error(e.code(), path + ": " + e.what());
  }
}

/// The lines of a file of options. CLI11 takes what is in brackets for a list: a pattern of groups that starts with one
/// is put into quotes. A list has commas, quotes or blanks.
std::stringstream with_quoted_patterns(std::istream& file) {
  std::stringstream lines;
  for (std::string line; std::getline(file, line);) {
    std::string name, value, more;
    const auto at = line.find('=');
    if (at != std::string::npos) {
      std::istringstream(line.substr(0, at)) >> name;
      std::istringstream rest(line.substr(at + 1));
      rest >> value >> more;
      if (more[0] == '#' || more[0] == ';') more.clear();  // a comment
    }
    const bool pattern = (name == "group" || name.ends_with(".group")) && more.empty() && value.rfind('[', 0) == 0 &&
                         value.find(']') != std::string::npos && value.find_first_of(",\"'") == std::string::npos;
    lines << (pattern ? name + " = \"" + value + '"' : line) << '\n';
  }
  return lines;
}

/// Gives `app` the options of a file that the command line does not give: lines `option = value`, or those of the
/// section [command], [generate.delta]. (CLI11 looks at the files of its outermost App only.)
void read_config(CLI::App& app, const std::string& path) {
  std::error_code ignored;
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path, ignored))
    throw Error(ExitCode::file_io, "cannot read the options in " + path);
  std::vector<CLI::ConfigItem> items;
  try {
    std::stringstream lines = with_quoted_patterns(file);
    items = CLI::ConfigBase().from_config(lines);
  } catch (const CLI::ParseError& e) {
    throw Error(ExitCode::usage, path + ": " + e.what());
  }
  const std::string section = section_of(app);
  const std::vector<std::string> sections = section_names(app);
  for (const CLI::ConfigItem& item : items) {
    if (item.name == "++" || item.name == "--") continue;  // a section starts or ends
    const std::string parents = CLI::detail::join(item.parents, ".");
    if (!parents.empty() && std::find(sections.begin(), sections.end(), parents) == sections.end())
      throw_unknown("section in " + path, parents, sections);
    if (parents.empty() || parents == section) take_from_config(app, path, item);
  }
}

const CLI::App* innermost(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return app;
}

/// What a command wants and was not given: positionals by what they stand for.
std::vector<std::string> missing(const CLI::App& app) {
  std::vector<std::string> found;
  for (const CLI::Option* option : app.get_options())
    if (option->get_required() && option->empty())
      found.push_back((option->nonpositional() ? "--" + option->get_lnames().front() + " " : "") + type_text(*option));
  return found;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  return CLI::detail::join(words, between);
}

constexpr std::size_t help_column = 28, help_width = 100;

/// In characters: UTF-8.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

/// `text` from column `help_column` on, broken between words.
std::string wrapped(const std::string& text) {
  std::string out, line;
  std::size_t width = 0;
  for (const std::string& word : CLI::detail::split(text, ' ')) {
    const std::size_t length = width_of(word);
    if (width > 0 && help_column + width + 1 + length > help_width)
      out += line + "\n" + std::string(help_column, ' '), line.clear(), width = 0;
    line += (width > 0 ? " " : "") + word, width += length + (width > 0 ? 1 : 0);
  }
  return out + line;
}

std::string help_entry(const std::string& left, const std::string& text) {
  const std::size_t width = 2 + width_of(left);
  const std::string gap =
      width < help_column ? std::string(help_column - width, ' ') : "\n" + std::string(help_column, ' ');
  return "  " + left + gap + wrapped(text) + "\n";
}

/// Help in lines that a terminal holds, with types as they are in the manual page.
class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter() { label("Positionals", "Files"); }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    const std::string text = CLI::Formatter::make_help(app, name, mode);
    std::string out;  // without lines that are empty twice
    for (char c : text)
      if (c != '\n' || out.size() < 2 || out.substr(out.size() - 2) != "\n\n") out += c;
    return out;
  }
  std::string make_option(const CLI::Option* option, bool positional) const override {
    std::string left = positional ? type_text(*option) : make_option_name(option, false);
    left = CLI::detail::find_and_replace(left, ",", ", ");
    if (!positional && !type_text(*option).empty()) left += " " + type_text(*option);
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) left += " …";
    std::string text = option->get_description();
    if (!option->get_default_str().empty()) text += " (default " + option->get_default_str() + ")";
    if (option->get_required()) text += " (required)";
    return help_entry(left, text);
  }
  std::string make_subcommand(const CLI::App* app) const override {
    return help_entry(app->get_name(), app->get_description());
  }
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string text = "Usage: " + name;
    for (const CLI::Option* option : app->get_options([](const CLI::Option* o) { return o->get_positional(); }))
      text += option->get_required() ? " " + option->get_type_name() : " [" + option->get_type_name() + "]";
    for (const CLI::Option* option : app->get_options())
      if (option->nonpositional() && option->get_required())
        text += " -" + option->get_snames().front() + " " + option->get_type_name();
    return text + (app->get_subcommands(everything).empty() ? " [OPTION …]\n" : " COMMAND …\n");
  }
};

void help_of_all(const CLI::App& app, std::string& text) {
  for (const CLI::App* command : app.get_subcommands(everything)) {
    if (command->get_subcommands(everything).empty()) text += "\n" + command->help(path_of(app)) + "\n";
    help_of_all(*command, text);
  }
}

}  // namespace

std::string path_of(const CLI::App& app) {
  return (app.get_parent() ? path_of(*app.get_parent()) + " " : "") + app.get_name();
}

void prepare_help(CLI::App& app) {
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_help_flag("-h,--help", "print this help");
}

void answer_version(CLI::App& app, const std::string& version) {
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    command->set_version_flag("--version", version)->group("");  // in no list: it is in that of longscan
    answer_version(*command, version);
  }
}

std::string type_text(const CLI::Option& option) {
  if (option.get_expected_min() == 0) return "";  // a flag
  const std::string type = option.get_type_name();
  return type == "INT" || type == "UINT" ? "N" : type == "FLOAT" ? "X" : type == "TEXT" ? "WORD" : type;
}

std::string full_help(const CLI::App& app) {
  std::string text = app.help("", CLI::AppFormatMode::Normal);
  help_of_all(app, text);
  return text;
}

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  return {
      [least, most](std::string& word) {
        char* end = nullptr;
        errno = 0;
        const long long value = std::strtoll(word.c_str(), &end, 10);
        const bool whole = !word.empty() && *end == '\0';
        if (whole && errno == 0 && value >= least && value <= most) return std::string();
        return "'" + word + "' is not a whole number " +
               (most < std::numeric_limits<std::int64_t>::max() && least != 0
                    ? "from " + std::to_string(least) + " to " + std::to_string(most)
                    : "of " + std::to_string(least) + " or more" + (whole && value > 0 ? " that fits 64 bits" : ""));
      },
      ""};
}

namespace {

CLI::Validator finite_number(bool zero, const char* wanted) {
  return {[zero, wanted](std::string& word) {
            char* end = nullptr;
            const double value = std::strtod(word.c_str(), &end);
            if (!word.empty() && *end == '\0' && std::isfinite(value) && (value > 0 || (zero && value == 0)))
              return std::string();
            return "'" + word + "' is not a number " + wanted;
          },
          ""};
}

}  // namespace

CLI::Validator positive_number() { return finite_number(false, "above zero"); }
CLI::Validator non_negative_number() { return finite_number(true, "of zero or more"); }

CLI::Validator size_in_bytes() {
  return {[](std::string& word) {
            const std::string given = word;
            try {
              if (CLI::AsSizeValue(false)(word).empty()) return std::string();
            } catch (const CLI::ValidationError&) {
            }
            return "'" + given + "' is not a size such as 512MB or 64GB";
          },
          ""};
}

CLI::Validator scale_word() {
  return {[](std::string& word) {
            char* end = nullptr;
            if (word == "rsqrt") return std::string();
            const double value = std::strtod(word.c_str(), &end);
            return !word.empty() && *end == '\0' && std::isfinite(value)
                       ? std::string()
                       : "'" + word + "' is neither a finite number nor rsqrt";
          },
          ""};
}

std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const std::string option = "--group";
  bool patterns = false;
  for (std::string& word : words) {
    if (word.rfind(option + "=", 0) == 0) word = option + "=" + rooted(word.substr(option.size() + 1));
    if (word.rfind('-', 0) == 0)
      patterns = word == option;
    else if (patterns)
      word = rooted(word);
  }
  return words;
}

void throw_usage(const CLI::App& app, const CLI::ParseError& e) {
  const CLI::App* where = innermost(&app);
  const std::vector<std::string> commands = command_names(*where);
  std::string unknown;
  for (const CLI::App* level = &app; unknown.empty(); level = level->get_subcommands().front()) {
    for (const std::string& word : level->remaining())
      if (unknown.empty()) unknown = word;
    if (level->get_subcommands().empty()) break;
  }
  const std::string see = "; see " + path_of(*where) + " --help";
  const bool required = dynamic_cast<const CLI::RequiredError*>(&e) != nullptr;
  if (!unknown.empty() && ((required && !commands.empty()) || dynamic_cast<const CLI::ExtrasError*>(&e))) {
    if (unknown[0] == '-') throw_unknown("option", unknown.substr(0, unknown.find('=')), option_names(*where));
    if (!commands.empty()) throw_unknown("command", unknown, commands);
    throw Error(ExitCode::usage, "do not know what to do with '" + unknown + "'" + see);
  }
  if (required && !commands.empty())
    throw Error(ExitCode::usage, "a command is missing: " + joined(commands, ", ") + see);
  if (const auto what = missing(*where); required && !what.empty())
    throw Error(ExitCode::usage, joined(what, " and ") + (what.size() > 1 ? " are" : " is") + " missing" + see);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e))  // "--group: 1 required PATH missing"
    throw Error(ExitCode::usage,
                std::string(e.what()).substr(0, std::string(e.what()).find(':')) + " needs a value" + see);
  throw Error(ExitCode::usage, e.what() + see);
}

void config_option(CLI::App& app) {
  app.add_option_function<std::string>(
         "--config", [&app](const std::string& path) { read_config(app, path); },
         "read options from a file, one `option = value` a line; the command line wins")
      ->configurable(false)
      ->type_name("FILE");
}

void dataset_names(CLI::App& app, std::map<std::string, std::string>& names, const std::vector<std::string>& roles) {
  for (const std::string& role : roles) {
    std::string option = "--" + role;
    std::replace(option.begin(), option.end(), '_', '-');
    if (option != "--" + role) option += ",--" + role;
    app.add_option_function<std::string>(
           option, [&names, role](const std::string& name) { names[role] = name; },
           "name of the dataset that is " + role)
        ->type_name("NAME")
        ->group("Dataset names");
  }
}

void one_of(CLI::App& app, const std::string& option, std::string& target, const std::vector<std::string>& words,
            const std::string& help) {
  app.add_option_function<std::string>(
         option,
         [&target, option, words](const std::string& word) {
           if (std::find(words.begin(), words.end(), word) == words.end())
             throw_unknown("value of " + option, word, words);
           target = word;
         },
         help)
      ->type_name(joined(words, "|"));
}

}  // namespace longscan
