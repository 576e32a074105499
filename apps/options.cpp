// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "apps/command_line.hpp"
#include "apps/describe.hpp"

namespace longscan {
namespace {

CLI::Option* output_type(CLI::App& app, std::optional<DType>& target) {
  return app
      .add_option_function<std::string>(
          "--output-dtype", [&target](const std::string& word) { target = types.parse("--output-dtype", word); },
          "type of o (default: that of v)")
      ->type_name(types.text());
}

/// Every option and command that the parser knows at the place where it stopped.
std::vector<std::string> known_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

/// Gives `app` the options of a file that the command line does not give: lines `option = value`, or those of the
/// section [command], [generate.delta]. (CLI11 looks at the files of its outermost App only.)
void read_config(CLI::App& app, const std::string& path) {
  std::vector<CLI::ConfigItem> items;
  try {
    items = CLI::ConfigBase().from_file(path);
  } catch (const CLI::FileError&) {
    throw Error(ExitCode::file_io, "cannot read the options in " + path);
  }
  std::vector<std::string> section;  // generate, delta
  for (const CLI::App* level = &app; level->get_parent(); level = level->get_parent())
    section.insert(section.begin(), level->get_name());
  for (const CLI::ConfigItem& item : items) {
    if (item.name == "++" || item.name == "--") continue;  // a section starts or ends
    if (!item.parents.empty() && item.parents != section) continue;
    CLI::Option* option = app.get_option_no_throw("--" + item.name);
    if (!option) option = app.get_option_no_throw(item.name);
    if (!option || !option->get_configurable()) throw_unknown("option in " + path, "--" + item.name, known_names(app));
    if (!option->empty()) continue;
    if (option->get_expected_min() == 0)
      option->add_result(option->get_flag_value(item.name, CLI::ConfigBase().to_flag(item)));
    else
      option->add_result(item.inputs);
    option->run_callback();
  }
}

void solve_options(CLI::App& app, SolveOptions& o) {
  app.add_option("input", o.input, "input file (HDF5)")->required()->type_name("IN.h5");
  app.add_option("-o,--output", o.output, "output file; appears only when complete")->required()->type_name("OUT.h5");
  app.add_option("--group", o.groups, "groups to solve; shell patterns, natural order (default /)")->type_name("PATH…");
  choice(app, "--precision", o.precision, precisions,
         "arithmetic; auto follows the widest input: f64, f32, or bf16 products with f32 sums");
  output_type(app, o.output_type);
  app.add_option("--window", o.window, "tokens a rank in memory at a time (default: from free memory)")
      ->check(CLI::PositiveNumber)
      ->type_name("TOKENS");
  choice(app, "--scan", o.scan, scans,
         "how states pass over the ranks; auto goes by measured costs, and the report says why");
  one_of(app, "--transport", o.transport, {"auto", "mpi", "nccl"},
         "what carries them; auto: NCCL between GPUs, else MPI");
  app.add_flag("--reproducible", o.reproducible, "the same bits for any number of ranks and any windows");
  app.add_option(
         "--checkpoint", o.checkpoint,
         "where to leave checkpoints (default OUT.h5.checkpoint, when SIGTERM, SIGUSR1 or SIGUSR2 asks for one; "
         "then exit code 75)")
      ->type_name("FILE")
      ->group("Batch jobs");
  app.add_option("--checkpoint-every", o.checkpoint_every,
                 "seconds between checkpoints (default 600 with --checkpoint); 0: only when a signal asks")
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS")
      ->group("Batch jobs");
  app.add_flag("--resume", o.resume, "continue from the checkpoint, if there is one, on any number of ranks")
      ->group("Batch jobs");
  app.add_option("--stall-timeout", o.stall_timeout, "end the job when nothing has moved for so long; 0 is never")
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS")
      ->capture_default_str()
      ->group("Batch jobs");
  app.add_option("--report", o.report, "write a report")->type_name("FILE.json");
  app.add_flag("--force", o.force, "replace an existing output");
  app.add_flag("--quiet", o.quiet, "print errors only");
  config_option(app);
}

}  // namespace

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

namespace {

void newton_options(CLI::App& app, NewtonCommand& c) {
  solve_options(app, c.solve);
  app.add_option_function<std::string>(
         "--layout",
         [&c](const std::string& word) {
           if (word != "TD" && word != "BTD") throw_unknown("value of --layout", word, {"TD", "BTD"});
           c.layout = word;
         },
         "order of the axes (default TD with two, BTD with three)")
      ->type_name("TD|BTD");
  app.add_option("--cell", c.cell, "the cell: a group with a torch state_dict (default: group /cell of IN.h5)")
      ->type_name("CELL.h5[:/group]");
  choice(app, "--method", c.method, methods, "how all tokens are solved at once; auto falls back and is never wrong");
  app.add_option("--tolerance", c.tolerance, "relative to the RMS of h (default 1e-6 in float32, 1e-10 in float64)")
      ->check(CLI::PositiveNumber)
      ->type_name("X");
  app.add_option("--max-iterations", c.max_iterations, "most passes of a named method")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--segment", c.segment, "tokens of a shooting segment (default: chosen)")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  dataset_names(app, c.names, {"x", "h0", "c0", "cu_seqlens"});
  app.footer(
      "Example:\n  longscan generate newton -o in.h5 --tokens 4096 --cell gru --hidden 32 --input 16\n"
      "  mpirun -n 2 longscan newton in.h5 -o out.h5");
}

void delta_options(CLI::App& app, DeltaCommand& c) {
  solve_options(app, c.solve);
  choice(app, "--layout", c.solve.layout, layouts, "order of the axes (default THD with three, BTHD with four)");
  choice(app, "--variant", c.variant, variants, "delta rule, or free vectors a, b (dplr); auto: by the datasets");
  choice(app, "--erase", c.erase, erases,
         "what the erasing term reads: the decayed state, or the state before the decay");
  choice(app, "--inverse", c.inverse, inverses, "how a chunk's triangular system is solved");
  app.add_option("--chunk", c.chunk, "tokens of a chunk")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--scale", c.scale, "factor of the output: a number, or rsqrt for 1/sqrt(d_key)")
      ->check([](const std::string& word) {
        if (word == "rsqrt") return std::string();
        std::size_t used = 0;
        try {
          (void)std::stod(word, &used);
        } catch (const std::exception&) {
        }
        return used == word.size() && used > 0 ? std::string() : "'" + word + "' is neither a number nor rsqrt";
      })
      ->type_name("X|rsqrt")
      ->capture_default_str();
  app.add_flag("--normalize-keys", c.normalize_keys, "divide k by |k| (a zero key stays zero)");
  app.add_flag("--state-only", c.state_only, "write final_state alone");
  app.add_option("--state-every", c.state_every, "also write the state after every N tokens")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  dataset_names(app, c.names, {"q", "k", "v", "beta", "eta", "log_decay", "a", "b", "initial_state", "cu_seqlens"});
  app.footer(
      "Example:\n  longscan generate delta -o in.h5 --tokens 4096 --heads 2 --d-key 32 --d-value 32\n"
      "  mpirun -n 2 longscan delta in.h5 -o out.h5");
}

void generate_options(CLI::App& app, GenerateDelta& g) {
  app.add_option("-o,--output", g.output, "file to write")->required()->type_name("IN.h5");
  app.add_option("--tokens", g.tokens, "T")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--heads", g.heads, "H")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--d-key", g.d_key, "K")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--d-value", g.d_value, "V")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option_function<std::string>(
         "--decay",
         [&g](const std::string& word) {
           if (word != "none" && word != "head" && word != "channel")
             throw_unknown("value of --decay", word, {"none", "head", "channel"});
           g.decay = word;
         },
         "log_decay: none, one a head, one a key channel")
      ->type_name("none|head|channel");
  choice(app, "--dtype", g.type, types, "type of the datasets (default f32)");
  preset_options(
      app, g.preset, g.shortest,
      "plain; gated: decays near one; bursts: quiet stretches, and bursts of strong writes with nearly equal "
      "keys; packed: sequences of heavy-tailed lengths; realistic: all of these");
  app.add_option("--seed", g.seed, "the same seed gives the same file, on any number of ranks")->capture_default_str();
  app.add_flag("--force", g.force, "replace an existing file");
  app.add_flag("--quiet", g.quiet, "print errors only");
  config_option(app);
  app.footer("Example:\n  longscan generate delta -o in.h5 --tokens 4096 --heads 2 --d-key 32 --d-value 32 --seed 1");
}

