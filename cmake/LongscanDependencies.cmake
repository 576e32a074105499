# SPDX-License-Identifier: Apache-2.0
# Everything that is not ours. Included by the build and, once installed, by find_package(Longscan).
include(CMakeFindDependencyMacro)
macro(longscan_find)
  if(CMAKE_FIND_PACKAGE_NAME)
    find_dependency(${ARGV})
  else()
    find_package(${ARGV} REQUIRED)
  endif()
endmacro()

set(MPI_CXX_SKIP_MPICXX ON)
set(HDF5_PREFER_PARALLEL ON)
longscan_find(Threads)
longscan_find(MPI COMPONENTS C CXX)
# HDF5's compiler wrapper, which is tried in the build folder, takes a space in its name for the end of it.
if(CMAKE_CURRENT_BINARY_DIR MATCHES " ")
  set(longscan_build_folder "${CMAKE_CURRENT_BINARY_DIR}")
  string(RANDOM LENGTH 12 longscan_word)
  set(CMAKE_CURRENT_BINARY_DIR "/tmp/longscan-${longscan_word}")
endif()
longscan_find(HDF5 COMPONENTS C)
if(longscan_build_folder)
  file(REMOVE_RECURSE "${CMAKE_CURRENT_BINARY_DIR}")
  set(CMAKE_CURRENT_BINARY_DIR "${longscan_build_folder}")
  unset(longscan_build_folder)
endif()
if(NOT CMAKE_FIND_PACKAGE_NAME)
  find_package(BLAS REQUIRED)  # the program measures itself against it; the libraries do without
endif()
if(NOT DEFINED CMAKE_CXX_EXTENSIONS)
  set(CMAKE_CXX_EXTENSIONS OFF)  # else Kokkos does it, with a warning
endif()
if(NOT TARGET Kokkos::kokkos)
  longscan_find(Kokkos)
endif()

if("CUDA" IN_LIST Kokkos_DEVICES)
  longscan_find(CUDAToolkit)
endif()

# Debian 12's Kokkos (libtrilinos-kokkos-dev, 3.4) names an include folder without its headers; they are in
# <prefix>/include/trilinos.
get_target_property(longscan_kokkos_include Kokkos::kokkos INTERFACE_INCLUDE_DIRECTORIES)
if(IS_ABSOLUTE "${longscan_kokkos_include}" AND NOT EXISTS "${longscan_kokkos_include}/Kokkos_Core.hpp")
  find_path(LONGSCAN_KOKKOS_INCLUDE Kokkos_Core.hpp PATH_SUFFIXES trilinos REQUIRED)
  mark_as_advanced(LONGSCAN_KOKKOS_INCLUDE)
  set_target_properties(Kokkos::kokkos PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${LONGSCAN_KOKKOS_INCLUDE}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${LONGSCAN_KOKKOS_INCLUDE}"
    INTERFACE_LINK_LIBRARIES "trilinos_kokkosalgorithms;trilinos_kokkoscontainers;trilinos_kokkoscore")
endif()

if(NOT TARGET Longscan::hdf5)
  add_library(Longscan::hdf5 INTERFACE IMPORTED GLOBAL)
  target_include_directories(Longscan::hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
  target_compile_definitions(Longscan::hdf5 INTERFACE ${HDF5_C_DEFINITIONS})
  target_link_libraries(Longscan::hdf5 INTERFACE ${HDF5_C_LIBRARIES})
  if(HDF5_IS_PARALLEL)  # hdf5.h then includes mpi.h
    target_link_libraries(Longscan::hdf5 INTERFACE MPI::MPI_C)
  endif()
endif()

# NCCL is optional, and of use where Kokkos has CUDA.
if("CUDA" IN_LIST Kokkos_DEVICES)
  if(CMAKE_FIND_PACKAGE_NAME)
    list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
  endif()
  find_package(NCCL)
endif()
