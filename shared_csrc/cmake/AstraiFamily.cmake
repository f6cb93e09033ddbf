# SPDX-License-Identifier: Apache-2.0
# Builds a family: one static library of kernels without Python, one pybind11 module that binds it.
#
#   include(shared_csrc/cmake/AstraiFamily.cmake)
#   astrai_find_nvcc()                      # before project(... LANGUAGES CXX CUDA)
#   project(...)
#   astrai_family(NAME gemv PACKAGE astrai_gemv MODULE _gemv ARCHITECTURES 80 90a 80-virtual
#                 KERNELS a.cu b.cpp BINDINGS bindings.cpp)

set(ASTRAI_SHARED_DIR "${CMAKE_CURRENT_LIST_DIR}/..")

# CUDACXX, where set, names the compiler. Otherwise it is the one that the isolated build environment
# got from PyPI, found through the Python that runs the build.
macro(astrai_find_nvcc)
  if(DEFINED ENV{CUDACXX} AND NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(CMAKE_CUDA_COMPILER NAMES "$ENV{CUDACXX}" REQUIRED NO_CACHE)
  elseif(NOT CMAKE_CUDA_COMPILER)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import nvidia.cu13 as cuda; print(list(cuda.__path__)[0])"
      OUTPUT_VARIABLE ASTRAI_CUDA_ROOT
      OUTPUT_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE ASTRAI_CUDA_STATUS
      ERROR_QUIET)
    # Torch brings the package too, without the compiler.
    if(NOT ASTRAI_CUDA_STATUS EQUAL 0 OR NOT EXISTS "${ASTRAI_CUDA_ROOT}/bin/nvcc")
      message(FATAL_ERROR
        "No CUDA compiler. Set CUDACXX to an nvcc of CUDA 12.8 or newer, or install "
        "'cuda-toolkit[nvcc,cudart,crt,nvvm,cccl]==13.0.*', or set CSRC_KERNELS=false to build "
        "without kernels.")
    endif()
    set(CMAKE_CUDA_COMPILER "${ASTRAI_CUDA_ROOT}/bin/nvcc")
  endif()
  get_filename_component(ASTRAI_CUDA_ROOT "${CMAKE_CUDA_COMPILER}" REALPATH)
  get_filename_component(ASTRAI_CUDA_ROOT "${ASTRAI_CUDA_ROOT}" DIRECTORY)
  get_filename_component(ASTRAI_CUDA_ROOT "${ASTRAI_CUDA_ROOT}" DIRECTORY)
  # nvcc's profile names lib64; the packages of PyPI ship lib.
  if(EXISTS "${ASTRAI_CUDA_ROOT}/lib/libcudart_static.a")
    string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${ASTRAI_CUDA_ROOT}/lib")
  endif()
  # The architectures are passed as -gencode options below.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endmacro()

# The architectures to compile: ASTRAI_CUDA_ARCH, or the GPU that is present if the family has code
# for it, or the family's whole list. `X` is machine code, `X-virtual` is PTX.
function(astrai_architectures family_list out)
  set(request "$ENV{ASTRAI_CUDA_ARCH}")
  string(REGEX REPLACE "[,; ]+" ";" request "${request}")
  string(REGEX REPLACE "^;|;$" "" request "${request}")
  if(request STREQUAL "" OR request STREQUAL "native")
    set(request "${family_list}")
    execute_process(
      COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities OUTPUT_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE status ERROR_QUIET)
    if(status EQUAL 0 AND NOT capabilities STREQUAL "")
      string(REPLACE "." "" capabilities "${capabilities}")
      string(REPLACE "\n" ";" capabilities "${capabilities}")
      list(REMOVE_DUPLICATES capabilities)
      set(present "")
      foreach(capability IN LISTS capabilities)
        string(STRIP "${capability}" capability)
        foreach(candidate "${capability}" "${capability}a")
          if(candidate IN_LIST family_list)
            list(APPEND present "${candidate}")
            break()
          endif()
        endforeach()
      endforeach()
      list(LENGTH present found)
      list(LENGTH capabilities wanted)
      if(found EQUAL wanted)
        set(request "${present}")
      endif()
    endif()
  endif()
  foreach(arch IN LISTS request)
    if(NOT arch MATCHES "^[0-9]+a?(-real|-virtual)?$")
      message(FATAL_ERROR
        "ASTRAI_CUDA_ARCH: expected architectures such as 80, 90a or 80-virtual, got '${arch}'")
    endif()
    string(REGEX MATCH "^[0-9]+" number "${arch}")
    if(number LESS 80)
      message(FATAL_ERROR "ASTRAI_CUDA_ARCH: the kernels need 80 or newer, got '${arch}'")
    endif()
    if(arch MATCHES "a-virtual$")
      message(FATAL_ERROR "ASTRAI_CUDA_ARCH: PTX of an 'a' target runs nowhere else, got '${arch}'")
    endif()
  endforeach()
  set(${out} "${request}" PARENT_SCOPE)
