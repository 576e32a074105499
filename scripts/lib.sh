# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the scripts share. Source it; it changes to the root of the repository.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root" || exit
build=$root/build

build_packages=(g++ cmake ninja-build libopenmpi-dev openmpi-bin libhdf5-openmpi-dev libopenblas-dev libcli11-dev
                nlohmann-json3-dev)
# shellcheck disable=SC2034  # for test.sh
test_packages=(libgtest-dev python3-h5py python3-matplotlib)

die() {
  printf 'longscan: %s\n' "$*" >&2
  exit 1
}

# The value of a variable in the build folder's cache, or nothing.
cached() {
  [[ -f $build/CMakeCache.txt ]] || return 0
  sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"
}

# Whether the Kokkos to use is one of the user's, not Debian's: by environment, by these cmake options, or by an
# earlier build.
own_kokkos() {
  [[ -n ${Kokkos_ROOT:-}${Kokkos_DIR:-} || " $*" == *" -DKokkos_"[RD]* ]] && return 0
  local found
  found=$(cached Kokkos_DIR)
  [[ -d $found && $found != /usr/lib/* ]]
}

# need_packages PACKAGE…: install those Debian packages that are missing.
# LONGSCAN_NO_PACKAGES=1 leaves all that to the user.
need_packages() {
  [[ -z ${LONGSCAN_NO_PACKAGES:-} ]] || return 0
  if ! command -v apt-get > /dev/null || ! command -v dpkg-query > /dev/null; then
    echo "This is not a Debian machine: what is needed must be there already (on Debian: $*)." >&2
    return 0
  fi
  local package missing=() as_root=()
  for package in "$@"; do
    if [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) != installed ]]; then
      missing+=("$package")
    fi
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if command -v sudo > /dev/null && { sudo -n true 2> /dev/null || [[ -t 0 ]]; }; then
      as_root=(sudo)
    else
      die "these packages are missing, and installing them takes root or sudo: ${missing[*]}
  As root:  apt-get update && apt-get install --no-install-recommends ${missing[*]}
  If what they hold is there in another way, set LONGSCAN_NO_PACKAGES=1."
    fi
  fi
  echo "Installing ${missing[*]}"
  "${as_root[@]}" apt-get update -q || echo "longscan: apt-get update failed; trying with the package lists at hand" >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}" || die "could not install ${missing[*]}"
}

# need_build_packages CMAKE-OPTION…: those of the build itself.
# shellcheck disable=SC2120
need_build_packages() {
  if own_kokkos "$@"; then
    need_packages "${build_packages[@]}"
  else
    need_packages "${build_packages[@]}" libtrilinos-kokkos-dev
  fi
}

# A build folder that was made elsewhere, by another generator or with a compiler that is gone cannot be used again.
drop_stale_build() {
  [[ -f $build/CMakeCache.txt ]] || return 0
  local compiler
  compiler=$(cached CMAKE_CXX_COMPILER)
  if [[ $(cached CMAKE_HOME_DIRECTORY) != "$root" || $(cached CMAKE_CACHEFILE_DIR) != "$build" ||
        $(cached CMAKE_GENERATOR) != Ninja ]] || ! command -v "$compiler" > /dev/null; then
    echo "$build was made for another place or compiler: starting it afresh"
    rm -rf -- "$build"
  fi
}

# The cores this process may use. nproc alone would say OMP_NUM_THREADS where that is set.
cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# configure_and_build CMAKE-OPTION…: options of earlier builds stay in force.
configure_and_build() {
  local launcher='' options=()
  drop_stale_build
  [[ -f $build/CMakeCache.txt ]] || options+=(-DCMAKE_BUILD_TYPE=Release -DLONGSCAN_TESTS=OFF)
  if command -v ccache > /dev/null; then launcher=ccache; fi
  options+=("-DCMAKE_C_COMPILER_LAUNCHER=$launcher" "-DCMAKE_CXX_COMPILER_LAUNCHER=$launcher")
  # CMake would keep the Kokkos it found before.
  if [[ -n ${Kokkos_ROOT:-} || " $*" == *" -DKokkos_ROOT"* ]]; then options+=(-UKokkos_DIR); fi
  cmake -S "$root" -B "$build" -G Ninja "${options[@]}" "$@"
  cmake --build "$build" -j "$(cores)"
}

# Lets mpirun start as root, more ranks than cores, and inside a container. Open MPI reads these; others ignore them.
allow_mpi_anywhere() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
  export OMP_NUM_THREADS=1 OMP_PROC_BIND=false OPENBLAS_NUM_THREADS=1
}

# The C++ files of the repository, one a line.
cpp_files() {
  find include src apps tests -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) |
    sort
}
