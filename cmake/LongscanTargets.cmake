# SPDX-License-Identifier: Apache-2.0
# One library a layer (scripts/check_includes.sh says which may use which): longscan_layer(core SOURCES … PUBLIC … PRIVATE …).
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)  # a Kokkos outside the system's folders

add_library(longscan_options INTERFACE)
target_compile_features(longscan_options INTERFACE cxx_std_20)
target_compile_options(longscan_options INTERFACE
  $<BUILD_INTERFACE:-Wall -Wextra $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict> $<$<BOOL:${LONGSCAN_WERROR}>:-Werror>>
  $<BUILD_INTERFACE:$<$<BOOL:${LONGSCAN_ARCH}>:-march=${LONGSCAN_ARCH}>>)
if(LONGSCAN_SANITIZE)
  target_compile_options(longscan_options INTERFACE -fsanitize=${LONGSCAN_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
  target_link_options(longscan_options INTERFACE -fsanitize=${LONGSCAN_SANITIZE})
endif()
set_target_properties(longscan_options PROPERTIES EXPORT_NAME options)
install(TARGETS longscan_options EXPORT LongscanTargets)

function(longscan_layer name)
  cmake_parse_arguments(arg "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  set(target longscan_${name})
  add_library(${target} ${arg_SOURCES})
  add_library(Longscan::${name} ALIAS ${target})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/longscan/internal>)
  target_link_libraries(${target} PUBLIC longscan_options ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  install(TARGETS ${target} EXPORT LongscanTargets)
endfunction()
