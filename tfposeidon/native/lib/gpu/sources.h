// The data that is selected from: x[i] is computed when it is asked for. Asking twice gives and
// writes the same.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_SOURCES_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_SOURCES_H_

#include <cstdint>

#include "tfposeidon/native/lib/host_device.h"

namespace tfposeidon::gpu {

struct Vector {
  const float* x;

  TFPOSEIDON_HOST_DEVICE float operator()(int64_t i) const { return x[i]; }
  Vector made() const { return *this; }
};

struct ErrorFeedback {
  const float* residual;
  const float* gradient;
  float* out;

  TFPOSEIDON_HOST_DEVICE float operator()(int64_t i) const {
    return out[i] = residual[i] + gradient[i];
  }
  // The vector that was written; to be read after x[i] was asked for once for every i.
  Vector made() const { return {out}; }
};

struct MomentumCorrection {
  const float* residual;
  const float* velocity;
  const float* gradient;
  float momentum;
  float* velocity_out;
  float* out;

  TFPOSEIDON_HOST_DEVICE float operator()(int64_t i) const {
    velocity_out[i] = velocity[i] * momentum + gradient[i];
    return out[i] = residual[i] + velocity_out[i];
  }
  Vector made() const { return {out}; }
};

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_SOURCES_H_
