# SPDX-License-Identifier: Apache-2.0
# cmake --install: the program, the public headers, the libraries and what find_package(Longscan) reads.
include(CMakePackageConfigHelpers)
set(longscan_config ${CMAKE_INSTALL_LIBDIR}/cmake/Longscan)

install(DIRECTORY include/longscan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
# What longscan/cells.hpp compiles a user's cell into.
install(FILES src/core/affine.hpp src/core/dtype.hpp src/core/elementary.hpp src/core/half.hpp src/core/portable.hpp
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longscan/internal/core)
install(FILES src/local/block_cell_kernel.hpp src/local/cell_kernel.hpp src/local/trajectory_lanes.hpp
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/longscan/internal/local)
install(EXPORT LongscanTargets NAMESPACE Longscan:: DESTINATION ${longscan_config})
configure_package_config_file(cmake/LongscanConfig.cmake.in LongscanConfig.cmake INSTALL_DESTINATION ${longscan_config})
write_basic_package_version_file(LongscanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/LongscanConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/LongscanConfigVersion.cmake
  cmake/LongscanDependencies.cmake
  cmake/FindNCCL.cmake
  DESTINATION ${longscan_config})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
