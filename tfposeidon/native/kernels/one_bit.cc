// One bit per value, on the processor.

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/kernels/threads.h"
#include "tfposeidon/native/lib/one_bit.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

class OneBitEncodeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& residual = context->input(0);
    const Tensor& gradient = context->input(1);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(residual.shape()) && residual.shape() == gradient.shape(),
                absl::InvalidArgumentError(absl::StrCat(
                    "Residual and gradient must be vectors of one length. Received: ", residual.shape().DebugString(),
                    " and ", gradient.shape().DebugString())));
    const int64_t n = residual.NumElements();
    Tensor* code = nullptr;
    Tensor* kept = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({one_bit_size(n)}), &code));
    OP_REQUIRES_OK(context, context->allocate_output(1, residual.shape(), &kept));
    one_bit_encode(residual.flat<float>().data(), gradient.flat<float>().data(), n, TensorFlowThreads(context),
                   reinterpret_cast<uint32_t*>(code->flat<int32_t>().data()), kept->flat<float>().data());
  }
};

class OneBitSumOp : public OpKernel {
 public:
  explicit OneBitSumOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& codes = context->input(0);
    const int64_t width = one_bit_size(size_);
    OP_REQUIRES(context,
                TensorShapeUtils::IsVector(codes.shape()) &&
                    (width == 0 ? codes.NumElements() == 0 : codes.NumElements() % width == 0),
                absl::InvalidArgumentError(absl::StrCat("`codes` must be a vector of whole codes, ", width,
                                                        " words for size=", size_, ". Received: shape ",
                                                        codes.shape().DebugString())));
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size_}), &sum));
    one_bit_sum(reinterpret_cast<const uint32_t*>(codes.flat<int32_t>().data()),
                width == 0 ? 0 : codes.NumElements() / width, size_, TensorFlowThreads(context),
                sum->flat<float>().data());
  }

 private:
  int64_t size_;
};

REGISTER_KERNEL_BUILDER(Name("TfposeidonOneBitEncode").Device(tensorflow::DEVICE_CPU), OneBitEncodeOp);
REGISTER_KERNEL_BUILDER(Name("TfposeidonOneBitSum").Device(tensorflow::DEVICE_CPU), OneBitSumOp);

}  // namespace
}  // namespace tfposeidon
