// SPDX-License-Identifier: Apache-2.0
// Counters of the CTAs that have come to a merge. They are 0 before a launch and after it, when as many have
// come as were launched.
//
// No two launches that may run at the same time share one. A stream has its own, because its launches run
// one after the other; a launch in a capture has its own, which come back when the graph and all that was
// instantiated from it are gone. They are a variable of the module: nothing is allocated for them.
#pragma once

#include <cuda_runtime_api.h>

namespace astrai::attention {

constexpr int kArrivals = 128;  // of a launch
constexpr int kLeases = 4096;   // 2 MB

// For a launch on `stream` of the current device, whose index `device` is; null where all are taken. Legal
// in a capture.
unsigned* arrivals_for(int device, cudaStream_t stream);

// How many launches and streams hold some.
int arrivals_held(int device);

}  // namespace astrai::attention
