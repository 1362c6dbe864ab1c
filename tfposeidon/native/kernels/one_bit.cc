// One bit per value, on the CPU.

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
    OP_REQUIRES(
        context,
        TensorShapeUtils::IsVector(residual.shape()) && residual.shape() == gradient.shape(),
        absl::InvalidArgumentError(
            absl::StrCat("Residual and gradient must be vectors of one length. Received: ",
                         residual.shape().DebugString(), " and ", gradient.shape().DebugString())));
    const int64_t n = residual.NumElements();
    // How long the code is depends on the values: room for the longest is cut when it is made.
    Tensor code;
    Tensor* kept = nullptr;
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_INT32,
                                                   TensorShape({one_bit_limit(n)}), &code));
    OP_REQUIRES_OK(context, context->allocate_output(1, residual.shape(), &kept));
    const int64_t words = one_bit_encode(
        residual.flat<float>().data(), gradient.flat<float>().data(), n, TensorFlowThreads(context),
        reinterpret_cast<uint32_t*>(code.flat<int32_t>().data()), kept->flat<float>().data());
    context->set_output(0, code.Slice(0, words));
  }
};

class OneBitSumOp : public OpKernel {
 public:
  explicit OneBitSumOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& codes = context->input(0);
    const auto split =
        one_bit_split(reinterpret_cast<const uint32_t*>(codes.flat<int32_t>().data()),
                      codes.NumElements(), size_);
    OP_REQUIRES(
        context,
        TensorShapeUtils::IsVector(codes.shape()) && (codes.NumElements() == 0 || !split.empty()),
        absl::InvalidArgumentError(absl::StrCat("`codes` must be a vector of whole codes, ",
                                                one_bit_size(size_), " words for size=", size_,
                                                " and more where values are zero. Received: shape ",
                                                codes.shape().DebugString())));
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size_}), &sum));
    one_bit_sum(split, size_, TensorFlowThreads(context), sum->flat<float>().data());
  }

 private:
  int64_t size_;
};

REGISTER_KERNEL_BUILDER(Name("TfposeidonOneBitEncode").Device(tensorflow::DEVICE_CPU),
                        OneBitEncodeOp);
REGISTER_KERNEL_BUILDER(Name("TfposeidonOneBitSum").Device(tensorflow::DEVICE_CPU), OneBitSumOp);

}  // namespace
}  // namespace tfposeidon
