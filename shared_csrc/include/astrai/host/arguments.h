// SPDX-License-Identifier: Apache-2.0
// Arguments that are no tensors, of which a message names the one that is wrong: pybind11's own would print all
// of a call's, tensors with their elements.
#pragma once

#include <pybind11/pybind11.h>

#include "astrai/host/error.h"

namespace astrai {

// Any object has a truth value; another meaning of a flag would be a silent error.
inline bool as_bool(const char* name, pybind11::handle value) {
  if (!PyBool_Check(value.ptr()))
    throw TypeError(concat(name, ": expected a bool, got ", Py_TYPE(value.ptr())->tp_name));
  return value.ptr() == Py_True;
}

// Of a float or an int.
inline double as_number(const char* name, pybind11::handle value) {
  if (PyBool_Check(value.ptr()) || (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr())))
    throw TypeError(concat(name, ": expected a float, got ", Py_TYPE(value.ptr())->tp_name));
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ValueError(concat(name, ": expected a float, got a larger int"));
  }
  return number;
}

}  // namespace astrai
