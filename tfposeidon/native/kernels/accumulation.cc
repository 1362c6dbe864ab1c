// Sums of sparse and of 16-bit vectors on the processor.

#include <numeric>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"
#include "tfposeidon/native/kernels/threads.h"
#include "tfposeidon/native/lib/scatter_add.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

template <class Index>
class ScatterAddOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(0);
    const Tensor& indices = context->input(1);
    const Tensor& counts = context->input(2);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(values.shape()) && values.shape() == indices.shape(),
                absl::InvalidArgumentError(absl::StrCat(
                    "Values and indices must be vectors of one length. Received: ", values.shape().DebugString(),
                    " and ", indices.shape().DebugString())));
    OP_REQUIRES(context,
                TensorShapeUtils::IsVector(counts.shape()) && TensorShapeUtils::IsScalar(context->input(3).shape()),
                absl::InvalidArgumentError("`counts` must be a vector and `size` a scalar."));
    const int64_t size = context->input(3).scalar<int64_t>()();
    OP_REQUIRES(context, size >= 0,
                absl::InvalidArgumentError(absl::StrCat("`size` must not be negative. Received: size=", size)));
    const auto segments = counts.flat<int64_t>();
    int64_t left = values.NumElements();
    for (int64_t s = 0; s < segments.size(); ++s) {
      OP_REQUIRES(context, segments(s) >= 0 && segments(s) <= left, wrong_counts(counts, values));
      left -= segments(s);
    }
    OP_REQUIRES(context, left == 0, wrong_counts(counts, values));
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size}), &sum));
    const Index* places = indices.flat<Index>().data();
    const int64_t outside =
        scatter_add(places, values.flat<float>().data(), segments.data(), segments.size(), size,
                    TensorFlowThreads(context), sum->flat<float>().data());
    OP_REQUIRES(context, outside < 0,
                absl::InvalidArgumentError(absl::StrCat("Indices must be in 0 .. size - 1. Received: indices[", outside,
                                                        "]=", places[outside], " for size=", size)));
  }

 private:
  static absl::Status wrong_counts(const Tensor& counts, const Tensor& values) {
    return absl::InvalidArgumentError(absl::StrCat("`counts` must not be negative and add up to the number of values. ",
                                                   "Received: counts=", counts.SummarizeValue(8), " for ",
                                                   values.NumElements(), " values."));
  }
};

using ToHalf = void (*Passes::*)(const float*, int64_t, uint16_t*);
using SumHalf = void (*Passes::*)(const uint16_t*, int64_t, int64_t, int64_t, float*);

template <class T>
const uint16_t* halves(const Tensor& tensor) {
  return reinterpret_cast<const uint16_t*>(tensor.flat<T>().data());
}

template <class T, ToHalf to_half>
class EncodeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &y));
    const float* from = x.flat<float>().data();
    auto* to = reinterpret_cast<uint16_t*>(y->flat<T>().data());
    for_each_part(x.NumElements(), TensorFlowThreads(context), [&](Range range) {
      (best_passes().*to_half)(from + range.begin, range.size(), to + range.begin);
    });
  }
};

template <class T, SumHalf sum_half>
class SumRowsOp : public OpKernel {
 public:
  explicit SumRowsOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("count", &count_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(rows.shape()) && rows.NumElements() % count_ == 0,
                absl::InvalidArgumentError(absl::StrCat("`rows` must be a vector of `count` equal parts. Received: shape ",
                                                        rows.shape().DebugString(), ", count=", count_)));
    const int64_t n = rows.NumElements() / count_;
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &sum));
    const uint16_t* from = halves<T>(rows);
    float* to = sum->flat<float>().data();
    for_each_part(n, TensorFlowThreads(context), [&](Range range) {
      (best_passes().*sum_half)(from + range.begin, count_, n, range.size(), to + range.begin);
    });
  }

 private:
  int64_t count_;
};

#define REGISTER_INDEX(Index)                                                                              \
  REGISTER_KERNEL_BUILDER(                                                                                 \
      Name("TfposeidonScatterAdd").Device(tensorflow::DEVICE_CPU).TypeConstraint<Index>("index_type"), \
      ScatterAddOp<Index>)

REGISTER_INDEX(int32_t);
REGISTER_INDEX(int64_t);

#undef REGISTER_INDEX

#define REGISTER_HALF(T, name)                                                                \
  REGISTER_KERNEL_BUILDER(                                                                    \
      Name("TfposeidonEncode").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),     \
      EncodeOp<T, &Passes::to_##name>);                                                       \
  REGISTER_KERNEL_BUILDER(                                                                    \
      Name("TfposeidonSumRows").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),    \
      SumRowsOp<T, &Passes::sum_##name>)

REGISTER_HALF(Eigen::half, float16);
REGISTER_HALF(Eigen::bfloat16, bfloat16);

#undef REGISTER_HALF

}  // namespace
}  // namespace tfposeidon
