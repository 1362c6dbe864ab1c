// Implements the part of the norm ops that CPUs and GPUs share.

#ifndef TFPOSEIDON_NATIVE_KERNELS_NORMS_H_
#define TFPOSEIDON_NATIVE_KERNELS_NORMS_H_

#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/lib/norms.h"

namespace tfposeidon {

class L2NormsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) final {
    std::vector<Span> vectors;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& tensor = context->input(i);
      vectors.push_back({tensor.flat<float>().data(), tensor.NumElements()});
    }
    tensorflow::Tensor* norms = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, tensorflow::TensorShape({context->num_inputs()}), &norms));
    take(context, vectors, norms->flat<float>().data());
  }

 private:
  virtual void take(tensorflow::OpKernelContext* context, const std::vector<Span>& vectors,
                    float* norms) = 0;
};

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_KERNELS_NORMS_H_
