// SPDX-License-Identifier: Apache-2.0
// Errors that host code raises. Bindings translate them: ValueError, TypeError, RuntimeError.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace astrai {

// A value that an argument may not have (shape, layout, range, device): ValueError in Python.
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// An argument of the wrong type or dtype: TypeError in Python.
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// The error is taken off the runtime's slot, so that one refused launch does not fail the next call.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(
      concat(what, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

}  // namespace astrai
