// SPDX-License-Identifier: Apache-2.0
#include "astrai/host/bind_device.h"
#include "astrai/host/launch.h"
#include "astrai/host/torch_exchange.h"
#include "bindings/bindings.h"
#include "family.h"

PYBIND11_MODULE(_attention, m) {
  astrai::register_errors();
  astrai::bind_device_info(m);
  m.def(
      "device_info", [](int device) { return astrai::attention::device_info(device); },
      pybind11::arg("device"));
  m.def(
      "set_dependent_launches", [](bool on) { astrai::dependent_launches = on; },
      pybind11::arg("on"));
  bind_prefill(m);
  bind_rotary(m);
  bind_decode(m);
}
