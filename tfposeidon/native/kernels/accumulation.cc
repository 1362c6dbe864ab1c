// Sums sparse vectors and 16-bit vectors on the CPU.

#include "tfposeidon/native/kernels/accumulation.h"

#include "tfposeidon/native/kernels/threads.h"
#include "tfposeidon/native/lib/inner_loops.h"

namespace tfposeidon {
namespace {

using tensorflow::OpKernelContext;

template <class Index>
class ProcessorScatterAddOp : public ScatterAddOp<Index> {
 public:
  using ScatterAddOp<Index>::ScatterAddOp;

 private:
  using typename ScatterAddOp<Index>::Call;

  Outside add(OpKernelContext* context, const Call& c) override {
    return scatter_add(c.indices, c.values, c.counts, c.segments, c.size,
                       TensorFlowThreads(context), c.sum);
  }
};

template <class T>
class ProcessorEncodeOp : public EncodeOp<T> {
 public:
  using EncodeOp<T>::EncodeOp;

 private:
  void encode(OpKernelContext* context, const float* x, int64_t n, uint16_t* out) override {
    const auto pass =
        kWireOf<T> == WireType::kFloat16 ? best_loops().to_float16 : best_loops().to_bfloat16;
    for_each_part(n, TensorFlowThreads(context),
                  [&](Range range) { pass(x + range.begin, range.size(), out + range.begin); });
  }
};

template <class T>
class ProcessorSumRowsOp : public SumRowsOp<T> {
 public:
  using SumRowsOp<T>::SumRowsOp;

 private:
  // Each thread adds all rows of its own elements, so that rows are added in order.
  void add(OpKernelContext* context, const uint16_t* rows, int64_t count, int64_t n,
           float* sum) override {
    const auto pass =
        kWireOf<T> == WireType::kFloat16 ? best_loops().sum_float16 : best_loops().sum_bfloat16;
    for_each_part(n, TensorFlowThreads(context), [&](Range range) {
      pass(rows + range.begin, count, n, range.size(), sum + range.begin);
    });
  }
};

#define REGISTER(name, type, T, kernel)                                                      \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<T>(type), \
                          kernel<T>)

REGISTER("TfposeidonScatterAdd", "index_type", int32_t, ProcessorScatterAddOp);
REGISTER("TfposeidonScatterAdd", "index_type", int64_t, ProcessorScatterAddOp);
REGISTER("TfposeidonEncode", "T", Eigen::half, ProcessorEncodeOp);
REGISTER("TfposeidonEncode", "T", Eigen::bfloat16, ProcessorEncodeOp);
REGISTER("TfposeidonSumRows", "T", Eigen::half, ProcessorSumRowsOp);
REGISTER("TfposeidonSumRows", "T", Eigen::bfloat16, ProcessorSumRowsOp);

#undef REGISTER

}  // namespace
}  // namespace tfposeidon
