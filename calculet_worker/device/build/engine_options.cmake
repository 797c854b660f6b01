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

# ---- Two changes in ggml's CPU code.
function(calculet_change source old new)
  set(_path "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/ggml/src/ggml-cpu/${source}")
  file(READ "${_path}" _text)
  string(FIND "${_text}" "${new}" _done)
  if(NOT _done EQUAL -1)
    return()
  endif()
  string(FIND "${_text}" "${old}" _found)
  if(_found EQUAL -1)
    message(FATAL_ERROR "Calculet: ${_path} does not have: ${old}\nIs this the llama.cpp that engine_options.cmake was written for?")
  endif()
  string(REPLACE "${old}" "${new}" _text "${_text}")
  file(WRITE "${_path}" "${_text}")
endfunction()

# Flash attention must give the same bits whatever the batch. From 512 positions on, a batch of one sequence is computed in as many
# parts as there are threads, and the parts' sums are then added: other roundings than in a batch of two or more. That way is
# taken out; one remains.
calculet_change(ops.cpp "const bool use_split_kv_path = !use_ref &&" "const bool use_split_kv_path = false &&")

# Threads wait for each other after every operation by spinning. When one of them has lost its CPU to another process, the rest
# burn theirs; beside one busy process a step took ten times as long. So they spin for some microseconds, then give way.
calculet_change(ggml-cpu.c [[
    while (atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed) {
        ggml_thread_cpu_relax();
    }]] [[
    for (int spins = 0; atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed; spins++) {
        if (spins < 1000) {
            ggml_thread_cpu_relax();
        } else {
            spins = 1000;
            sched_yield();
        }
    }]])

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
