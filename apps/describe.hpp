// SPDX-License-Identifier: Apache-2.0
#pragma once
// The command line described for others than CLI11: what the program accepts is all there is to say, so nothing of this
// is written by hand.
#include <string>

namespace CLI {
class App;
}

namespace longscan {

/// A manual page (section 1, roff) of every command and option.
std::string man_page(const CLI::App& app);
/// A script that completes commands, options, words of options, and file names in bash (and zsh, by bashcompinit).
std::string bash_completion(const CLI::App& app);

}  // namespace longscan
