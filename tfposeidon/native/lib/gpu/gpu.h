// Runs the algorithms of top_k.h, error_feedback.h, scatter_add.h, norms.h and inner_loops.h on a
// CUDA GPU.
//
// Selection has the same output as on the CPU, except for MSTopK's mean, which is summed in 64 bits
// throughout. The method dgc runs as exact, which has the same output. Pointers refer to GPU
// memory. Functions throw Thrust's exception if a launch fails, and the exceptions of `Memory`.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_GPU_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_GPU_H_

#include <cstddef>
#include <cstdint>

#include "tfposeidon/native/lib/half.h"
#include "tfposeidon/native/lib/norms.h"
#include "tfposeidon/native/lib/scatter_add.h"

namespace tfposeidon::gpu {

// Allocates memory that lives as long as this object.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;
};

struct Device {
  void* stream;  // A CUstream, which runs all work in order.
  Memory* memory;
};

enum class Method { kMsTopK, kExact, kDgc };

struct Selection {
  Method method;
  int64_t n;
  int64_t k;
  int steps;      // Steps of MSTopK's search.
  uint64_t seed;  // Seed of MSTopK's window.
};

template <class Index>
void top_k(const Device& device, const Selection& selection, const float* x, Index* indices,
           float* values);

// Also writes residual + gradient without the sent values to `kept`.
template <class Index>
void error_feedback_top_k(const Device& device, const Selection& selection, const float* residual,
                          const float* gradient, WireType wire, Index* indices, float* values,
                          float* kept);

// Also writes momentum * velocity + gradient, with 0 for sent elements, to `speed`.
template <class Index>
void momentum_correction_top_k(const Device& device, const Selection& selection,
                               const float* residual, const float* velocity, const float* gradient,
                               float momentum, WireType wire, Index* indices, float* values,
                               float* kept, float* speed);

// Sets out = 0, then out[indices[i]] += values[i] in the order of the pairs.
template <class Index>
Outside scatter_add(const Device& device, const Index* indices, const float* values, int64_t total,
                    int64_t n, float* out);

void encode(const Device& device, const float* x, int64_t n, WireType wire, uint16_t* out);

// Computes out = sum of `count` concatenated rows of n values, added in their order.
void sum_rows(const Device& device, const uint16_t* rows, int64_t count, int64_t n, WireType wire,
              float* out);

// Sets norms[v] to the Euclidean norm of vector v, with squares summed in 64 bits.
void l2_norms(const Device& device, const std::vector<Span>& vectors, float* norms);

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_GPU_H_
