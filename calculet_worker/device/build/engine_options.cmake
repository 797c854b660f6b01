# How Calculet compiles llama.cpp. `python -m calculet_worker.device.build` has CMake include this file at llama.cpp's own project() call
# (CMAKE_PROJECT_llama.cpp_INCLUDE), before llama.cpp declares its options; what must wait for the targets is deferred to the end.
#
# The instruction sets come from the command line, by name. -march=native is never used: with GCC 12 it selects AVX512-FP16
# code that is much slower in flash attention.

# ---- Only libllama and libggml are wanted, and ggml's own thread pool.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
set(LLAMA_ALL_WARNINGS OFF CACHE BOOL "" FORCE)
set(GGML_ALL_WARNINGS OFF CACHE BOOL "" FORCE)

# ---- Flash attention must give the same bits whatever the batch.
# From 512 positions on, a batch of one sequence is computed in as many parts as there are threads, and the parts' sums are then
# added: other roundings than in a batch of two or more. That path is taken out; one path remains.
set(_ops "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/ggml/src/ggml-cpu/ops.cpp")
file(READ "${_ops}" _before)
string(REPLACE "const bool use_split_kv_path = !use_ref &&" "const bool use_split_kv_path = false &&" _after "${_before}")
if(NOT _after STREQUAL _before)
  file(WRITE "${_ops}" "${_after}")
elseif(NOT _before MATCHES "use_split_kv_path = false")
  message(FATAL_ERROR "Calculet: ${_ops} has no use_split_kv_path: is this the llama.cpp that engine_options.cmake was written for?")
endif()

# ---- After llama.cpp has declared its targets.
set(CALCULET_BUILD_FOLDER "${CMAKE_CURRENT_LIST_DIR}")
function(calculet_tune_targets)
  # GCC before 13 miscompiles AMX set-up; the header is empty for other compilers and CPUs.
  target_compile_options(ggml-cpu PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include \"${CALCULET_BUILD_FOLDER}/amx_tile_config.h\">")
  # Most of the compilation is 150 model architectures, loaders, quantizers and tokenizers, which run at a load or never. ggml's
  # kernels keep -O3; of the rest only what runs at every step is optimised well.
  target_compile_options(llama PRIVATE -O1)
  foreach(_hot llama-batch llama-context llama-graph llama-kv-cache)
    # A precompiled header holds for one level of optimisation only (GCC 12 crashes otherwise).
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/${_hot}.cpp" TARGET_DIRECTORY llama
      PROPERTIES COMPILE_OPTIONS -O2 SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
  foreach(_cold ggml-backend-meta ggml-opt gguf)
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/ggml/src/${_cold}.cpp" TARGET_DIRECTORY ggml-base PROPERTIES COMPILE_OPTIONS -O1)
  endforeach()
  target_precompile_headers(llama PRIVATE <algorithm> <array> <cassert> <cmath> <cstring> <functional> <map> <memory> <regex> <set>
    <sstream> <stdexcept> <string> <unordered_map> <vector>)
endfunction()
cmake_language(DEFER CALL calculet_tune_targets)
