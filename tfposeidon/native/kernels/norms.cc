// Computes norms on the CPU.

#include "tfposeidon/native/kernels/norms.h"

#include "tfposeidon/native/kernels/threads.h"

namespace tfposeidon {
namespace {

class CpuL2NormsOp : public L2NormsOp {
 public:
  using L2NormsOp::L2NormsOp;

 private:
  void take(tensorflow::OpKernelContext* context, const std::vector<Span>& vectors,
            float* norms) override {
    l2_norms(vectors, best_loops(), TensorFlowThreads(context), norms);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfposeidonL2Norms").Device(tensorflow::DEVICE_CPU), CpuL2NormsOp);

}  // namespace
}  // namespace tfposeidon
