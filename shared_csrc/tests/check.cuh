// SPDX-License-Identifier: Apache-2.0
// What the standalone check programs of the families share: operands on host and device, a table of errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <vector>

namespace check {

using Bf16 = __nv_bfloat16;

inline void ok(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u + 1) {}
  // Near normal: the sum of four uniform numbers.
  float next() {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 1664525u + 1013904223u;
      sum += static_cast<float>(state_ >> 8) / 16777216.0f - 0.5f;
    }
    return sum * 1.7f;
  }
  int below(int end) {
    next();
    return static_cast<int>((state_ >> 8) % static_cast<uint32_t>(end));
  }

 private:
  uint32_t state_;
};

// Host memory and its copy on the device.
template <class T>
struct Buffer {
  explicit Buffer(size_t count) : host(count) {
    ok(cudaMalloc(&device, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  ~Buffer() { cudaFree(device); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void up() {
    ok(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  void down() {
    ok(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy");
  }
  std::vector<T> host;
  T* device = nullptr;
};

inline void fill(Buffer<Bf16>& buffer, Random& random, float scale = 1.0f) {
  for (Bf16& value : buffer.host) value = __float2bfloat16(random.next() * scale);
  buffer.up();
}

// A kernel that writes nothing, or only part, is found out.
inline void poison(Buffer<Bf16>& buffer) {
  std::fill(buffer.host.begin(), buffer.host.end(),
            __float2bfloat16(std::numeric_limits<float>::quiet_NaN()));
  buffer.up();
}

// Collects errors of a case, relative ones of results above 1; prints its line and remembers failure. Results
// and what they are made of are rounded to bf16: errors stay below a few times 2^-8.
class Table {
 public:
  static constexpr double kAllowed = 2.0e-2;

  void add(const char* name, const std::vector<double>& want, const Bf16* got) {
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = std::abs(want[i] - double{__bfloat162float(got[i])});
      const double error = difference / std::max(1.0, std::abs(want[i]));
      if (!(error <= worst_)) worst_ = std::isnan(error) ? 1e9 : std::max(worst_, error);
    }
    name_ = name;
  }
  void line(const char* shape) {
    const bool good = worst_ <= kAllowed;
    std::printf("%-20s %-44s %10.2e %s\n", name_, shape, worst_, good ? "ok" : "WRONG");
    failed_ = failed_ || !good;
    worst_ = 0.0;
  }
  int status() const { return failed_ ? 1 : 0; }

 private:
  const char* name_ = "";
  double worst_ = 0.0;
  bool failed_ = false;
};

// Microseconds of one of `launches` launches between two events.
inline double time_us(const std::function<void(cudaStream_t)>& launch, int launches = 50) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  ok(cudaStreamCreate(&stream), "cudaStreamCreate");
  ok(cudaEventCreate(&begin), "cudaEventCreate");
  ok(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 5; ++i) launch(stream);
  ok(cudaEventRecord(begin, stream), "cudaEventRecord");
  for (int i = 0; i < launches; ++i) launch(stream);
  ok(cudaEventRecord(end, stream), "cudaEventRecord");
  ok(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0.0f;
  ok(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return ms * 1e3 / launches;
}

}  // namespace check
