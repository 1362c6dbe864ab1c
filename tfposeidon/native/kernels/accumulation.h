// Implements the part of the accumulation ops that CPUs and GPUs share.

#ifndef TFPOSEIDON_NATIVE_KERNELS_ACCUMULATION_H_
#define TFPOSEIDON_NATIVE_KERNELS_ACCUMULATION_H_

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/lib/half.h"
#include "tfposeidon/native/lib/scatter_add.h"

namespace tfposeidon {

template <class Index>
class ScatterAddOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) final {
    using tensorflow::Tensor;
    using tensorflow::TensorShapeUtils;
    const Tensor& values = context->input(0);
    const Tensor& indices = context->input(1);
    const Tensor& counts = context->input(2);
    OP_REQUIRES(context,
                TensorShapeUtils::IsVector(values.shape()) && values.shape() == indices.shape(),
                absl::InvalidArgumentError(absl::StrCat(
                    "Values and indices must be vectors of the same length. Received: ",
                    values.shape().DebugString(), " and ", indices.shape().DebugString())));
    OP_REQUIRES(
        context,
        TensorShapeUtils::IsVector(counts.shape()) &&
            TensorShapeUtils::IsScalar(context->input(3).shape()),
        absl::InvalidArgumentError(absl::StrCat(
            "`counts` must be a vector and `size` a scalar. Received: shapes ",
            counts.shape().DebugString(), " and ", context->input(3).shape().DebugString())));
    const int64_t size = context->input(3).scalar<int64_t>()();
    OP_REQUIRES(context, size >= 0,
                absl::InvalidArgumentError(
                    absl::StrCat("`size` must not be negative. Received: size=", size)));
    const auto segments = counts.flat<int64_t>();
    int64_t left = values.NumElements();
    for (int64_t s = 0; s < segments.size(); ++s) {
      OP_REQUIRES(context, segments(s) >= 0 && segments(s) <= left, wrong_counts(counts, values));
      left -= segments(s);
    }
    OP_REQUIRES(context, left == 0, wrong_counts(counts, values));
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({size}), &sum));
    // `add` checks the indices, because it reads them anyway.
    const Outside outside = add(
        context, {indices.flat<Index>().data(), values.flat<float>().data(), values.NumElements(),
                  segments.data(), segments.size(), size, sum->flat<float>().data()});
    OP_REQUIRES(context, outside.place < 0,
                absl::InvalidArgumentError(
                    absl::StrCat("Indices must be in 0 .. size - 1. Received: indices[",
                                 outside.place, "]=", outside.index, " for size=", size)));
  }

 protected:
  struct Call {
    const Index* indices;
    const float* values;
    int64_t total;
    const int64_t* counts;  // In host memory.
    int64_t segments;
    int64_t size;
    float* sum;
  };

  virtual Outside add(tensorflow::OpKernelContext* context, const Call& call) = 0;

 private:
  static absl::Status wrong_counts(const tensorflow::Tensor& counts,
                                   const tensorflow::Tensor& values) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`counts` must be non-negative and sum to the number of values. ",
        "Received: counts=", counts.SummarizeValue(8), " for ", values.NumElements(), " values."));
  }
};

// T is Eigen::half or Eigen::bfloat16.
template <class T>
constexpr WireType kWireOf =
    std::is_same_v<T, Eigen::half> ? WireType::kFloat16 : WireType::kBfloat16;

template <class T>
class EncodeOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) final {
    const tensorflow::Tensor& x = context->input(0);
    tensorflow::Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &y));
    encode(context, x.flat<float>().data(), x.NumElements(),
           reinterpret_cast<uint16_t*>(y->flat<T>().data()));
  }

 protected:
  virtual void encode(tensorflow::OpKernelContext* context, const float* x, int64_t n,
                      uint16_t* out) = 0;
};

template <class T>
class SumRowsOp : public tensorflow::OpKernel {
 public:
  explicit SumRowsOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("count", &count_));
  }

  void Compute(tensorflow::OpKernelContext* context) final {
    const tensorflow::Tensor& rows = context->input(0);
    OP_REQUIRES(
        context,
        tensorflow::TensorShapeUtils::IsVector(rows.shape()) && rows.NumElements() % count_ == 0,
        absl::InvalidArgumentError(
            absl::StrCat("`rows` must be a vector of `count` equal parts. Received: shape ",
                         rows.shape().DebugString(), ", count=", count_)));
    const int64_t n = rows.NumElements() / count_;
    tensorflow::Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({n}), &sum));
    add(context, reinterpret_cast<const uint16_t*>(rows.flat<T>().data()), count_, n,
        sum->flat<float>().data());
  }

 protected:
  virtual void add(tensorflow::OpKernelContext* context, const uint16_t* rows, int64_t count,
                   int64_t n, float* sum) = 0;

 private:
  int64_t count_;
};

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_KERNELS_ACCUMULATION_H_
