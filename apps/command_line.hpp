// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the files that describe the options of commands share: words for enums.
#include <CLI/CLI.hpp>
#include <limits>

#include "apps/generate_preset.hpp"
#include "apps/inspect.hpp"
#include "apps/options.hpp"
#include "apps/plan.hpp"

namespace longscan {

/// Words for an enum, in help and in messages.
template <class E>
struct Choices {
  std::vector<std::pair<std::string, E>> pairs;
  std::vector<std::string> names() const {
    std::vector<std::string> n;
    for (const auto& p : pairs) n.push_back(p.first);
    return n;
  }
  std::string text() const {
    std::string t;
    for (const auto& p : pairs) t += (t.empty() ? "" : "|") + p.first;
    return t;
  }
  E parse(const std::string& option, const std::string& word) const {
    for (const auto& p : pairs)
      if (p.first == word) return p.second;
    throw_unknown("value of " + option, word, names());
  }
};

inline const Choices<Layout> layouts{{{"THD", Layout::thd}, {"BTHD", Layout::bthd}, {"BHTD", Layout::bhtd}}};
inline const Choices<std::optional<Variant>> variants{
    {{"auto", std::nullopt}, {"delta", Variant::delta}, {"dplr", Variant::dplr}}};
inline const Choices<Erase> erases{{{"decayed", Erase::decayed}, {"undecayed", Erase::undecayed}}};
inline const Choices<Inverse> inverses{
    {{"forward", Inverse::forward}, {"neumann", Inverse::neumann}, {"richardson", Inverse::richardson}}};
inline const Choices<Precision> precisions{
    {{"auto", Precision::automatic}, {"f64", Precision::f64}, {"f32", Precision::f32}, {"bf16", Precision::bf16}}};
inline const Choices<DType> types{
    {{"f64", DType::f64}, {"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}}};
inline const Choices<DType> wide_types{{{"f64", DType::f64}, {"f32", DType::f32}}};
inline const Choices<Precision> wide_precisions{{{"f64", Precision::f64}, {"f32", Precision::f32}}};
inline const Choices<NewtonMethod> methods{{{"auto", NewtonMethod::automatic},
                                            {"shooting", NewtonMethod::shooting},
                                            {"newton", NewtonMethod::newton},
                                            {"quasi", NewtonMethod::quasi},
                                            {"elk", NewtonMethod::elk},
                                            {"picard", NewtonMethod::picard},
                                            {"jacobi", NewtonMethod::jacobi},
                                            {"sequential", NewtonMethod::sequential}}};

inline const Choices<ScanAlgorithm> scans{{{"auto", ScanAlgorithm::automatic},
                                           {"chain", ScanAlgorithm::chain},
                                           {"alltoall", ScanAlgorithm::all_to_all},
                                           {"allgather", ScanAlgorithm::all_gather},
                                           {"doubling", ScanAlgorithm::doubling},
                                           {"mpi", ScanAlgorithm::mpi}}};

constexpr std::int64_t most_int = std::numeric_limits<int>::max();
/// Checks of numbers; their messages say what is wanted.
CLI::Validator whole_number(std::int64_t least, std::int64_t most = std::numeric_limits<std::int64_t>::max());
CLI::Validator positive_number();      ///< finite
CLI::Validator non_negative_number();  ///< finite
/// To be used with transform: bytes, from a number with a unit of powers of 1024.
CLI::Validator size_in_bytes();
/// A finite number, or rsqrt.
CLI::Validator scale_word();

template <class E>
CLI::Option* choice(CLI::App& app, const std::string& option, E& target, const Choices<E>& choices,
                    const std::string& help) {
  return app
      .add_option_function<std::string>(
          option, [&target, &choices, option](const std::string& word) { target = choices.parse(option, word); }, help)
      ->type_name(choices.text());
}

/// --config FILE: options that the command line does not give, from a file.
void config_option(CLI::App& app);
/// --log-decay NAME (and --log_decay NAME) for each role.
void dataset_names(CLI::App& app, std::map<std::string, std::string>& names, const std::vector<std::string>& roles);

/// "longscan generate delta"
std::string path_of(const CLI::App& app);
/// What help looks like, for `app` and the commands that are added to it after.
void prepare_help(CLI::App& app);
/// Help of `app` and of every command below it.
std::string full_help(const CLI::App& app);
/// --version after every command too.
void answer_version(CLI::App& app, const std::string& version);
/// What `type` is in help: N and X for numbers.
std::string type_text(const CLI::Option& option);
/// The words after the program's name, patterns of groups in brackets as CLI11 leaves them alone.
std::vector<std::string> words_of(int argc, char** argv);

/// CLI11's words for a wrong command line as an Error(usage), with the nearest name where a word is unknown.
[[noreturn]] void throw_usage(const CLI::App& app, const CLI::ParseError& e);

void inspect_options(CLI::App& app, InspectCommand& c);
void plan_options(CLI::App& app, PlanCommand& c);
/// --preset, --shortest
void preset_options(CLI::App& app, std::string& preset, std::int64_t& shortest, const std::string& help);
/// The options of `generate newton` and `bench newton`.
void generate_newton_options(CLI::App& app, GenerateNewton& g);
void bench_newton_options(CLI::App& app, BenchNewton& b);
CLI::Option* cell_type(CLI::App& app, std::string& cell, const std::string& help);
void bench_scan_options(CLI::App& app, BenchScan& b);
/// An option that takes one of a few words.
void one_of(CLI::App& app, const std::string& option, std::string& target, const std::vector<std::string>& words,
            const std::string& help);

}  // namespace longscan
