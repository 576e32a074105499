// SPDX-License-Identifier: Apache-2.0
#include "apps/describe.hpp"

#include <sstream>

#include "apps/command_line.hpp"

namespace longscan {
namespace {

/// Text for roff: nothing in it is a request or an escape.
std::string roff(const std::string& text) {
  std::string out;
  bool starts = true;
  for (char c : text) {
    if (starts && (c == '.' || c == '\'')) out += "\\&";
    starts = c == '\n';
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
  }
  return out;
}

std::string names(const CLI::Option& option) {
  std::string text;
  for (const std::string& n : option.get_snames()) text += (text.empty() ? "-" : ", -") + n;
  for (const std::string& n : option.get_lnames()) text += (text.empty() ? "--" : ", --") + n;
  return text.empty() ? option.get_name(true) : text;
}

void describe_options(std::ostream& out, const CLI::App& app) {
  for (const CLI::Option* o : app.get_options()) {
    if (o->get_group().empty()) continue;  // hidden
    const bool positional = o->get_lnames().empty() && o->get_snames().empty();
    const std::string type = type_text(*o);
    out << ".TP\n";
    if (positional)
      out << "\\fI" << roff(type) << "\\fR\n";
    else
      out << "\\fB" << roff(names(*o)) << "\\fR" << (type.empty() ? "" : " \\fI" + roff(type) + "\\fR")
          << (o->get_expected_max() == CLI::detail::expected_max_vector_size ? " …" : "") << "\n";
    out << roff(o->get_description());
    if (!o->get_default_str().empty()) out << " (default " << roff(o->get_default_str()) << ")";
    if (o->get_required()) out << " (required)";
    out << "\n";
  }
}

void describe_commands(std::ostream& out, const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_subcommands([](const CLI::App*) { return true; }).empty()) {
      out << ".SS " << roff(path_of(*command)) << "\n" << roff(command->get_description()) << ".\n";
      describe_options(out, *command);
      const std::string footer = command->get_footer();
      if (!footer.empty()) out << ".PP\n.nf\n" << roff(footer) << "\n.fi\n";
    }
    describe_commands(out, *command);
  }
}

/// Words that a type such as auto|delta|newton, or PATH, allows.
std::vector<std::string> words_of(const std::string& type) {
  std::vector<std::string> words;
  if (type.find('|') == std::string::npos) return words;
  std::istringstream in(type);
  for (std::string word; std::getline(in, word, '|');)
    if (!word.empty() && (std::islower(static_cast<unsigned char>(word[0])) || word.find("HD") != std::string::npos ||
                          word.find("TD") != std::string::npos))
      words.push_back(word);
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}

void complete_commands(std::ostream& out, const CLI::App& app, const std::string& path) {
  std::vector<std::string> commands, options;
  for (const CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; })) commands.push_back(c->get_name());
  for (const CLI::Option* o : app.get_options())
    if (!o->get_group().empty())
      for (const std::string& n : o->get_lnames()) options.push_back("--" + n);
  out << "    '" << path << "') commands='" << joined(commands) << "' options='" << joined(options) << "'\n"
      << "      case $previous in\n";
  for (const CLI::Option* o : app.get_options()) {
    const std::vector<std::string> words = words_of(o->get_type_name());
    if (words.empty() || o->get_lnames().empty()) continue;
    out << "        --" << o->get_lnames().front() << ") words='" << joined(words) << "' ;;\n";
  }
  out << "      esac ;;\n";
  for (const CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; }))
    complete_commands(out, *c, path + (path.empty() ? "" : " ") + c->get_name());
}

void list_paths(std::ostream& out, const CLI::App& app, const std::string& path) {
  for (const CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string here = path + (path.empty() ? "" : " ") + c->get_name();
    out << "|'" << here << "'";
    list_paths(out, *c, here);
  }
}

}  // namespace

std::string man_page(const CLI::App& app) {
  std::ostringstream out;
  out << ".TH LONGSCAN 1 \"\" \"longscan " << LONGSCAN_VERSION << "\" \"User Commands\"\n"
      << ".SH NAME\nlongscan \\- recurrences over sequences too long for one device\n"
      << ".SH SYNOPSIS\n.B longscan\n\\fICOMMAND\\fR [\\fIOPTION\\fR …]\n.br\n.B mpirun \\-n \\fIP\\fB longscan\n"
      << "\\fICOMMAND\\fR [\\fIOPTION\\fR …]\n"
      << ".SH DESCRIPTION\n"
      << "Evaluates the delta rule of linear attention and nonlinear recurrent networks over sequences that are cut "
         "over "
         "MPI ranks. Sequences come from HDF5 files and results go to HDF5 files.\n"
      << ".PP\nOptions of a command may stand in a file, one \\fIoption = value\\fR a line, or in its section "
         "\\fI[command]\\fR, for \\fB\\-\\-config\\fR.\n"
      << ".SH OPTIONS\n";
  describe_options(out, app);
  out << ".SH COMMANDS\n";
  describe_commands(out, app);
  out << ".SH EXIT STATUS AND EXAMPLE\n.nf\n" << roff(app.get_footer()) << "\n.fi\n";
  return out.str();
}

std::string bash_completion(const CLI::App& app) {
  std::ostringstream out;
  out << "# bash completion for longscan " << LONGSCAN_VERSION << "; made by longscan --completion\n"
      << "_longscan() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
         "  local command='' commands='' options='' words='' word try i\n"
         "  COMPREPLY=()\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    word=${COMP_WORDS[i]}\n"
         "    try=${command:+$command }$word\n"
         "    case $try in\n      ''";
  list_paths(out, app, "");
  out << ") command=$try ;;\n    esac\n  done\n  case $command in\n";
  complete_commands(out, app, "");
  out << "  esac\n"
         "  if [[ -n $words ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  elif [[ $current == -* ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$options\" -- \"$current\"))\n"
         "  elif [[ -n $commands ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$commands\" -- \"$current\"))\n"
         "  fi\n"
         "}\n"
         "complete -o default -F _longscan longscan\n";  // where nothing is said: file names, by the shell itself
  return out.str();
}

}  // namespace longscan