endfunction()

function(astrai_family)
  cmake_parse_arguments(FAMILY "" "NAME;PACKAGE;MODULE" "ARCHITECTURES;KERNELS;BINDINGS" ${ARGN})
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 3 CONFIG REQUIRED)
  # The header's package is located, not imported: it would load its own native library.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('tvm_ffi').submodule_search_locations[0])"
    OUTPUT_VARIABLE tvm_ffi OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)

  astrai_architectures("${FAMILY_ARCHITECTURES}" architectures)
  set(gencode "")
  set(sass "")
  set(ptx "")
  foreach(arch IN LISTS architectures)
    string(REGEX REPLACE "-.*" "" number "${arch}")
    if(arch MATCHES "-virtual$")
      list(APPEND gencode "-gencode=arch=compute_${number},code=compute_${number}")
      list(APPEND ptx "\"${number}\",")
    else()
      list(APPEND gencode "-gencode=arch=compute_${number},code=sm_${number}")
      list(APPEND sass "\"${number}\",")
    endif()
  endforeach()
  list(JOIN sass " " sass)
  list(JOIN ptx " " ptx)
  message(STATUS "astrai-${FAMILY_NAME}: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${architectures}")

  set(kernels "${FAMILY_NAME}_kernels")
  add_library(${kernels} STATIC ${FAMILY_KERNELS})
  target_include_directories(${kernels} PUBLIC
    "${CMAKE_CURRENT_SOURCE_DIR}/csrc" "${ASTRAI_SHARED_DIR}/include")
  target_include_directories(${kernels} SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_features(${kernels} PUBLIC cxx_std_17 cuda_std_17)
  target_compile_options(${kernels} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:${gencode};-Xfatbin=-compress-all>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>"
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
  set_target_properties(${kernels} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)

  pybind11_add_module(${FAMILY_MODULE} MODULE ${FAMILY_BINDINGS})
  target_include_directories(${FAMILY_MODULE} SYSTEM PRIVATE "${tvm_ffi}/include")
  target_compile_options(${FAMILY_MODULE} PRIVATE -Wall -Wextra)
  target_link_libraries(${FAMILY_MODULE} PRIVATE ${kernels})
  # Hidden visibility reaches neither the static CUDA runtime nor templates of the C++ library.
  file(CONFIGURE OUTPUT exports.map CONTENT "{ global: PyInit_*; local: *; };\n")
  target_link_options(${FAMILY_MODULE} PRIVATE
    "LINKER:--version-script=${CMAKE_CURRENT_BINARY_DIR}/exports.map")
  set_target_properties(${FAMILY_MODULE} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)

  string(REGEX MATCH "^[0-9]+\\.[0-9]+" toolkit "${CMAKE_CUDA_COMPILER_VERSION}")
  file(CONFIGURE OUTPUT _build.py CONTENT
"# Written by CMake.
CUDA = \"@toolkit@\"
SASS = (@sass@)
PTX = (@ptx@)
" @ONLY)
  install(TARGETS ${FAMILY_MODULE} LIBRARY DESTINATION ${FAMILY_PACKAGE})
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_build.py" DESTINATION ${FAMILY_PACKAGE})
endfunction()
