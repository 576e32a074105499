#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check_format.sh [--fix]
# Checks that the C++ files are as clang-format 14 (Debian 12's) writes them; --fix rewrites those that are not.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

need_packages clang-format-14
if [[ ${1:-} == --fix ]]; then
  cpp_files | xargs clang-format-14 -i
else
  cpp_files | xargs clang-format-14 --dry-run -Werror ||
    die "the lines above are not formatted; scripts/check_format.sh --fix does it"
  echo "Format is right."
fi
