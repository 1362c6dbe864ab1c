// Fuses error feedback with selection: values that are not sent stay in the residual.

#ifndef TFPOSEIDON_NATIVE_LIB_ERROR_FEEDBACK_H_
#define TFPOSEIDON_NATIVE_LIB_ERROR_FEEDBACK_H_

#include <cstdint>

#include "tfposeidon/native/lib/collector.h"
#include "tfposeidon/native/lib/half.h"

namespace tfposeidon {

// Computes residual + gradient, and writes it to `out` block by block as it is read.
class ErrorFeedback : public Source {
 public:
  ErrorFeedback(const float* residual, const float* gradient, float* out, const InnerLoops& loops)
      : residual_(residual), gradient_(gradient), out_(out), loops_(loops) {}

  const float* block(int64_t begin, int64_t n) const override {
    loops_.add(residual_ + begin, gradient_ + begin, n, out_ + begin);
    return out_ + begin;
  }

  void line(int64_t begin, float* out) const override {
    for (int64_t i = 0; i < kLine; ++i) out[i] = residual_[begin + i] + gradient_[begin + i];
  }

  void prefetch(int64_t begin) const override {
    __builtin_prefetch(residual_ + begin);
    __builtin_prefetch(gradient_ + begin);
  }

 private:
  const float* residual_;
  const float* gradient_;
  float* out_;
  const InnerLoops& loops_;
};

// Adds momentum correction to ErrorFeedback (Lin et al. 2018, section 3.2): velocity_out = momentum
// * velocity + gradient, out = residual + velocity_out.
class MomentumCorrection : public Source {
 public:
  MomentumCorrection(const float* residual, const float* velocity, const float* gradient,
                     float momentum, float* velocity_out, float* out, const InnerLoops& loops)
      : residual_(residual),
        velocity_(velocity),
        gradient_(gradient),
        momentum_(momentum),
        velocity_out_(velocity_out),
        out_(out),
        loops_(loops) {}

  const float* block(int64_t begin, int64_t n) const override {
    loops_.add_with_momentum(residual_ + begin, velocity_ + begin, gradient_ + begin, momentum_, n,
                             velocity_out_ + begin, out_ + begin);
    return out_ + begin;
  }

  void line(int64_t begin, float* out) const override {
    for (int64_t i = begin; i < begin + kLine; ++i) {
      out[i - begin] = residual_[i] + (velocity_[i] * momentum_ + gradient_[i]);
    }
  }

  void prefetch(int64_t begin) const override {
    __builtin_prefetch(residual_ + begin);
    __builtin_prefetch(velocity_ + begin);
    __builtin_prefetch(gradient_ + begin);
  }

 private:
  const float* residual_;
  const float* velocity_;
  const float* gradient_;
  float momentum_;
  float* velocity_out_;
  float* out_;
  const InnerLoops& loops_;
};

// Removes sent values from the residual: rounds values[i] to the wire's type, and stores the
// rounding error (0 for float32) in residual[indices[i]].
template <class Index>
void clear_sent(const Index* indices, float* values, int64_t k, WireType wire, const Engine& engine,
                float* residual);

// Sets the velocity of sent elements to 0 (Lin et al. 2018, momentum factor masking).
template <class Index>
void mask_sent(const Index* indices, int64_t k, const Engine& engine, float* velocity);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_ERROR_FEEDBACK_H_
