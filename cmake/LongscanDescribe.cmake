# SPDX-License-Identifier: Apache-2.0
# longscan.1 and longscan.bash into FOLDER, by the program itself: cmake -DLONGSCAN=… -DFOLDER=… -P LongscanDescribe.cmake
set(ENV{ASAN_OPTIONS} "detect_leaks=0")  # libraries that are not ours leak at exit
function(describe file)
  execute_process(COMMAND ${LONGSCAN} ${ARGN} OUTPUT_FILE ${FOLDER}/${file} RESULT_VARIABLE failed ERROR_VARIABLE reason)
  if(failed)
    file(REMOVE ${FOLDER}/${file})
    message(STATUS "longscan does not run here (${failed}): no ${file}")
  endif()
endfunction()
describe(longscan.1 --man-page)
describe(longscan.bash --completion bash)
file(TOUCH ${FOLDER}/described)
