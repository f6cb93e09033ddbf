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

// Of one device, which is the current one.
class Pool {
 public:
  // A stream keeps its counters: its id is given to no other. Null where all are taken.
  unsigned* of_stream(unsigned long long id) {
    const std::lock_guard lock(mutex_);
    unsigned*& place = of_streams_[id];
    if (place == nullptr) place = take_some();
    return place;
  }

  unsigned* take() {
    const std::lock_guard lock(mutex_);
    return take_some();
  }

  void give(unsigned* taken) {
    const std::lock_guard lock(mutex_);
    free_.push_back(taken);
  }

  int held() {
    const std::lock_guard lock(mutex_);
    return used_ - static_cast<int>(free_.size());
  }

 private:
  unsigned* take_some() {
    if (!free_.empty()) {
      unsigned* const last = free_.back();
      free_.pop_back();
      return last;
    }
    if (used_ == kLeases) return nullptr;
    if (memory_ == nullptr) {
      const OutsideOfCaptures outside;
      void* memory = nullptr;
      check_cuda(cudaGetSymbolAddress(&memory, counters), "attn_decode: arrival counters");
      memory_ = static_cast<unsigned*>(memory);
    }
    return memory_ + kArrivals * used_++;
  }

  std::mutex mutex_;
  unsigned* memory_ = nullptr;
  int used_ = 0;                 // from the beginning of the memory on, at some time
  std::vector<unsigned*> free_;  // since given back
  std::unordered_map<unsigned long long, unsigned*> of_streams_;
};

Pool& pool_of(int device) {
  // Never destroyed: graphs may be later than static objects.
  static Pool* const pools = new Pool[kMaxDevices];
  return pools[device];
}

// Of a launch in a graph.
struct Lease {
  explicit Lease(Pool& pool) : pool(pool), counters(pool.take()) {}
  ~Lease() {
    if (counters != nullptr) pool.give(counters);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Pool& pool;
  unsigned* const counters;
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
    return pool.of_stream(id);
  }
  if (status == cudaStreamCaptureStatusInvalidated)
    check_cuda(cudaErrorStreamCaptureInvalidated, what);
  auto lease = std::make_unique<Lease>(pool);
  if (lease->counters == nullptr) return nullptr;
  cudaUserObject_t object = nullptr;
  check_cuda(
      cudaUserObjectCreate(&object, lease.get(), end_lease, 1, cudaUserObjectNoDestructorSync),
      what);
  unsigned* const taken = lease.release()->counters;
  const cudaError_t kept = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (kept != cudaSuccess) cudaUserObjectRelease(object);
  check_cuda(kept, what);
  return taken;
}

int arrivals_held(int device) {
  if (device < 0 || device >= kMaxDevices)
    throw ValueError(concat("device: expected 0..", kMaxDevices - 1, ", got ", device));
  return pool_of(device).held();
}

}  // namespace astrai::attention
