// Compiles the library for CUDA. Thrust runs on TensorFlow's stream and in TensorFlow's memory.

#include <cuda_runtime.h>
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>

#include "tfposeidon/native/lib/gpu/accumulation.h"
#include "tfposeidon/native/lib/gpu/gpu.h"
#include "tfposeidon/native/lib/gpu/norms.h"
#include "tfposeidon/native/lib/gpu/selection.h"

namespace tfposeidon::gpu {
namespace {

// Allocates Thrust's temporary memory.
struct Allocator {
  using value_type = char;
  Memory* memory;
  char* allocate(std::ptrdiff_t bytes) { return static_cast<char*>(memory->allocate(bytes)); }
  void deallocate(char*, size_t) {}  // `Memory` frees everything.
};

class Cuda {
 public:
  explicit Cuda(const Device& device)
      : stream_(static_cast<cudaStream_t>(device.stream)), allocator_{device.memory} {}

  // Does not wait after each pass, because later passes run on the same stream.
  auto policy() { return thrust::cuda::par_nosync(allocator_).on(stream_); }

  template <class T>
  T* array(int64_t n) {
    return static_cast<T*>(allocator_.memory->allocate(sizeof(T) * n));
  }

  // The list may be freed after the call, because the call itself copies memory that is not pinned.
  template <class T>
  T* copied(const std::vector<T>& list) {
    T* place = array<T>(list.size());
    check(cudaMemcpyAsync(place, list.data(), sizeof(T) * list.size(), cudaMemcpyHostToDevice,
                          stream_));
    return place;
  }

  // Waits for the stream, because the CPU chooses later passes by the value.
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
