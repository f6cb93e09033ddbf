// SPDX-License-Identifier: Apache-2.0
#include "attention/arrivals.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "astrai/host/device.h"
#include "astrai/host/error.h"

namespace astrai::attention {

namespace {

__device__ unsigned counters[kLeases * kArrivals];

// A capture forbids its thread to load a module, lest it does so on the stream that is captured.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Of one device. Leases are numbers below kLeases.
class Pool {
 public:
  // The counters of a lease, on the current device.
  unsigned* at(int lease) {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr) {
      const OutsideOfCaptures outside;
      void* memory = nullptr;
      check_cuda(cudaGetSymbolAddress(&memory, counters), "attn_decode: arrival counters");
      memory_ = static_cast<unsigned*>(memory);
    }
    return memory_ + lease * kArrivals;
  }

  // -1 where all are taken. A stream keeps its lease: its id is given to no other.
  int of_stream(unsigned long long id) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = of_streams_.try_emplace(id, -1);
    if (place->second < 0) place->second = take_one();
    return place->second;
  }

  int take() {
    const std::lock_guard lock(mutex_);
    return take_one();
  }

  void give(int lease) {
    const std::lock_guard lock(mutex_);
    free_.push_back(lease);
  }

  int held() {
    const std::lock_guard lock(mutex_);
    return taken_ - static_cast<int>(free_.size());
  }

 private:
  int take_one() {
    if (!free_.empty()) {
      const int lease = free_.back();
      free_.pop_back();
      return lease;
    }
    return taken_ < kLeases ? taken_++ : -1;
  }

  std::mutex mutex_;
  unsigned* memory_ = nullptr;
  int taken_ = 0;          // leases below have been taken at some time
  std::vector<int> free_;  // since given back
  std::unordered_map<unsigned long long, int> of_streams_;
};

Pool& pool_of(int device) {
  // Never destroyed: graphs may be later than static objects.
  static Pool* const pools = new Pool[kMaxDevices];
  return pools[device];
}

// Of a launch in a graph.
struct Lease {
  explicit Lease(Pool& pool) : pool(pool), number(pool.take()) {}
  ~Lease() {
    if (number >= 0) pool.give(number);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Pool& pool;
  const int number;
};

void end_lease(void* lease) { delete static_cast<Lease*>(lease); }

}  // namespace

unsigned* arrivals_for(int device, cudaStream_t stream) {
  const char* const what = "attn_decode: the stream";
  Pool& pool = pool_of(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
             what);
  if (status == cudaStreamCaptureStatusNone) {
    unsigned long long id = 0;
    check_cuda(cudaStreamGetId(stream, &id), what);
    const int number = pool.of_stream(id);
    return number < 0 ? nullptr : pool.at(number);
  }
  if (status == cudaStreamCaptureStatusInvalidated)
    check_cuda(cudaErrorStreamCaptureInvalidated, what);
  auto lease = std::make_unique<Lease>(pool);
  if (lease->number < 0) return nullptr;
  unsigned* const found = pool.at(lease->number);
  cudaUserObject_t object = nullptr;
  check_cuda(
      cudaUserObjectCreate(&object, lease.get(), end_lease, 1, cudaUserObjectNoDestructorSync),
      what);
  lease.release();
  const cudaError_t kept = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (kept != cudaSuccess) cudaUserObjectRelease(object);
  check_cuda(kept, what);
  return found;
}

int arrivals_held(int device) {
  if (device < 0 || device >= kMaxDevices)
    throw ValueError(concat("device: expected 0..", kMaxDevices - 1, ", got ", device));
  return pool_of(device).held();
}

}  // namespace astrai::attention
