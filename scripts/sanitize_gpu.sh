#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/sanitize_gpu.sh FOLDER [PATTERN]
# The GPU's tests under compute-sanitizer's memcheck and racecheck, on one GPU: a process for a test, or for some of the
# short ones. racecheck is some hundred times slower still: it gets a sample of long lists of cases (every fourth and
# the last). With MPS (nvidia-cuda-mps-control -d) the processes run side by side on the GPU. results.txt and the
# output of what is not clean go into FOLDER; what is clean there already is not run again. Prints what is not clean, and
# counts; fails if there is any.
# PATTERN: an extended regular expression; only "TOOL PROGRAM TESTS" that match.
# BUILD=FOLDER       another build than build
# JOBS=8 LIMIT=900   processes side by side, and seconds for one
# TOGETHER=3600      seconds for all: what does not fit is not started
# RACECHECK_HOPPER=PROGRAM   bench_hopper built as src/local/hopper/NOTES.md says; without it racecheck leaves out the
#                    Hopper kernels, whose barriers it does not know. cuBLAS's kernels are always left out.
set -euo pipefail
if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '3,15s/^# //p' "$0"
  exit 2
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export folder=$1 build=${BUILD:-$root/build} limit=${LIMIT:-900} together=${TOGETHER:-3600}
export hopper=${RACECHECK_HOPPER:-} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
began=$(date +%s)
export began
command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not in PATH" >&2; exit 2; }
mkdir -p "$folder"
touch "$folder/results.txt"

# Tests of a program, `count` to a line, joined by colons. Those too long under a sanitizer, or too large, are left out.
tests_of() {
  "$1" --gtest_list_tests 2> /dev/null |
    awk '/^[^ ].*\.$/ { suite = $1 } /^  / { print suite $1 }' |
    grep -vE 'AsOnADevice.AnyLength|MoreValuesThanThirtyTwoBitsCount' | awk -v count="$2" '
      { line = line (n++ ? ":" : "") $1 } n == count { print line; line = ""; n = 0 } END { if (n) print line }'
}

jobs_of() {
  local program count
  for tool in memcheck racecheck; do
    for program in dist_delta_test newton_test newton_core_test local_delta_test; do
      count=1
      [[ $program != local_delta_test && $program != newton_core_test ]] || count=4
      tests_of "$build/tests/$program" $count | sed "s/^/$tool $program /"
    done
  done
  [[ -z $hopper ]] || printf '%s bench_hopper %s\n' racecheck least racecheck least_wide
}

one() {
  local tool=$1 program=$2 tests=$3 name left run began_here=$SECONDS
  local -a options=()
  name=$tool.$program.$(printf '%s' "${tests%%:*}" | tr -c 'A-Za-z0-9.\n' _)
  left=$((began + together - $(date +%s)))
  [[ $left -gt 5 ]] || { echo "not started: $tool $program $tests" >> "$folder/results.txt"; return; }
  if [[ $program == bench_hopper ]]; then
    run=("$hopper" "$tests")
  else
    run=("$build/tests/$program" "--gtest_filter=$tests")
    if [[ $tool == racecheck ]]; then
      export LONGSCAN_TEST_STRIDE=4
      for kernel in gemm cublas splitK delta_kernel wide_kernel; do options+=(--kernel-name-exclude "kns=$kernel"); done
    fi
  fi
  if timeout -k 5 $((left < limit ? left : limit)) compute-sanitizer --error-exitcode 9 --tool "$tool" "${options[@]}" \
    "${run[@]}" > "$folder/$name.txt" 2>&1 && grep -qE 'SUMMARY: 0 (errors|hazards)' "$folder/$name.txt"; then
    echo "clean: $tool $program $tests ($((SECONDS - began_here)) s)" >> "$folder/results.txt"
    rm "$folder/$name.txt"
  else
    echo "not clean: $tool $program $tests ($((SECONDS - began_here)) s, see $name.txt): $(
      grep -hE 'SUMMARY|FAILED' "$folder/$name.txt" | head -2 | tr '\n' ' ')" >> "$folder/results.txt"
  fi
}
export -f one

jobs_of | grep -E -- "${2:-.}" > "$folder/jobs.txt"
sed -i '/^clean/!d' "$folder/results.txt"
set -f
while read -r tool program tests; do
  grep -qF "clean: $tool $program $tests (" "$folder/results.txt" || printf '%s %s %s\n' "$tool" "$program" "$tests"
done < "$folder/jobs.txt" | xargs -r -P "${JOBS:-8}" -L 1 bash -c 'set -f; one "$@"' one
grep -v '^clean' "$folder/results.txt" | cut -c1-200 || true
all=0 clean=0
while read -r job; do
  all=$((all + 1))
  if grep -qF "clean: $job (" <(grep '^clean' "$folder/results.txt"); then clean=$((clean + 1)); fi
done < "$folder/jobs.txt"
echo "$clean of $all are clean ($(($(date +%s) - began)) s)"
[[ $clean -eq $all ]]
