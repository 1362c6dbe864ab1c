// The library compiled for CUDA, with Thrust running on TensorFlow's stream and in TensorFlow's
// memory.

#include <cuda_runtime.h>
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>

#include "tfposeidon/native/lib/gpu/accumulation.h"
#include "tfposeidon/native/lib/gpu/gpu.h"
#include "tfposeidon/native/lib/gpu/norms.h"
#include "tfposeidon/native/lib/gpu/selection.h"

namespace tfposeidon::gpu {
namespace {

// For Thrust's own needs.
struct Allocator {
  using value_type = char;
  Memory* memory;
  char* allocate(std::ptrdiff_t bytes) { return static_cast<char*>(memory->allocate(bytes)); }
  void deallocate(char*, size_t) {}  // `Memory` does.
};

class Cuda {
 public:
  explicit Cuda(const Device& device)
      : stream_(static_cast<cudaStream_t>(device.stream)), allocator_{device.memory} {}

  // Without waiting after each pass: those that follow are on the same stream.
  auto policy() { return thrust::cuda::par_nosync(allocator_).on(stream_); }

  template <class T>
  T* array(int64_t n) {
    return static_cast<T*>(allocator_.memory->allocate(sizeof(T) * n));
  }

  // From memory that may go at once: what is not pinned is taken before the call returns.
  template <class T>
  T* copied(const std::vector<T>& list) {
    T* place = array<T>(list.size());
    check(cudaMemcpyAsync(place, list.data(), sizeof(T) * list.size(), cudaMemcpyHostToDevice,
                          stream_));
    return place;
  }

  // Waits for the stream, as the CPU decides by the value which passes follow.
  template <class T>
  T read(const T* place) {
    T value;
    check(cudaMemcpyAsync(&value, place, sizeof value, cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    return value;
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess)
      throw thrust::system_error(error, thrust::cuda_category(), "copying to or from the GPU");
  }

  cudaStream_t stream_;
  Allocator allocator_;
};

}  // namespace

using Machine = Cuda;

#include "tfposeidon/native/lib/gpu/functions.inc"

}  // namespace tfposeidon::gpu
