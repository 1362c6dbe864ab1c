// Implements the part of the selection ops that CPUs and GPUs share.

#ifndef TFPOSEIDON_NATIVE_KERNELS_SELECTION_H_
#define TFPOSEIDON_NATIVE_KERNELS_SELECTION_H_

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/lib/half.h"

namespace tfposeidon {

// Inputs are vectors of equal length, then k and seed. Outputs are values and indices, then the new
// residual and velocity.
template <class Index>
class SelectionOp : public tensorflow::OpKernel {
 public:
  explicit SelectionOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("method", &method_));
    OP_REQUIRES_OK(construction, construction->GetAttr("steps", &steps_));
  }

  void Compute(tensorflow::OpKernelContext* context) final {
    using tensorflow::Tensor;
    using tensorflow::TensorShapeUtils;
    const int vectors = context->num_inputs() - 2;
    const Tensor& first = context->input(0);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(first.shape()),
                absl::InvalidArgumentError(
                    absl::StrCat("The input of a selection must be a vector. Received: shape ",
                                 first.shape().DebugString())));
    for (int i = 1; i < vectors; ++i) {
      OP_REQUIRES(
          context, context->input(i).shape() == first.shape(),
          absl::InvalidArgumentError(absl::StrCat(
              "Residual, gradient and velocity must have the same shape. Received: ",
              first.shape().DebugString(), " and ", context->input(i).shape().DebugString())));
    }
    for (int i = vectors; i < vectors + 2; ++i) {
      OP_REQUIRES(context, TensorShapeUtils::IsScalar(context->input(i).shape()),
                  absl::InvalidArgumentError(
                      absl::StrCat("`k` and `seed` must be scalars. Received: shape ",
                                   context->input(i).shape().DebugString())));
    }
    const int64_t n = first.NumElements();
    const int64_t k = context->input(vectors).scalar<int64_t>()();
    OP_REQUIRES(context, 0 <= k && k <= n,
                absl::InvalidArgumentError(absl::StrCat("`k` must be in 0 .. n. Received: k=", k,
                                                        " for a vector of n=", n, " elements.")));
    OP_REQUIRES(context, n - 1 <= std::numeric_limits<Index>::max(),
                absl::InvalidArgumentError(absl::StrCat(
                    "A vector with int32 indices must have at most 2^31 elements. Received: ", n,
                    " elements. Make its length known while tracing, or split the vector.")));
    Tensor* values = nullptr;
    Tensor* indices = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({k}), &values));
    OP_REQUIRES_OK(context, context->allocate_output(1, tensorflow::TensorShape({k}), &indices));
    Call call{n,
              k,
              static_cast<uint64_t>(context->input(vectors + 1).scalar<int64_t>()()),
              indices->flat<Index>().data(),
              values->flat<float>().data(),
              {}};
    // Never reuse the memory of an input, because a skipped step retains the old residual.
    for (int i = 2; i < context->num_outputs(); ++i) {
      Tensor* kept = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, first.shape(), &kept));
      call.kept[i - 2] = kept->flat<float>().data();
    }
    run(context, call);
  }

 protected:
  struct Call {
    int64_t n;
    int64_t k;
    uint64_t seed;
    Index* indices;
    float* values;
    float* kept[2];
  };

  virtual void run(tensorflow::OpKernelContext* context, const Call& call) = 0;

  static const float* vector(tensorflow::OpKernelContext* context, int input) {
    return context->input(input).flat<float>().data();
  }

  std::string method_;
  int steps_;
};

// Returns the dtype to which an op rounds values.
inline WireType wire_type(tensorflow::OpKernelConstruction* construction) {
  std::string name;
  const absl::Status found = construction->GetAttr("wire", &name);
  if (!found.ok()) construction->SetStatus(found);
  return name == "float16"    ? WireType::kFloat16
         : name == "bfloat16" ? WireType::kBfloat16
                              : WireType::kFloat32;
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_KERNELS_SELECTION_H_
