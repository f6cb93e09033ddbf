// SPDX-License-Identifier: Apache-2.0
// DeviceInfo for Python, so that plans can be tested for GPUs that are not here. Included by bindings
// only.
#pragma once

#include <pybind11/pybind11.h>

#include "astrai/host/device.h"

namespace astrai {

// Local to the module: pybind11 keeps one table of types per process, and two families that entered
// the same C++ type there could not be imported together.
inline void bind_device_info(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<DeviceInfo>(m, "DeviceInfo", py::module_local())
      .def(py::init([](int sm_count, int device_arch, int image_arch, int smem_per_sm,
                       int smem_per_block) {
             return DeviceInfo{sm_count, device_arch, image_arch, smem_per_sm, smem_per_block};
           }),
           py::kw_only(), py::arg("sm_count"), py::arg("device_arch"), py::arg("image_arch"),
           py::arg("smem_per_sm"), py::arg("smem_per_block"))
      .def_readonly("sm_count", &DeviceInfo::sm_count)
      .def_readonly("device_arch", &DeviceInfo::device_arch)
      .def_readonly("image_arch", &DeviceInfo::image_arch)
      .def_readonly("smem_per_sm", &DeviceInfo::smem_per_sm)
      .def_readonly("smem_per_block", &DeviceInfo::smem_per_block);
}

}  // namespace astrai
