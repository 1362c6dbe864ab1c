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

template <class Index>
void top_k(const Device& device, const Selection& selection, const float* x, Index* indices,
           float* values) {
  Cuda machine(device);
  select(machine, Vector{x}, selection, indices, values);
}

template <class Index>
void error_feedback_top_k(const Device& device, const Selection& selection, const float* residual,
                          const float* gradient, WireType wire, Index* indices, float* values,
                          float* kept) {
  Cuda machine(device);
  select(machine, ErrorFeedback{residual, gradient, kept}, selection, indices, values);
  clear_sent(machine, indices, values, selection.k, wire, kept);
}

template <class Index>
void momentum_correction_top_k(const Device& device, const Selection& selection,
                               const float* residual, const float* velocity, const float* gradient,
                               float momentum, WireType wire, Index* indices, float* values,
                               float* kept, float* speed) {
  Cuda machine(device);
  select(machine, MomentumCorrection{residual, velocity, gradient, momentum, speed, kept},
         selection, indices, values);
  clear_sent(machine, indices, values, selection.k, wire, kept);
  mask_sent(machine, indices, selection.k, speed);
}

template <class Index>
Outside scatter_add(const Device& device, const Index* indices, const float* values, int64_t total,
                    int64_t n, float* out) {
  Cuda machine(device);
  return scatter_add(machine, indices, values, total, n, out);
}

void encode(const Device& device, const float* x, int64_t n, WireType wire, uint16_t* out) {
  Cuda machine(device);
  for_each(machine, n, Encode{x, wire, out});
}

void sum_rows(const Device& device, const uint16_t* rows, int64_t count, int64_t n, WireType wire,
              float* out) {
  Cuda machine(device);
  for_each(machine, n, SumRows{rows, count, n, wire, out});
}

void l2_norms(const Device& device, const std::vector<Span>& vectors, float* norms) {
  Cuda machine(device);
  l2_norms(machine, vectors, norms);
}

#define INSTANTIATE(Index)                                                                        \
  template void top_k(const Device&, const Selection&, const float*, Index*, float*);             \
  template void error_feedback_top_k(const Device&, const Selection&, const float*, const float*, \
                                     WireType, Index*, float*, float*);                           \
  template void momentum_correction_top_k(const Device&, const Selection&, const float*,          \
                                          const float*, const float*, float, WireType, Index*,    \
                                          float*, float*, float*);                                \
  template Outside scatter_add(const Device&, const Index*, const float*, int64_t, int64_t, float*)

INSTANTIATE(int32_t);
INSTANTIATE(int64_t);

#undef INSTANTIATE

}  // namespace tfposeidon::gpu
