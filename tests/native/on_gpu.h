// Memory and a separate stream of the first CUDA GPU, for gpu.cu, which is linked.

#ifndef TESTS_NATIVE_ON_GPU_H_
#define TESTS_NATIVE_ON_GPU_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tfposeidon/native/lib/gpu/gpu.h"

namespace tfposeidon::gpu {

constexpr const char* kWhere = "on a GPU";

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

class OnGpu : public Memory {
 public:
  // Like TensorFlow's stream, this stream does not wait for the default stream.
  OnGpu() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  OnGpu(const OnGpu&) = delete;

  ~OnGpu() override {
    must(cudaStreamSynchronize(stream_));
    for (void* place : held_) must(cudaFree(place));
    must(cudaStreamDestroy(stream_));
  }

  void* allocate(size_t bytes) override {
    void* place = nullptr;
    must(cudaMalloc(&place, std::max<size_t>(bytes, 1)));
    held_.push_back(place);
    must(cudaMemsetAsync(place, 0xa5, bytes, stream_));  // New memory is not zero.
    return place;
  }

  Device device() { return {stream_, this}; }

  template <class T>
  T* copied(const std::vector<T>& list) {
    T* place = static_cast<T*>(allocate(sizeof(T) * list.size()));
    must(cudaMemcpyAsync(place, list.data(), sizeof(T) * list.size(), cudaMemcpyHostToDevice,
                         stream_));
    return place;
  }

  template <class T>
  std::vector<T> read(const T* place, int64_t n) {
    std::vector<T> list(n);
    must(cudaMemcpyAsync(list.data(), place, sizeof(T) * n, cudaMemcpyDeviceToHost, stream_));
    must(cudaStreamSynchronize(stream_));
    return list;
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> held_;
};

using UnderTest = OnGpu;

}  // namespace tfposeidon::gpu

#endif  // TESTS_NATIVE_ON_GPU_H_
