// Runs the selection ops on a CUDA GPU.

#include "tfposeidon/native/kernels/gpu.h"
#include "tfposeidon/native/kernels/selection.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

template <class Index>
class GpuSelectionOp : public SelectionOp<Index> {
 public:
  using SelectionOp<Index>::SelectionOp;

 protected:
  using typename SelectionOp<Index>::Call;

  virtual void run_on(OpKernelContext* context, const Call& call, const gpu::Selection& selection,
                      const gpu::Device& device) = 0;

 private:
  void run(OpKernelContext* context, const Call& c) final {
    const gpu::Method method = this->method_ == "exact" ? gpu::Method::kExact
                               : this->method_ == "dgc" ? gpu::Method::kDgc
                                                        : gpu::Method::kMsTopK;
    on_gpu(context, [&](const gpu::Device& device) {
      run_on(context, c, {method, c.n, c.k, this->steps_, c.seed}, device);
    });
  }
};

template <class Index>
class GpuTopKOp : public GpuSelectionOp<Index> {
 public:
  using GpuSelectionOp<Index>::GpuSelectionOp;

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& c, const gpu::Selection& selection,
              const gpu::Device& device) override {
    gpu::top_k(device, selection, this->vector(context, 0), c.indices, c.values);
  }
};

template <class Index>
class GpuErrorFeedbackTopKOp : public GpuSelectionOp<Index> {
 public:
  explicit GpuErrorFeedbackTopKOp(OpKernelConstruction* construction)
      : GpuSelectionOp<Index>(construction), wire_(wire_type(construction)) {}

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& c, const gpu::Selection& selection,
              const gpu::Device& device) override {
    gpu::error_feedback_top_k(device, selection, this->vector(context, 0), this->vector(context, 1),
                              wire_, c.indices, c.values, c.kept[0]);
  }

  WireType wire_;
};

template <class Index>
class GpuMomentumCorrectionTopKOp : public GpuSelectionOp<Index> {
 public:
  explicit GpuMomentumCorrectionTopKOp(OpKernelConstruction* construction)
      : GpuSelectionOp<Index>(construction), wire_(wire_type(construction)) {
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &momentum_));
  }

 private:
  using typename SelectionOp<Index>::Call;

  void run_on(OpKernelContext* context, const Call& c, const gpu::Selection& selection,
              const gpu::Device& device) override {
    gpu::momentum_correction_top_k(device, selection, this->vector(context, 0),
                                   this->vector(context, 2), this->vector(context, 1), momentum_,
                                   wire_, c.indices, c.values, c.kept[0], c.kept[1]);
  }

  WireType wire_;
  float momentum_;
};

// k and seed are in host memory, because the CPU allocates outputs and launches GPU kernels.
#define REGISTER_INDEX(name, kernel, Index)                         \
  REGISTER_KERNEL_BUILDER(Name(name)                                \
                              .Device(tensorflow::DEVICE_GPU)       \
                              .HostMemory("k")                      \
                              .HostMemory("seed")                   \
                              .TypeConstraint<Index>("index_type"), \
                          kernel<Index>)
#define REGISTER(name, kernel)           \
  REGISTER_INDEX(name, kernel, int32_t); \
  REGISTER_INDEX(name, kernel, int64_t)

REGISTER("TfposeidonTopK", GpuTopKOp);
REGISTER("TfposeidonErrorFeedbackTopK", GpuErrorFeedbackTopKOp);
REGISTER("TfposeidonMomentumCorrectionTopK", GpuMomentumCorrectionTopKOp);

#undef REGISTER
#undef REGISTER_INDEX

}  // namespace
}  // namespace tfposeidon

// Python detects GPU kernels in the library by this symbol.
extern "C" __attribute__((visibility("default"))) int tfposeidon_gpu_kernels() { return 1; }
