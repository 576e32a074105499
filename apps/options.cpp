// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "apps/command_line.hpp"
#include "apps/describe.hpp"

namespace longscan {
namespace {

/// What `results` (o; h and c) are in the words of help, and where their type comes from.
void output_type(CLI::App& app, std::optional<DType>& target, const std::string& results, const std::string& source) {
  app.add_option_function<std::string>(
         "--output-dtype", [&target](const std::string& word) { target = types.parse("--output-dtype", word); },
         "type of " + results + " (default: that of " + source + ")")
      ->type_name(types.text());
}

void solve_options(CLI::App& app, SolveOptions& o) {
  app.add_option("input", o.input, "input file (HDF5)")->required()->type_name("IN.h5");
  app.add_option("-o,--output", o.output, "output file; appears only when complete")->required()->type_name("OUT.h5");
  app.add_option("--group", o.groups, "groups to solve; shell patterns, natural order (default /)")->type_name("PATH");
  app.add_option("--window", o.window, "tokens per rank in memory at a time (default: chosen by free memory)")
      ->check(whole_number(1))
      ->type_name("TOKENS");
  choice(
      app, "--scan", o.scan, scans,
      "algorithm of the scan that passes states over the ranks; auto goes by measured costs, and the report says why");
  one_of(app, "--transport", o.transport, {"auto", "mpi", "nccl"},
         "what carries states between ranks; auto: NCCL between GPUs, else MPI");
  app.add_flag("--reproducible", o.reproducible, "the same bits for any number of ranks and any windows");
  app.add_option(
         "--checkpoint", o.checkpoint,
         "where to leave checkpoints (default OUT.h5.checkpoint, when SIGTERM, SIGUSR1 or SIGUSR2 asks for one; "
         "then exit code 75)")
      ->type_name("FILE")
      ->group("Batch jobs");
  app.add_option("--checkpoint-every", o.checkpoint_every,
                 "seconds between checkpoints (default 600 with --checkpoint); 0: only when a signal asks")
      ->check(non_negative_number())
      ->type_name("SECONDS")
      ->group("Batch jobs");
  app.add_flag("--resume", o.resume, "continue from the checkpoint, if there is one, on any number of ranks")
      ->group("Batch jobs");
  app.add_option("--stall-timeout", o.stall_timeout, "end the job when no rank has made progress for so long; 0: never")
      ->check(non_negative_number())
      ->type_name("SECONDS")
      ->capture_default_str()
      ->group("Batch jobs");
  app.add_option("--report", o.report, "write a report: times, traffic, checks, verdict")->type_name("FILE.json");
  app.add_flag("--force", o.force, "replace an existing output");
  app.add_flag("--quiet", o.quiet, "print errors only");
  config_option(app);
}

void newton_options(CLI::App& app, NewtonCommand& c) {
  solve_options(app, c.solve);
  choice(app, "--precision", c.solve.precision, precisions,
         "arithmetic; auto follows the widest of x and the weights: f64, else f32 (bf16 is f32 too)");
  output_type(app, c.solve.output_type, "h and c", "x");
  app.add_option_function<std::string>(
         "--layout",
         [&c](const std::string& word) {
           if (word != "TD" && word != "BTD") throw_unknown("value of --layout", word, {"TD", "BTD"});
           c.layout = word;
         },
         "order of the axes of x (default TD with two, BTD with three)")
      ->type_name("TD|BTD");
  app.add_option("--cell", c.cell, "the cell: a group with a torch state_dict (default: group /cell of IN.h5)")
      ->type_name("CELL.h5[:/group]");
  choice(app, "--method", c.method, methods,
         "how all tokens are solved at once; auto chooses, and falls back to the token loop");
  app.add_option("--tolerance", c.tolerance,
                 "largest residual, relative to the RMS of h (default 1e-6 in float32, 1e-10 in float64)")
      ->check(positive_number())
      ->type_name("X");
  app.add_option("--max-iterations", c.max_iterations, "most passes of a --method other than auto")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("--segment", c.segment, "tokens of a shooting segment (default: chosen)")
      ->check(whole_number(1))
      ->type_name("N");
  dataset_names(app, c.names, {"x", "h0", "c0", "cu_seqlens"});
  app.footer(
      "Example:\n  longscan generate newton -o in.h5 --tokens 4096 --cell gru --hidden 32 --input 16\n"
      "  mpirun -n 2 longscan newton in.h5 -o out.h5");
}

void delta_options(CLI::App& app, DeltaCommand& c) {
  solve_options(app, c.solve);
  choice(app, "--precision", c.solve.precision, precisions,
         "arithmetic; auto follows the widest of q, k, v: f64, f32, or 16-bit products with f32 sums (bf16)");
  output_type(app, c.solve.output_type, "o", "v");
  choice(app, "--layout", c.solve.layout, layouts,
         "order of the axes of q, k, v (default THD with three, BTHD with four)");
  choice(app, "--variant", c.variant, variants,
         "delta rule, or free vectors a, b (dplr); auto: dplr if there are a and b, but no beta");
  choice(app, "--erase", c.erase, erases,
         "what the erasing term reads: the decayed state, or the state before the decay");
  choice(app, "--inverse", c.inverse, inverses, "how a chunk's triangular system is solved");
  app.add_option("--chunk", c.chunk, "tokens of a chunk, 1 to 256")->check(whole_number(1, 256))->capture_default_str();
  app.add_option("--scale", c.scale, "factor of the output: a number, or rsqrt for 1/sqrt(d_key)")
      ->check(scale_word())
      ->type_name("X|rsqrt")
      ->capture_default_str();
  app.add_flag("--normalize-keys", c.normalize_keys, "divide k by |k| (a zero key stays zero)");
  app.add_flag("--state-only", c.state_only, "write final_state alone");
  app.add_option("--state-every", c.state_every, "also write the state after every N tokens")
      ->check(whole_number(1))
      ->type_name("N");
  dataset_names(app, c.names, {"q", "k", "v", "beta", "eta", "log_decay", "a", "b", "initial_state", "cu_seqlens"});
  app.footer(
      "Example:\n  longscan generate delta -o in.h5 --tokens 4096 --heads 2 --d-key 32 --d-value 32\n"
      "  mpirun -n 2 longscan delta in.h5 -o out.h5");
}

void generate_options(CLI::App& app, GenerateDelta& g) {
  app.add_option("-o,--output", g.output, "file to write")->required()->type_name("IN.h5");
  app.add_option("--tokens", g.tokens, "tokens, T")->check(whole_number(0))->capture_default_str();
  app.add_option("--heads", g.heads, "heads, H")->check(whole_number(1, most_int))->capture_default_str();
  app.add_option("--d-key", g.d_key, "key channels of a head, K")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option("--d-value", g.d_value, "value channels of a head, V")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--decay",
         [&g](const std::string& word) {
           if (word != "none" && word != "head" && word != "channel")
             throw_unknown("value of --decay", word, {"none", "head", "channel"});
           g.decay = word;
         },
         "log_decay: none, one per head, or one per key channel")
      ->type_name("none|head|channel");
  choice(app, "--dtype", g.type, types, "type of the datasets (default f32)");
  preset_options(
      app, g.preset, g.shortest,
      "plain; gated: decays near one; bursts: quiet stretches, and bursts of strong writes with nearly equal "
      "keys; packed: sequences of heavy-tailed lengths; realistic: all of these");
  app.add_option("--seed", g.seed, "the same seed gives the same file, on any number of ranks")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_flag("--force", g.force, "replace an existing file");
  app.add_flag("--quiet", g.quiet, "print errors only");
  config_option(app);
  app.footer("Example:\n  longscan generate delta -o in.h5 --tokens 4096 --heads 2 --d-key 32 --d-value 32 --seed 1");
}

void bench_io_options(CLI::App& app, BenchIo& b) {
  app.add_option("--tokens", b.tokens, "tokens, T")->check(whole_number(1))->capture_default_str();
  CLI::Option* const cell = cell_type(app, b.cell, "newton with this type of cell (default: the delta rule)");
  app.add_option("--heads", b.heads, "heads, H")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->excludes(cell);
  app.add_option("--d-key", b.d_key, "key channels of a head, K")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->excludes(cell);
  app.add_option("--d-value", b.d_value, "value channels of a head, V")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->excludes(cell);
  app.add_option("--hidden", b.hidden, "newton: channels, D")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->needs(cell);
  app.add_option("--input", b.inputs, "newton: features of x, D_in")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->needs(cell);
  app.add_option("--recurrent-scale", b.recurrent_scale, "newton: size of the recurrent weights, as in generate newton")
      ->check(non_negative_number())
      ->type_name("R")
      ->capture_default_str()
      ->needs(cell);
  choice(app, "--dtype", b.type, types, "type of the datasets (default f32)");
  app.add_option("--window", b.window, "tokens per rank in memory at a time (default: as a solve chooses)")
      ->check(whole_number(1))
      ->type_name("TOKENS");
  app.add_option("--folder", b.folder, "where the files go; they are removed")->type_name("DIR")->capture_default_str();
  app.add_option("--runs", b.runs, "timed runs")->check(whole_number(1, most_int))->capture_default_str();
  app.add_flag("--json", b.json, "print one JSON array of rows on stdout");
  config_option(app);
  app.footer(
      "Example:\n  longscan bench io --tokens 8192 --heads 1\n"
      "  longscan bench io --cell paragru --tokens 8192 --hidden 32");
}

}  // namespace