void bench_io_options(CLI::App& app, BenchIo& b) {
  app.add_option("--tokens", b.tokens, "T")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", b.heads, "H")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--d-key", b.d_key, "K")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--d-value", b.d_value, "V")->check(CLI::PositiveNumber)->capture_default_str();
  choice(app, "--dtype", b.type, types, "type of the datasets (default f32)");
  app.add_option("--window", b.window, "tokens a rank in memory at a time (default: a sixteenth)")
      ->check(CLI::PositiveNumber)
      ->type_name("TOKENS");
  app.add_option("--folder", b.folder, "where the files go; they are removed")->type_name("DIR")->capture_default_str();
  app.add_option("--runs", b.runs, "timed runs")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--json", b.json, "print one JSON array of rows on stdout");
  app.footer("Example:\n  longscan bench io --tokens 8192 --heads 1");
}

const CLI::App* innermost(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return app;
}

/// CLI11's words for a wrong command line, with the nearest name where a word is unknown.
[[noreturn]] void throw_usage(const CLI::App& app, const CLI::ParseError& e) {
  const CLI::App* where = innermost(&app);
  const auto left = where->remaining();
  std::string unknown;
  for (const CLI::App* level = &app; unknown.empty(); level = level->get_subcommands().front()) {
    for (const std::string& word : level->remaining())
      if (unknown.empty()) unknown = word;
    if (level->get_subcommands().empty()) break;
  }
  const bool needs_command = dynamic_cast<const CLI::RequiredError*>(&e) && !where->get_subcommands(nullptr).empty();
  if (!unknown.empty() && (needs_command || dynamic_cast<const CLI::ExtrasError*>(&e))) {
    if (unknown[0] == '-') throw_unknown("option", unknown.substr(0, unknown.find('=')), known_names(*where));
    if (!where->get_subcommands(nullptr).empty()) throw_unknown("command", unknown, known_names(*where));
    throw Error(ExitCode::usage,
                "do not know what to do with '" + unknown + "'; see longscan " + where->get_name() + " --help");
  }
  throw Error(ExitCode::usage, std::string(e.what()) + "; see --help");
}

}  // namespace

