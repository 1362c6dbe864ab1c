// The selection ops on the processor.

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/kernels/threads.h"
#include "tfposeidon/native/lib/error_feedback.h"
#include "tfposeidon/native/lib/top_k.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

// What all selection ops have in common: vectors of one length, then k and seed; values and indices come out.
template <class Index>
class SelectionOp : public OpKernel {
 public:
  explicit SelectionOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("method", &method_));
    OP_REQUIRES_OK(construction, construction->GetAttr("steps", &steps_));
  }

  void Compute(OpKernelContext* context) final {
    const int vectors = context->num_inputs() - 2;
    const Tensor& first = context->input(0);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(first.shape()),
                absl::InvalidArgumentError(absl::StrCat("What is selected from must be a vector. Received: shape ",
                                                        first.shape().DebugString())));
    for (int i = 1; i < vectors; ++i) {
      OP_REQUIRES(context, context->input(i).shape() == first.shape(),
                  absl::InvalidArgumentError(absl::StrCat(
                      "Residual, gradient and velocity must have one shape. Received: ", first.shape().DebugString(),
                      " and ", context->input(i).shape().DebugString())));
    }
    for (int i = vectors; i < vectors + 2; ++i) {
      OP_REQUIRES(context, TensorShapeUtils::IsScalar(context->input(i).shape()),
                  absl::InvalidArgumentError(absl::StrCat("`k` and `seed` must be scalars. Received: shape ",
                                                          context->input(i).shape().DebugString())));
    }
    const int64_t n = first.NumElements();
    const int64_t k = context->input(vectors).scalar<int64_t>()();
    OP_REQUIRES(context, 0 <= k && k <= n,
                absl::InvalidArgumentError(
                    absl::StrCat("`k` must be in 0 .. n. Received: k=", k, " for a vector of n=", n, " elements.")));
    OP_REQUIRES(context, n - 1 <= std::numeric_limits<Index>::max(),
                absl::InvalidArgumentError(absl::StrCat(
                    "int32 indices end at 2^31 - 1. Received: a vector of ", n, " elements. Their length must be known while tracing, or cut the vector.")));
    Tensor* values = nullptr;
    Tensor* indices = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({k}), &values));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({k}), &indices));
    const TensorFlowThreads threads(context);
    const BorrowedWorkspace workspace;
    const Engine engine{best_passes(), threads, *workspace};
    const auto seed = static_cast<uint64_t>(context->input(vectors + 1).scalar<int64_t>()());
    run(context, {n, k, seed, engine, indices->flat<Index>().data(), values->flat<float>().data()});
  }

 protected:
  struct Call {
    int64_t n;
    int64_t k;
    uint64_t seed;
    const Engine& engine;
    Index* indices;
    float* values;
  };

  virtual void run(OpKernelContext* context, const Call& call) = 0;

  void select(const Source& source, const Call& c) const {
    if (method_ == "exact") {
      exact_top_k(source, c.n, c.k, c.engine, c.indices, c.values);
    } else if (method_ == "dgc") {
      dgc_top_k(source, c.n, c.k, c.engine, c.indices, c.values);
    } else {
      ms_top_k(source, c.n, c.k, steps_, c.seed, c.engine, c.indices, c.values);
    }
  }

 private:
  std::string method_;
  int steps_;
};

template <class Index>
class TopKOp : public SelectionOp<Index> {
 public:
  using SelectionOp<Index>::SelectionOp;

 private:
  using typename SelectionOp<Index>::Call;

  void run(OpKernelContext* context, const Call& call) override {
    this->select(Vector(context->input(0).flat<float>().data()), call);
  }
};

absl::Status wire_type(OpKernelConstruction* construction, WireType* type) {
  std::string name;
  TF_RETURN_IF_ERROR(construction->GetAttr("wire", &name));
  *type = name == "float32" ? WireType::kFloat32 : name == "float16" ? WireType::kFloat16 : WireType::kBfloat16;
  return absl::OkStatus();
}

// Makes all of a source's output where nothing is selected, and so nothing read.
void make_all(const Source& source, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) source.block(begin, std::min(kBlock, n - begin));
}

template <class Index>
class ErrorFeedbackTopKOp : public SelectionOp<Index> {
 public:
  explicit ErrorFeedbackTopKOp(OpKernelConstruction* construction) : SelectionOp<Index>(construction) {
    OP_REQUIRES_OK(construction, wire_type(construction, &wire_));
  }

 private:
  using typename SelectionOp<Index>::Call;

  void run(OpKernelContext* context, const Call& c) override {
    Tensor* kept = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(2, context->input(0).shape(), &kept));
    float* residual = kept->flat<float>().data();
    const ErrorFeedback source(context->input(0).flat<float>().data(), context->input(1).flat<float>().data(), residual,
                               c.engine.passes);
    this->select(source, c);
    if (c.k == 0) make_all(source, c.n);
    clear_sent(c.indices, c.values, c.k, wire_, c.engine, residual);
  }

  WireType wire_;
};

template <class Index>
class MomentumCorrectionTopKOp : public SelectionOp<Index> {
 public:
  explicit MomentumCorrectionTopKOp(OpKernelConstruction* construction) : SelectionOp<Index>(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &momentum_));
    OP_REQUIRES_OK(construction, wire_type(construction, &wire_));
  }

 private:
  using typename SelectionOp<Index>::Call;

  void run(OpKernelContext* context, const Call& c) override {
    Tensor* kept = nullptr;
    Tensor* speed = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(2, context->input(0).shape(), &kept));
    OP_REQUIRES_OK(context, context->allocate_output(3, context->input(0).shape(), &speed));
    float* residual = kept->flat<float>().data();
    float* velocity = speed->flat<float>().data();
    const MomentumCorrection source(context->input(0).flat<float>().data(), context->input(2).flat<float>().data(),
                                    context->input(1).flat<float>().data(), momentum_, velocity, residual,
                                    c.engine.passes);
    this->select(source, c);
    if (c.k == 0) make_all(source, c.n);
    clear_sent(c.indices, c.values, c.k, wire_, c.engine, residual);
    mask_sent(c.indices, c.k, c.engine, velocity);
  }

  float momentum_;
  WireType wire_;
};

#define REGISTER(name, kernel)                                                                         \
  REGISTER_KERNEL_BUILDER(                                                                             \
      Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<int32_t>("index_type"), kernel<int32_t>); \
  REGISTER_KERNEL_BUILDER(                                                                             \
      Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<int64_t>("index_type"), kernel<int64_t>)

REGISTER("TfposeidonTopK", TopKOp);
REGISTER("TfposeidonErrorFeedbackTopK", ErrorFeedbackTopKOp);
REGISTER("TfposeidonMomentumCorrectionTopK", MomentumCorrectionTopKOp);

#undef REGISTER

}  // namespace
}  // namespace tfposeidon
