// Provides TensorFlow's stream and memory to the library on a GPU.

#ifndef TFPOSEIDON_NATIVE_KERNELS_GPU_H_
#define TFPOSEIDON_NATIVE_KERNELS_GPU_H_

#include <exception>
#include <stdexcept>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tfposeidon/native/lib/gpu/gpu.h"
#include "xla/stream_executor/stream.h"

namespace tfposeidon {

// Holds memory until the op returns. TensorFlow then reuses it only for later work on the stream.
class TensorFlowMemory : public gpu::Memory {
 public:
  explicit TensorFlowMemory(tensorflow::OpKernelContext* context) : context_(context) {}

  void* allocate(size_t bytes) override {
    tensorflow::Tensor memory;
    const absl::Status status = context_->allocate_temp(
        tensorflow::DT_INT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}), &memory);
    if (!status.ok()) {
      // TensorFlow reports the first status, so exhausted memory remains ResourceExhausted.
      context_->SetStatus(status);
      throw std::runtime_error(status.ToString());
    }
    held_.push_back(memory);
    return memory.flat<int8_t>().data();
  }

 private:
  tensorflow::OpKernelContext* context_;
  std::vector<tensorflow::Tensor> held_;
};

// Calls work(device). An exception becomes the op's error, because TensorFlow does not catch it.
template <class Work>
void on_gpu(tensorflow::OpKernelContext* context, const Work& work) {
  TensorFlowMemory memory(context);
  try {
    work(gpu::Device{context->op_device_context()->stream()->platform_specific_handle().stream,
                     &memory});
  } catch (const std::exception& error) {
    context->SetStatus(absl::InternalError(absl::StrCat("GPU op failed: ", error.what())));
  }
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_KERNELS_GPU_H_
