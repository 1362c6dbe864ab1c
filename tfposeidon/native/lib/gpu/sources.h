// Provides data to select from. Each read of x[i] computes, writes and returns the same value.

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
  // Returns the vector that was written; valid after every x[i] has been read.
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
