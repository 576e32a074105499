// SPDX-License-Identifier: Apache-2.0
// The options of `inspect` and `plan`.
#include "apps/command_line.hpp"

namespace longscan {
namespace {

const std::vector<std::string> delta_roles = {"q", "k", "v", "beta", "eta", "log_decay", "a", "b", "initial_state"};

/// What says how a file is read, for both solvers.
void reading_options(CLI::App& app, DeltaCommand& delta, NewtonCommand& newton) {
  app.add_option_function<std::vector<std::string>>(
         "--group",
         [&delta, &newton](const std::vector<std::string>& groups) {
           delta.solve.groups = newton.solve.groups = groups;
         },
         "groups to look at; shell patterns (inspect: all, plan: /)")
      ->type_name("PATH");
  app.add_option_function<std::string>(
         "--layout",
         [&delta, &newton](const std::string& word) {
           if (word == "TD" || word == "BTD")
             newton.layout = word;
           else
             delta.solve.layout = layouts.parse("--layout", word);
         },
         "order of the axes, as the solver takes it")
      ->type_name("THD|BTHD|BHTD|TD|BTD");
  app.add_option_function<std::string>(
         "--precision",
         [&delta, &newton](const std::string& word) {
           delta.solve.precision = newton.solve.precision = precisions.parse("--precision", word);
         },
         "arithmetic; auto follows the widest input")
      ->type_name(precisions.text());
  choice(app, "--variant", delta.variant, variants,
         "delta rule, or free vectors a, b (dplr); auto: dplr if there are a and b, but no beta");
  choice(app, "--erase", delta.erase, erases,
         "what the erasing term reads: the decayed state, or the state before the decay");
  app.add_option("--chunk", delta.chunk, "tokens of a chunk, 1 to 256")
      ->check(whole_number(1, 256))
      ->capture_default_str();
  app.add_flag("--normalize-keys", delta.normalize_keys, "divide k by |k| (a zero key stays zero)");
  app.add_option("--cell", newton.cell, "the cell: a group with a torch state_dict (default: group /cell of IN.h5)")
      ->type_name("CELL.h5[:/group]");
}

void both_names(CLI::App& app, DeltaCommand& delta, NewtonCommand& newton) {
  dataset_names(app, delta.names, delta_roles);
  dataset_names(app, newton.names, {"x", "h0", "c0"});
  app.add_option_function<std::string>(
         "--cu-seqlens,--cu_seqlens",
         [&delta, &newton](const std::string& name) { delta.names["cu_seqlens"] = newton.names["cu_seqlens"] = name; },
         "name of the dataset that is cu_seqlens")
      ->type_name("NAME")
      ->group("Dataset names");
}

}  // namespace

void inspect_options(CLI::App& app, InspectCommand& c) {
  app.add_option("input", c.delta.solve.input, "file to look at (HDF5)")->required()->type_name("IN.h5");
  app.add_flag("--json", c.json, "print one JSON object on stdout");
  app.add_flag("--all", c.all, "look at every token (default: a sample of bounded size); ranks share them");
  app.add_option("--influence", c.influence,
                 "write what the tokens of this chunk (counted from 0) do to each other: T = (I - A)^-1, its split by "
                 "path length, "
                 "and which earlier tokens matter most")
      ->check(whole_number(0))
      ->type_name("CHUNK");
  app.add_option("-o,--output", c.output, "with --influence: the file to write (default influence.h5)")
      ->type_name("FILE.h5");
  app.add_option("--token", c.token,
                 "with --influence: the token whose influences are listed (default: the chunk's last)")
      ->check(whole_number(0))
      ->type_name("T");
  app.add_option("--head", c.head, "with --influence: the head whose influences are listed")
      ->check(whole_number(0, most_int))
      ->capture_default_str();
  app.add_flag("--force", c.force, "with --influence: replace an existing file");
  reading_options(app, c.delta, c.newton);
  app.add_option("--scale", c.delta.scale, "factor of the output: a number, or rsqrt")
      ->type_name("X|rsqrt")
      ->capture_default_str();
  config_option(app);
  both_names(app, c.delta, c.newton);
  c.output = "influence.h5";
  app.footer(
      "Exit code 3 if something in the file could not be solved as it stands.\n"
      "Example:\n  longscan generate delta -o in.h5 --tokens 4096 --heads 2 --d-key 32 --d-value 32\n"
      "  longscan inspect in.h5 --all\n  longscan inspect in.h5 --influence 3 -o influence.h5");
}

void plan_options(CLI::App& app, PlanCommand& c) {
  app.add_option("input", c.delta.solve.input, "input file (HDF5); without one, the sizes below")->type_name("IN.h5");
  app.add_option("--ranks", c.ranks, "ranks of the planned job, P")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option("--ranks-per-node", c.ranks_per_node,
                 "ranks that share a node's memory (default: as many as cores here)")
      ->check(whole_number(1, most_int))
      ->type_name("N");
  app.add_option("--memory", c.memory,
                 "memory that a rank may use, such as 64GB (default: its share of what is free here)")
      ->transform(size_in_bytes())
      ->check(positive_number())
      ->type_name("BYTES");
  app.add_option("--window", c.delta.solve.window, "plan for --window TOKENS")
      ->check(whole_number(1))
      ->type_name("TOKENS");
  app.add_option_function<std::string>(
         "--solver",
         [&c](const std::string& word) {
           if (word != "auto" && word != "delta" && word != "newton")
             throw_unknown("value of --solver", word, {"auto", "delta", "newton"});
           c.solver = word;
         },
         "which solver; auto: the one that the file is for, delta without a file")
      ->type_name("auto|delta|newton");
  app.add_flag("--reproducible", c.delta.solve.reproducible, "plan for --reproducible");
  app.add_flag("--state-only", c.delta.state_only, "plan for --state-only");
  app.add_option("--state-every", c.delta.state_every, "plan for --state-every N")
      ->check(whole_number(1))
      ->type_name("N");
  app.add_option_function<std::string>(
         "--output-dtype",
         [&c](const std::string& word) { c.delta.solve.output_type = types.parse("--output-dtype", word); },
         "plan for --output-dtype")
      ->type_name(types.text());
  choice(app, "--scan", c.delta.solve.scan, scans, "plan for --scan");
  choice(app, "--method", c.newton.method, methods, "newton: plan for --method");
  app.add_flag("--json", c.json, "print one JSON array on stdout");
  const std::string sizes = "Sizes, without a file";
  app.add_option("--tokens", c.sizes.tokens, "tokens, T")
      ->check(whole_number(0, 1000000000000000))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--sequences", c.sequences, "packed sequences of equal lengths")
      ->check(whole_number(1))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--heads", c.sizes.heads, "heads, H")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--d-key", c.sizes.d_key, "key channels of a head, K")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--d-value", c.sizes.d_value, "value channels of a head, V")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  app.add_option_function<std::string>(
         "--decay",
         [&c](const std::string& word) {
           if (word != "none" && word != "head" && word != "channel")
             throw_unknown("value of --decay", word, {"none", "head", "channel"});
           c.sizes.decay = word;
         },
         "log_decay: none, one per head, or one per key channel")
      ->type_name("none|head|channel")
      ->group(sizes);
  choice(app, "--dtype", c.sizes.type, types, "type of the datasets (default f32)")->group(sizes);
  app.add_option("--cell-type", c.cell.cell, "newton: type of the cell")
      ->type_name("rnn_tanh|rnn_relu|gru|lstm|paragru|paralstm")
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--hidden", c.cell.hidden, "newton: channels, D")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--d-in", c.cell.inputs, "newton: features of x, D_in")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  app.add_option("--layers", c.cell.layers, "newton: layers")
      ->check(whole_number(1, most_int))
      ->capture_default_str()
      ->group(sizes);
  const std::string model = "The machine";
  app.add_option("--file-rate", c.file_rate, "bytes per second that files are read and written at, all ranks together")
      ->check(positive_number())
      ->capture_default_str()
      ->group(model);
  app.add_option(
         "--solve-rate", c.solve_rate,
         "what a rank solves per second: tokens times heads (delta) or tokens (newton) (default: measured here)")
      ->check(positive_number())
      ->group(model);
  app.add_option("--latency", c.latency, "seconds that a message between two ranks takes")
      ->check(positive_number())
      ->capture_default_str()
      ->group(model);
  app.add_option("--bandwidth", c.bandwidth, "bytes per second between two ranks")
      ->check(positive_number())
      ->capture_default_str()
      ->group(model);
  app.add_option("--apply-rate", c.apply_rate,
                 "multiplications per second where the scan applies maps (default: measured here)")
      ->check(positive_number())
      ->group(model);
  reading_options(app, c.delta, c.newton);
  config_option(app);
  both_names(app, c.delta, c.newton);
  app.footer(
      "Exit code 5 if it will not fit.\n"
      "Example:\n  longscan plan --tokens 1048576 --heads 16 --d-key 128 --d-value 128 --ranks 8 --memory 16GB");
}

}  // namespace longscan
