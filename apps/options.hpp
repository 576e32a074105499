// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the command line says, and the commands that answer it.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "longscan/delta_rule.hpp"
#include "longscan/error.hpp"
#include "longscan/newton.hpp"
#include "longscan/transport.hpp"

namespace longscan {

/// Where the axes of an array stand.
enum class Layout { automatic, thd, bthd, bhtd };
std::string name_of(Layout layout);

/// Options of every solve.
struct SolveOptions {
  std::string input, output;
  std::vector<std::string> groups;
  Layout layout = Layout::automatic;
  Precision precision = Precision::automatic;
  std::optional<DType> output_type;
  std::int64_t window = 0;  ///< tokens a rank at a time; 0: from free memory
  ScanAlgorithm scan = ScanAlgorithm::automatic;
  std::string transport = "auto";
  bool reproducible = false;
  std::string checkpoint;                  ///< empty: OUT.checkpoint, when a signal asks for it
  std::optional<double> checkpoint_every;  ///< seconds; 0: only when a signal asks for it
  bool resume = false;
  double stall_timeout = 300;  ///< seconds; 0: never
  std::string report;
  bool force = false;
  bool quiet = false;
};

struct InspectCommand;  // apps/inspect.hpp
struct PlanCommand;     // apps/plan.hpp

struct DeltaCommand {
  SolveOptions solve;
  std::optional<Variant> variant;
  Erase erase = Erase::decayed;
  Inverse inverse = Inverse::forward;
  int chunk = 64;
  std::string scale = "1";
  bool normalize_keys = false;
  bool state_only = false;
  std::int64_t state_every = 0;
  std::map<std::string, std::string> names;  ///< role -> dataset, where the user said so
};

struct NewtonCommand {
  SolveOptions solve;
  std::string layout = "auto";  ///< TD or BTD
  std::string cell;             ///< FILE[:/group]; empty: /cell of the input
  NewtonMethod method = NewtonMethod::automatic;
  double tolerance = 0;
  std::int64_t max_iterations = 100, segment = 0;
  std::map<std::string, std::string> names;
};

struct GenerateDelta {
  std::string output;
  std::int64_t tokens = 65536;
  int heads = 4, d_key = 64, d_value = 64;
  std::string decay = "none";
  DType type = DType::f32;
  std::uint64_t seed = 1;
  std::string preset = "plain";
  std::int64_t shortest = 64;  ///< tokens of a packed sequence
  bool force = false, quiet = false;
};

struct GenerateNewton {
  std::string output;
  std::int64_t tokens = 65536;
  std::string cell = "gru";
  int hidden = 64, inputs = 64, layers = 1;
  bool bidirectional = false;
  double recurrent_scale = 1;
  DType type = DType::f32;
  std::uint64_t seed = 1;
  std::string preset = "plain";
  std::int64_t shortest = 64;
  bool force = false, quiet = false;
};

struct VerifyCommand {
  std::string input, output;
  std::string cell;         ///< newton: where the cell is now, as --cell of the solve; empty: where it was
  std::int64_t sample = 0;  ///< places; 0: all if small
  double tolerance = 0;     ///< 0: by the type of the output
  bool quiet = false;
};

struct BenchDelta {
  std::int64_t tokens = 16384;
  int heads = 4, d_key = 128, d_value = 128, chunk = 64, runs = 7;
  int key_dimensions = 0;  ///< keys have the first so many channels only, and are never forgotten; 0: all
  std::string decay = "none";
  Precision precision = Precision::f32;
  std::optional<DType> dtype;  ///< of the inputs; that of the arithmetic
  bool reproducible = false, check = false, json = false;
  ScanAlgorithm scan = ScanAlgorithm::automatic;
  std::string transport = "auto";
};

struct BenchNewton {
  std::vector<std::int64_t> lengths = {65536};  ///< each with each of the scales
  std::vector<double> scales = {1};
  std::int64_t tokens = 0;  ///< of these, those of a table
  double recurrent_scale = 0;
  std::string cell = "paragru";
  int hidden = 64, runs = 5;
  Precision precision = Precision::f32;
  std::vector<NewtonMethod> methods;  ///< beside auto and the token loop
  std::int64_t segment = 0, max_iterations = 100;
  bool json = false, projected = false;
  std::string products;  ///< how a device makes large float32 products; empty: as usual
};

struct BenchScan {
  std::string maps = "delta";  ///< delta, diagonal, block, dense
  int heads = 16, d_key = 128, d_value = 128, hidden = 1024, runs = 7;
  std::int64_t segments = 1;
  std::vector<ScanAlgorithm> algorithms;  ///< none: all
  Precision precision = Precision::f32;
  std::string transport = "auto";
  bool json = false;
};

struct BenchIo {
  std::int64_t tokens = 262144, window = 0;
  int heads = 2, d_key = 128, d_value = 128, runs = 5;
  std::string cell;  ///< newton with this type of cell; empty: the delta rule
  int hidden = 64, inputs = 64;
  double recurrent_scale = 1;
  DType type = DType::f32;
  std::string folder = ".";
  bool json = false;
};

/// Each runs on every rank; throws Error.
void run_delta(Transport& ranks, const DeltaCommand& command);
void run_newton(Transport& ranks, const NewtonCommand& command);
void run_generate_delta(Transport& ranks, const GenerateDelta& command);
void run_generate_newton(Transport& ranks, const GenerateNewton& command);
void run_verify(Transport& ranks, const VerifyCommand& command);
void run_inspect(Transport& ranks, const InspectCommand& command);
void run_plan(Transport& ranks, const PlanCommand& command);
void run_bench_delta(Transport& ranks, const BenchDelta& command);
void run_bench_newton(Transport& ranks, const BenchNewton& command);
void run_bench_scan(Transport& ranks, const BenchScan& command);
void run_bench_io(Transport& ranks, const BenchIo& command);
void run_info(Transport& ranks);

/// Reads the command line and runs what it asks for. Throws Error; usage errors too. Returns without doing anything
/// after
/// --help and --version, which rank 0 answers.
void run_command_line(Transport& ranks, int argc, char** argv);

/// The options of a solve as they were meant, for reports and output attributes: name -> value.
std::map<std::string, std::string> describe(const DeltaCommand& command);
std::map<std::string, std::string> describe(const NewtonCommand& command);

/// Words as one text and back, for output attributes; a word with spaces or quotes stands in single quotes.
std::string join_words(const std::vector<std::string>& words);
std::vector<std::string> split_words(const std::string& text);

/// `text` as one of `names`, else an Error(usage) that names the nearest.
[[noreturn]] void throw_unknown(const std::string& what, const std::string& text, const std::vector<std::string>& names,
                                ExitCode code = ExitCode::usage);
/// The name closest to `text`, if one is close at all.
std::string nearest(const std::string& text, const std::vector<std::string>& names);

}  // namespace longscan
