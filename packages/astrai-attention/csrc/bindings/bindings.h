// SPDX-License-Identifier: Apache-2.0
// The files of this folder are the only ones that see Python: they check arguments, allocate outputs,
// plan and launch.
#pragma once

#include <pybind11/pybind11.h>

void bind_decode(pybind11::module_& m);
void bind_prefill(pybind11::module_& m);
void bind_rotary(pybind11::module_& m);
