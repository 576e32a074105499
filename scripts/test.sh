#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/test.sh [ctest options]
# Installs what build and tests need (Debian), builds into build/ and runs all tests, one after the other; scripts/test.sh
# -LE slow leaves the slow ones out, -R NAME runs those named.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '3,5s/^# //p' "$0"
  exit
fi
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

# shellcheck disable=SC2119  # the arguments are ctest's
need_build_packages
need_packages "${test_packages[@]}"
configure_and_build -DLONGSCAN_TESTS=ON
allow_mpi_anywhere
# One test at a time: most start more ranks than a small machine has cores, and those about signals, stuck ranks and
# killed jobs want the machine to themselves. -j N is there for a large one.
exec ctest --test-dir "$build" --output-on-failure --no-tests=error -j 1 "$@"
