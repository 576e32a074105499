// SPDX-License-Identifier: Apache-2.0
#include "apps/command_line.hpp"

namespace longscan {

CLI::Option* cell_type(CLI::App& app, std::string& cell, const std::string& help) {
  return app.add_option("--cell", cell, help)
      ->type_name("rnn_tanh|rnn_relu|gru|lstm|paragru|paralstm")
      ->capture_default_str();
}

void preset_options(CLI::App& app, std::string& preset, std::int64_t& shortest, const std::string& help) {
  one_of(app, "--preset", preset, preset_names, help);
  app.add_option("--shortest", shortest, "fewest tokens of a packed sequence (presets packed, realistic)")
      ->check(whole_number(1))
      ->type_name("N")
      ->capture_default_str();
}

void generate_newton_options(CLI::App& app, GenerateNewton& g) {
  app.add_option("-o,--output", g.output, "file to write: x, and the cell in group /cell")
      ->required()
      ->type_name("IN.h5");
  app.add_option("--tokens", g.tokens, "tokens, T")->check(whole_number(0))->capture_default_str();
  cell_type(app, g.cell, "type of the cell");
  app.add_option("--hidden", g.hidden, "channels, D")->check(whole_number(1, most_int))->capture_default_str();
  app.add_option("--input", g.inputs, "features of x, D_in")->check(whole_number(1, most_int))->capture_default_str();
  app.add_option("--recurrent-scale", g.recurrent_scale,
                 "size of the recurrent weights: deviation of recurrent, and of weight_hh times sqrt(D)")
      ->check(non_negative_number())
      ->type_name("R")
      ->capture_default_str();
  app.add_option("--layers", g.layers, "layers (not paragru, paralstm)")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_flag("--bidirectional", g.bidirectional, "both directions (not paragru, paralstm)");
  choice(app, "--dtype", g.type, wide_types, "type of the datasets (default f32)");
  preset_options(app, g.preset, g.shortest,
                 "plain; bursts: features that change slowly, and loud stretches; packed: sequences of heavy-tailed "
                 "lengths; realistic: both");
  app.add_option("--seed", g.seed, "the same seed gives the same file, on any number of ranks")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_flag("--force", g.force, "replace an existing file");
  app.add_flag("--quiet", g.quiet, "print errors only");
  config_option(app);
  app.footer("Example:\n  longscan generate newton -o in.h5 --tokens 4096 --cell gru --hidden 32 --input 16 --seed 1");
}

void bench_newton_options(CLI::App& app, BenchNewton& b) {
  app.add_option("--tokens", b.lengths, "tokens, T; a table for each of several")
      ->check(whole_number(1))
      ->type_name("N")
      ->default_str("65536");
  cell_type(app, b.cell, "type of the cell");
  app.add_option("--hidden", b.hidden, "channels, D")->check(whole_number(1, most_int))->capture_default_str();
  app.add_option("--recurrent-scale", b.scales, "size of the recurrent weights, as in generate newton; or several")
      ->check(non_negative_number())
      ->type_name("R")
      ->default_str("1");
  choice(app, "--precision", b.precision, wide_precisions, "arithmetic (default f32)");
  app.add_option_function<std::vector<std::string>>(
         "--method",
         [&b](const std::vector<std::string>& words) {
           for (const std::string& word : words) b.methods.push_back(methods.parse("--method", word));
         },
         "methods to time beside auto and the token loop")
      ->type_name(methods.text());
  app.add_option("--segment", b.segment, "tokens of a shooting segment (default: chosen)")
      ->check(whole_number(1))
      ->type_name("N");
  app.add_option("--max-iterations", b.max_iterations, "most passes of a --method other than auto")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("--runs", b.runs, "timed runs")->check(whole_number(1, most_int))->capture_default_str();
  app.add_flag("--projected", b.projected,
               "time the recurrence alone: inputs are projected and, like the states, on the device");
  one_of(app, "--products", b.products, {"plain", "three", "tf32"},
         "with --projected on an NVIDIA device: matrix products of large float32 cells in float32, as three TF32 "
         "products, or as one (not float32 accuracy)");
  app.add_flag("--json", b.json, "print one JSON array of rows on stdout");
  config_option(app);
  app.footer("Example:\n  longscan bench newton --cell paragru --tokens 2048 --hidden 32 --method newton quasi");
}

}  // namespace longscan
