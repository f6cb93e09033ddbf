// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "astrai/host/device.h"

namespace astrai::attention {

// The device as the loaded image of this family sees it.
const DeviceInfo& device_info(int device);

}  // namespace astrai::attention