std::string name_of(Layout layout) {
  for (const auto& p : layouts.pairs)
    if (p.second == layout) return p.first;
  return "auto";
}

/// Groups, types, windows and dataset names.
static void add_common(const SolveOptions& solve, const std::map<std::string, std::string>& names,
                       std::map<std::string, std::string>& d) {
  d["group"] = solve.groups.empty() ? "/" : join_words(solve.groups);
  if (solve.output_type) d["output_dtype"] = std::string(name_of(*solve.output_type));
  if (solve.window > 0) d["window"] = std::to_string(solve.window);
  for (const auto& [role, name] : names) d["name_" + role] = name;
}

std::string join_words(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += text.empty() ? "" : " ";
    if (!word.empty() && word.find_first_of(" '") == std::string::npos) {
      text += word;
      continue;
    }
    text += "'";
    for (char c : word) text += c == '\'' ? std::string("\'\\\'\'") : std::string(1, c);  // as a shell has it
    text += "'";
  }
  return text;
}

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words;
  bool quoted = false, begun = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ' ' && !quoted) {
      begun = false;
      continue;
    }
    if (!begun) words.emplace_back(), begun = true;
    if (c == '\'')
      quoted = !quoted;
    else if (c == '\\' && !quoted && text.compare(i, 2, "\\\'") == 0)
      words.back() += text[++i];
    else
      words.back() += c;
  }
  return words;
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
  prepare_help(app);
  const std::string version = std::string("longscan ") + LONGSCAN_VERSION;
  app.set_version_flag("--version", version, "print the version");
  app.require_subcommand(0, 1);
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
      app.add_subcommand("inspect", "what is in a file, how it would be read, what is wrong with it, how hard it is");
  inspect_options(*inspect_app, inspect);

  PlanCommand plan;
  CLI::App* plan_app =
      app.add_subcommand("plan", "what a solve will take, before anything is read: memory, windows, traffic, time");
  plan_options(*plan_app, plan);

  CLI::App* generate_app = app.add_subcommand("generate", "write synthetic data of any length");
  generate_app->require_subcommand(1);
  generate_app->footer("Each has --help of its own.");
  GenerateDelta generate;
  CLI::App* generate_delta_app = generate_app->add_subcommand("delta", "input for longscan delta");
  generate_options(*generate_delta_app, generate);

  GenerateNewton generate_newton;
  CLI::App* generate_newton_app = generate_app->add_subcommand("newton", "input for longscan newton: x and a cell");
  generate_newton_options(*generate_newton_app, generate_newton);

  VerifyCommand verify;
  CLI::App* verify_app = app.add_subcommand("verify", "recompute token by token in float64 and compare");
  verify_app->add_option("input", verify.input, "the input of the solve")->required()->type_name("IN.h5");
  verify_app->add_option("output", verify.output, "the output of that solve")->required()->type_name("OUT.h5");
  verify_app
      ->add_option("--sample", verify.sample,
                   "recompute at so many places (delta: a row of a head's state over a stretch of tokens; newton: "
                   "sequences, and "
                   "stretches of tokens); default: everything if that is quick, else a sample")
      ->check(whole_number(1))
      ->type_name("N");
  verify_app
      ->add_option("--tolerance", verify.tolerance,
                   "largest difference allowed, relative to the RMS (default: by type)")
      ->check(positive_number());
  verify_app->add_option("--cell", verify.cell, "newton: where the cell is now (default: as the solve named it)")
      ->type_name("CELL.h5[:/group]");
  verify_app->add_flag("--quiet", verify.quiet, "print errors only");
  config_option(*verify_app);
  verify_app->footer("Example:\n  longscan verify in.h5 out.h5 --sample 8");

  CLI::App* bench_app = app.add_subcommand("bench", "time solves, the scan, and files");
  bench_app->require_subcommand(1);
  bench_app->footer("Each has --help of its own.");
  BenchDelta bench;
  CLI::App* bench_delta_app = bench_app->add_subcommand("delta", "the delta rule, from memory to memory");
  bench_delta_app->add_option("--tokens", bench.tokens, "tokens, T")->check(whole_number(1))->capture_default_str();
  bench_delta_app->add_option("--heads", bench.heads, "heads, H")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  bench_delta_app->add_option("--d-key", bench.d_key, "key channels of a head, K")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  bench_delta_app->add_option("--d-value", bench.d_value, "value channels of a head, V")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  bench_delta_app->add_option("--chunk", bench.chunk, "tokens of a chunk, 1 to 256")
      ->check(whole_number(1, 256))
      ->capture_default_str();
  bench_delta_app->add_option("--runs", bench.runs, "timed runs")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  one_of(*bench_delta_app, "--decay", bench.decay, {"none", "head", "channel"},
         "log_decay: none, one per head, or one per key channel (default none)");
  bench_delta_app
      ->add_option("--key-dimensions", bench.key_dimensions,
                   "channels that keys have: with fewer than K, states are never forgotten (0: all)")
      ->check(whole_number(0, most_int))
      ->capture_default_str();
  bench_delta_app
      ->add_option_function<std::string>(
          "--dtype", [&bench](const std::string& word) { bench.dtype = types.parse("--dtype", word); },
          "type of the inputs (default: that of the arithmetic)")
      ->type_name(types.text());
  bench_delta_app->add_flag("--check", bench.check, "compare all outputs of the last head with float64 arithmetic");
  choice(*bench_delta_app, "--precision", bench.precision, precisions, "arithmetic (default f32)");
  choice(*bench_delta_app, "--scan", bench.scan, scans, "algorithm of the scan that passes states over the ranks");
  one_of(*bench_delta_app, "--transport", bench.transport, {"auto", "mpi", "nccl"},
         "what carries states between ranks");
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
      bench_app->add_subcommand("io", "a solve from file to file, beside a copy and the solve alone");
  bench_io_options(*bench_io_app, bench_io);

  CLI::App* info_app = app.add_subcommand("info", "version, libraries, devices");
  info_app->footer("Example:\n  longscan info");

  app.set_help_all_flag("--help-all", "print the help of every command");
  answer_version(app, version);

  try {
    std::vector<std::string> words = words_of(argc, argv);
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    if (ranks.rank() == 0) std::printf("%s", app.help().c_str());
    return;
  } catch (const CLI::CallForAllHelp&) {
    if (ranks.rank() == 0) std::printf("%s", full_help(app).c_str());
    return;
  } catch (const CLI::CallForVersion&) {
    if (ranks.rank() == 0) std::printf("%s\n", version.c_str());
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