void one_of(CLI::App& app, const std::string& option, std::string& target, const std::vector<std::string>& words,
            const std::string& help) {
  std::string type;
  for (const std::string& word : words) type += (type.empty() ? "" : "|") + word;
  app.add_option_function<std::string>(
         option,
         [&target, option, words](const std::string& word) {
           if (std::find(words.begin(), words.end(), word) == words.end())
             throw_unknown("value of " + option, word, words);
           target = word;
         },
         help)
      ->type_name(type);
}

std::string name_of(Layout layout) {
  for (const auto& p : layouts.pairs)
    if (p.second == layout) return p.first;
  return "auto";
}

/// Groups, types, windows and dataset names.
static void add_common(const SolveOptions& solve, const std::map<std::string, std::string>& names,
                       std::map<std::string, std::string>& d) {
  std::string groups;
  for (const std::string& g : solve.groups) groups += (groups.empty() ? "" : " ") + g;
  d["group"] = groups.empty() ? "/" : groups;
  if (solve.output_type) d["output_dtype"] = std::string(name_of(*solve.output_type));
  if (solve.window > 0) d["window"] = std::to_string(solve.window);
  for (const auto& [role, name] : names) d["name_" + role] = name;
}

std::map<std::string, std::string> describe(const DeltaCommand& c) {
  const auto yes = [](bool b) { return std::string(b ? "yes" : "no"); };
  std::map<std::string, std::string> d = {{"layout", name_of(c.solve.layout)},
                                          {"precision", std::string(name_of(c.solve.precision))},
                                          {"variant", c.variant ? std::string(name_of(*c.variant)) : "auto"},
                                          {"erase", std::string(name_of(c.erase))},
                                          {"inverse", std::string(name_of(c.inverse))},
                                          {"chunk", std::to_string(c.chunk)},
                                          {"scale", c.scale},
                                          {"normalize_keys", yes(c.normalize_keys)},
                                          {"reproducible", yes(c.solve.reproducible)},
                                          {"scan", std::string(name_of(c.solve.scan))},
                                          {"state_only", yes(c.state_only)},
                                          {"state_every", std::to_string(c.state_every)}};
  add_common(c.solve, c.names, d);
  return d;
}

