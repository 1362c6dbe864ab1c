// Sums sparse vectors and 16-bit vectors on a CUDA GPU.

#include "tfposeidon/native/kernels/accumulation.h"
#include "tfposeidon/native/kernels/gpu.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernelContext;

template <class Index>
class GpuScatterAddOp : public ScatterAddOp<Index> {
 public:
  using ScatterAddOp<Index>::ScatterAddOp;

 private:
  using typename ScatterAddOp<Index>::Call;

  Outside add(OpKernelContext* context, const Call& c) override {
    Outside outside;
    on_gpu(context, [&](const gpu::Device& device) {
      outside = gpu::scatter_add(device, c.indices, c.values, c.total, c.size, c.sum);
    });
    return outside;
  }
};

template <class T>
class GpuEncodeOp : public EncodeOp<T> {
 public:
  using EncodeOp<T>::EncodeOp;

 private:
  void encode(OpKernelContext* context, const float* x, int64_t n, uint16_t* out) override {
    on_gpu(context, [&](const gpu::Device& device) { gpu::encode(device, x, n, kWireOf<T>, out); });
  }
};

template <class T>
class GpuSumRowsOp : public SumRowsOp<T> {
 public:
  using SumRowsOp<T>::SumRowsOp;

 private:
  void add(OpKernelContext* context, const uint16_t* rows, int64_t count, int64_t n,
           float* sum) override {
    on_gpu(context, [&](const gpu::Device& device) {
      gpu::sum_rows(device, rows, count, n, kWireOf<T>, sum);
    });
  }
};

#define REGISTER(name, type, T, kernel)                                                      \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU).TypeConstraint<T>(type), \
                          kernel<T>)
// Counts and size are in host memory, because the CPU checks counts and allocates the output.
#define REGISTER_SCATTER(T)                                     \
  REGISTER_KERNEL_BUILDER(Name("TfposeidonScatterAdd")          \
                              .Device(tensorflow::DEVICE_GPU)   \
                              .HostMemory("counts")             \
                              .HostMemory("size")               \
                              .TypeConstraint<T>("index_type"), \
                          GpuScatterAddOp<T>)

REGISTER_SCATTER(int32_t);
REGISTER_SCATTER(int64_t);
REGISTER("TfposeidonEncode", "T", Eigen::half, GpuEncodeOp);
REGISTER("TfposeidonEncode", "T", Eigen::bfloat16, GpuEncodeOp);
REGISTER("TfposeidonSumRows", "T", Eigen::half, GpuSumRowsOp);
REGISTER("TfposeidonSumRows", "T", Eigen::bfloat16, GpuSumRowsOp);

#undef REGISTER_SCATTER
#undef REGISTER

}  // namespace
}  // namespace tfposeidon
