// SPDX-License-Identifier: Apache-2.0
// The files of this folder are the only ones that see Python: they check arguments, allocate outputs,
// plan and launch.
#pragma once

#include <pybind11/pybind11.h>

#include "astrai/host/error.h"

// Any object has a truth value; the wrong pairing would be a silent error.
inline bool as_bool(const char* name, pybind11::handle value) {
  if (!PyBool_Check(value.ptr()))
    throw astrai::TypeError(
        astrai::concat(name, ": expected a bool, got ", Py_TYPE(value.ptr())->tp_name));
  return value.ptr() == Py_True;
}

void bind_prefill(pybind11::module_& m);
void bind_rotary(pybind11::module_& m);
void bind_decode(pybind11::module_& m);
