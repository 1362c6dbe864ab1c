// Runs the selection ops on the CPU.

#include "tfposeidon/native/kernels/selection.h"

#include "tfposeidon/native/kernels/threads.h"
#include "tfposeidon/native/lib/error_feedback.h"
#include "tfposeidon/native/lib/top_k.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

template <class Index>
class ProcessorSelectionOp : public SelectionOp<Index> {
 public:
  using SelectionOp<Index>::SelectionOp;

 protected:
  using typename SelectionOp<Index>::Call;

  virtual void run_on(OpKernelContext* context, const Call& call, const Engine& engine) = 0;

  void select(const Source& source, const Call& c, const Engine& engine) const {
    if (this->method_ == "exact") {
      exact_top_k(source, c.n, c.k, engine, c.indices, c.values);
    } else if (this->method_ == "dgc") {
      dgc_top_k(source, c.n, c.k, engine, c.indices, c.values);
    } else {
      ms_top_k(source, c.n, c.k, this->steps_, c.seed, engine, c.indices, c.values);
    }
    // A selection of 0 elements has read nothing, so the other outputs are not filled yet.
    for (int64_t begin = 0; c.k == 0 && begin < c.n; begin += kBlock) {
      source.block(begin, std::min(kBlock, c.n - begin));
    }
  }

 private:
  void run(OpKernelContext* context, const Call& call) final {
    const TensorFlowThreads threads(context);
    const BorrowedWorkspace workspace;
    run_on(context, call, Engine{best_loops(), threads, *workspace});
  }
};

template <class Index>
class TopKOp : public ProcessorSelectionOp<Index> {
 public:
  using ProcessorSelectionOp<Index>::ProcessorSelectionOp;

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& call, const Engine& engine) override {
    this->select(Vector(this->vector(context, 0)), call, engine);
  }
};

template <class Index>
class ErrorFeedbackTopKOp : public ProcessorSelectionOp<Index> {
 public:
  explicit ErrorFeedbackTopKOp(OpKernelConstruction* construction)
      : ProcessorSelectionOp<Index>(construction), wire_(wire_type(construction)) {}

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& c, const Engine& engine) override {
    const ErrorFeedback source(this->vector(context, 0), this->vector(context, 1), c.kept[0],
                               engine.loops);
    this->select(source, c, engine);
    // Clear only now, because a selection may read a block twice, which writes the whole sum again.
    clear_sent(c.indices, c.values, c.k, wire_, engine, c.kept[0]);
  }

  WireType wire_;
};

template <class Index>
class MomentumCorrectionTopKOp : public ProcessorSelectionOp<Index> {
 public:
  explicit MomentumCorrectionTopKOp(OpKernelConstruction* construction)
      : ProcessorSelectionOp<Index>(construction), wire_(wire_type(construction)) {
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &momentum_));
  }

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& c, const Engine& engine) override {
    const MomentumCorrection source(this->vector(context, 0), this->vector(context, 2),
                                    this->vector(context, 1), momentum_, c.kept[1], c.kept[0],
                                    engine.loops);
    this->select(source, c, engine);
    clear_sent(c.indices, c.values, c.k, wire_, engine, c.kept[0]);
    mask_sent(c.indices, c.k, engine, c.kept[1]);
  }

  WireType wire_;
  float momentum_;
};

#define REGISTER(name, kernel)                                                         \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<int32_t>("index_type"), \
      kernel<int32_t>);                                                                \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<int64_t>("index_type"), \
      kernel<int64_t>)

REGISTER("TfposeidonTopK", TopKOp);
REGISTER("TfposeidonErrorFeedbackTopK", ErrorFeedbackTopKOp);
REGISTER("TfposeidonMomentumCorrectionTopK", MomentumCorrectionTopKOp);

#undef REGISTER

}  // namespace
}  // namespace tfposeidon
