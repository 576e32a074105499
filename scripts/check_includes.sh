#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check_includes.sh
# Checks that each layer includes only what it may; src/CMakeLists.txt says the same with link targets.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

# Layer, and the folders whose headers it may include.
declare -A may=(
  [include/longscan]="longscan"
  [include/longscan/cells.hpp]="longscan core local"  # a user's cell is compiled into the kernels
  [src/core]="longscan core"
  [src/local]="longscan core local"
  [src/comm]="longscan comm"
  [src/dist]="longscan core local comm dist"
  [src/io]="longscan core io"
  [apps]="longscan core local comm dist io apps"
)
# Outside libraries that only some may include.
declare -A only=(
  [mpi.h]="src/comm apps tests"
  [hdf5.h]="src/io tests"
  [nccl.h]="src/comm"
)
declare -A ours=([longscan]=1 [core]=1 [local]=1 [comm]=1 [dist]=1 [io]=1 [apps]=1)

failed=0
complain() {
  echo "$1:$2: $3"
  failed=1
}

contains() { [[ " $1 " == *" $2 "* ]]; }

layer_of() {
  case $1 in
    src/*) cut -d/ -f1-2 <<< "$1" ;;
    include/longscan/cells.hpp) echo "$1" ;;
    include/*) echo include/longscan ;;
    *) cut -d/ -f1 <<< "$1" ;;
  esac
}

include_line='^[[:space:]]*#[[:space:]]*include[[:space:]]*(["<])([^">]+)[">]'
while IFS=: read -r file line text; do
  [[ $text =~ $include_line ]] || continue
  quote=${BASH_REMATCH[1]}
  header=${BASH_REMATCH[2]}
  folder=${header%%/*}
  layer=$(layer_of "$file")
  if [[ -n ${only[$header]:-} ]] && ! contains "${only[$header]}" "$layer"; then
    complain "$file" "$line" "only ${only[$header]} may include $header"
  fi
  [[ $layer != tests ]] || continue
  if [[ -z ${may[$layer]:-} ]]; then
    complain "$file" "$line" "$layer is no layer that scripts/check_includes.sh knows"
  elif [[ $header == */* && -n ${ours[$folder]:-} ]]; then
    contains "${may[$layer]}" "$folder" || complain "$file" "$line" "$layer may not include $header (may: ${may[$layer]})"
    [[ $quote == '"' ]] || complain "$file" "$line" "$header is ours: in quotes"
  elif [[ $quote == '"' ]]; then
    complain "$file" "$line" "write $header with its layer's folder, or in <> if it is not ours"
  fi
done < <(cpp_files | xargs grep -nE '^[[:space:]]*#[[:space:]]*include' /dev/null)

((failed == 0)) || exit 1
echo "Includes follow the layers."