std::map<std::string, std::string> describe(const NewtonCommand& c) {
  std::map<std::string, std::string> d = {{"layout", c.layout},
                                          {"precision", std::string(name_of(c.solve.precision))},
                                          {"cell", c.cell},
                                          {"method", std::string(name_of(c.method))},
                                          {"max_iterations", std::to_string(c.max_iterations)},
                                          {"scan", std::string(name_of(c.solve.scan))},
                                          {"reproducible", c.solve.reproducible ? "yes" : "no"}};
  char tolerance[32];
  std::snprintf(tolerance, sizeof tolerance, "%g", c.tolerance);
  d["tolerance"] = c.tolerance > 0 ? tolerance : "default";
  add_common(c.solve, c.names, d);
  if (c.segment > 0) d["segment"] = std::to_string(c.segment);
  return d;
}

void run_command_line(Transport& ranks, int argc, char** argv) {
  CLI::App app("Recurrences over sequences too long for one device, cut over MPI ranks.", "longscan");
  app.set_version_flag("--version", std::string("longscan ") + LONGSCAN_VERSION);
  app.require_subcommand(0, 1);
  app.set_help_all_flag("--help-all", "help of every command");
  bool man = false;
  app.add_flag("--man-page", man, "print the manual page (man -l reads it)");
  std::string shell;
  one_of(app, "--completion", shell, {"bash", "zsh"}, "print a script that completes command lines; source it");
  app.footer(
      "Example:\n  longscan generate delta -o in.h5 --tokens 4096\n  mpirun -n 2 longscan delta in.h5 -o out.h5\n"
      "  longscan verify in.h5 out.h5\n"
      "Exit codes: 0 done, 1 internal error, 2 usage, 3 bad input, 4 file I/O, 5 memory or GPU, 6 numerical,\n"
      "75 stopped after a checkpoint.");

  DeltaCommand delta;
  CLI::App* delta_app = app.add_subcommand("delta", "solve the (gated, generalized) delta rule");
  delta_options(*delta_app, delta);

  NewtonCommand newton;
  CLI::App* newton_app = app.add_subcommand("newton", "evaluate a nonlinear recurrent network");
  newton_options(*newton_app, newton);

  InspectCommand inspect;
  CLI::App* inspect_app =
      app.add_subcommand("inspect", "what is in a file, how it would be read, what is wrong, how hard it is");
  inspect_options(*inspect_app, inspect);

  PlanCommand plan;
  CLI::App* plan_app =
      app.add_subcommand("plan", "memory a rank, windows, traffic, time of a solve, before anything is read");
  plan_options(*plan_app, plan);

  CLI::App* generate_app = app.add_subcommand("generate", "write synthetic data of any length");
  generate_app->require_subcommand(1);
  GenerateDelta generate;
  CLI::App* generate_delta_app = generate_app->add_subcommand("delta", "input for longscan delta");
  generate_options(*generate_delta_app, generate);

  GenerateNewton generate_newton;
  CLI::App* generate_newton_app = generate_app->add_subcommand("newton", "input for longscan newton: x and a cell");
  generate_newton_options(*generate_newton_app, generate_newton);

  VerifyCommand verify;
  CLI::App* verify_app = app.add_subcommand("verify", "recompute token by token in float64 and compare");
  verify_app->add_option("input", verify.input, "the input of the solve")->required()->type_name("IN.h5");
  verify_app->add_option("output", verify.output, "its output")->required()->type_name("OUT.h5");
  verify_app
      ->add_option(
          "--sample", verify.sample,
          "recompute so many places (delta: a row of a head's state over a stretch of tokens; newton: sequences, and "
          "stretches of tokens); default: all if that is small")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  verify_app->add_option("--tolerance", verify.tolerance, "largest difference, relative to the RMS (default: by type)")
      ->check(CLI::PositiveNumber);
  verify_app->add_flag("--quiet", verify.quiet, "print errors only");
  config_option(*verify_app);
  verify_app->footer("Example:\n  longscan verify in.h5 out.h5 --sample 8");

  CLI::App* bench_app = app.add_subcommand("bench", "measure");
  bench_app->require_subcommand(1);
  BenchDelta bench;
  CLI::App* bench_delta_app = bench_app->add_subcommand("delta", "the delta rule, from memory to memory");
  bench_delta_app->add_option("--tokens", bench.tokens, "T")->check(CLI::PositiveNumber)->capture_default_str();
  bench_delta_app->add_option("--heads", bench.heads, "H")->check(CLI::PositiveNumber)->capture_default_str();
  bench_delta_app->add_option("--d-key", bench.d_key, "K")->check(CLI::PositiveNumber)->capture_default_str();
  bench_delta_app->add_option("--d-value", bench.d_value, "V")->check(CLI::PositiveNumber)->capture_default_str();
  bench_delta_app->add_option("--chunk", bench.chunk, "C")->check(CLI::Range(1, 256))->capture_default_str();
  bench_delta_app->add_option("--runs", bench.runs, "timed runs")->check(CLI::PositiveNumber)->capture_default_str();
  bench_delta_app->add_option("--decay", bench.decay, "none, head or channel")->capture_default_str();
  bench_delta_app
      ->add_option("--key-dimensions", bench.key_dimensions,
                   "channels that keys have: fewer than K of them are never forgotten (0: all)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  bench_delta_app
      ->add_option_function<std::string>(
          "--dtype", [&bench](const std::string& word) { bench.dtype = types.parse("--dtype", word); },
          "type of the inputs (default: that of the arithmetic)")
      ->type_name(types.text());
  bench_delta_app->add_flag("--check", bench.check, "compare all outputs of the first head with float64 arithmetic");
  choice(*bench_delta_app, "--precision", bench.precision, precisions, "arithmetic (default f32)");
  choice(*bench_delta_app, "--scan", bench.scan, scans, "how states pass over the ranks");
  one_of(*bench_delta_app, "--transport", bench.transport, {"auto", "mpi", "nccl"}, "what carries them");
  bench_delta_app->add_flag("--reproducible", bench.reproducible, "time --reproducible");
  bench_delta_app->add_flag("--json", bench.json, "print one JSON array of rows on stdout");
  config_option(*bench_delta_app);
  bench_delta_app->footer("Example:\n  longscan bench delta --tokens 8192 --heads 1");

  BenchNewton bench_newton;
  CLI::App* bench_newton_app =
      bench_app->add_subcommand("newton", "a nonlinear recurrence beside its token loop, from memory to memory");
  bench_newton_options(*bench_newton_app, bench_newton);

  BenchScan bench_scan;
  CLI::App* bench_scan_app = bench_app->add_subcommand("scan", "the scan over ranks: model and measurement");
  bench_scan_options(*bench_scan_app, bench_scan);
  BenchIo bench_io;
  CLI::App* bench_io_app =
      bench_app->add_subcommand("io", "the delta rule from file to file, beside a copy and a solve");
  bench_io_options(*bench_io_app, bench_io);

  CLI::App* info_app = app.add_subcommand("info", "version, libraries, devices");
  info_app->footer("Example:\n  longscan info");

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    if (ranks.rank() == 0) std::printf("%s", innermost(&app)->help().c_str());
    return;
  } catch (const CLI::CallForAllHelp&) {
    if (ranks.rank() == 0) std::printf("%s", app.help("", CLI::AppFormatMode::All).c_str());
    return;
  } catch (const CLI::CallForVersion&) {
    if (ranks.rank() == 0) std::printf("longscan %s\n", LONGSCAN_VERSION);
    return;
  } catch (const CLI::ParseError& e) {
    throw_usage(app, e);
  }
  if (man || !shell.empty()) {
    const std::string first = shell == "zsh" ? "autoload -U +X bashcompinit && bashcompinit\n" : "";
    if (ranks.rank() == 0) std::printf("%s", (man ? man_page(app) : first + bash_completion(app)).c_str());
    return;
  }
  if (app.get_subcommands().empty()) throw_usage(app, CLI::RequiredError("A command"));
  if (delta_app->parsed()) run_delta(ranks, delta);
  if (newton_app->parsed()) run_newton(ranks, newton);
  if (generate_delta_app->parsed()) run_generate_delta(ranks, generate);
  if (generate_newton_app->parsed()) run_generate_newton(ranks, generate_newton);
  if (inspect_app->parsed()) run_inspect(ranks, inspect);
  if (plan_app->parsed()) run_plan(ranks, plan);
  if (verify_app->parsed()) run_verify(ranks, verify);
  if (bench_delta_app->parsed()) run_bench_delta(ranks, bench);
  if (bench_newton_app->parsed()) run_bench_newton(ranks, bench_newton);
  if (bench_scan_app->parsed()) run_bench_scan(ranks, bench_scan);
  if (bench_io_app->parsed()) run_bench_io(ranks, bench_io);
  if (info_app->parsed()) run_info(ranks);
}

}  // namespace longscan
