// Computes norms on a CUDA GPU.

#include "tfposeidon/native/kernels/gpu.h"
#include "tfposeidon/native/kernels/norms.h"

namespace tfposeidon {
namespace {

class GpuL2NormsOp : public L2NormsOp {
 public:
  using L2NormsOp::L2NormsOp;

 private:
  void take(tensorflow::OpKernelContext* context, const std::vector<Span>& vectors,
            float* norms) override {
    on_gpu(context, [&](const gpu::Device& device) { gpu::l2_norms(device, vectors, norms); });
  }
};

REGISTER_KERNEL_BUILDER(Name("TfposeidonL2Norms").Device(tensorflow::DEVICE_GPU), GpuL2NormsOp);

}  // namespace
}  // namespace tfposeidon
