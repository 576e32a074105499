#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/build.sh [cmake options]
# Installs what the build needs (Debian) and builds into build/: build/apps/longscan. Options stay in force for later
# builds. Another Kokkos than Debian's: scripts/build.sh -DKokkos_ROOT=DIR
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '3,5s/^# //p' "$0"
  exit
fi
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

need_build_packages "$@"
configure_and_build "$@"
