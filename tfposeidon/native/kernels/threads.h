// Provides TensorFlow's threads and reusable memory to the kernels.

#ifndef TFPOSEIDON_NATIVE_KERNELS_THREADS_H_
#define TFPOSEIDON_NATIVE_KERNELS_THREADS_H_

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tfposeidon/native/lib/collector.h"

namespace tfposeidon {

class TensorFlowThreads : public Parallel {
 public:
  explicit TensorFlowThreads(tensorflow::OpKernelContext* context)
      : workers_(*context->device()->tensorflow_cpu_worker_threads()) {}

  int threads() const override { return workers_.num_threads; }

  void run(int count, const std::function<void(int)>& work) const override {
    if (count == 1) return work(0);
    // Callers have split the work into equal parts, so the pool must neither join nor split them.
    // TensorFlow 2.19 has only this constructor, which later releases deprecate.
    using Pool = tensorflow::thread::ThreadPool;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    const Pool::SchedulingParams one_each(Pool::SchedulingStrategy::kFixedBlockSize, std::nullopt,
                                          1);
#pragma GCC diagnostic pop
    workers_.workers->ParallelFor(count, one_each, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(static_cast<int>(i));
    });
  }

 private:
  const tensorflow::DeviceBase::CpuWorkerThreads& workers_;
};

// Borrows a workspace during one call. Idle workspaces are retained, as many as were ever in use at
// the same time. Kernels own no workspaces, because each bucket has a kernel, and each kernel would
// retain a separate workspace.
class BorrowedWorkspace {
 public:
  BorrowedWorkspace() {
    std::lock_guard<std::mutex> lock(mutex());
    if (idle().empty()) idle().push_back(std::make_unique<Workspace>());
    workspace_ = std::move(idle().back());
    idle().pop_back();
  }

  ~BorrowedWorkspace() {
    std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(std::move(workspace_));
  }

  BorrowedWorkspace(const BorrowedWorkspace&) = delete;
  BorrowedWorkspace& operator=(const BorrowedWorkspace&) = delete;

  Workspace& operator*() const { return *workspace_; }

 private:
  // Never destroy these objects, because TensorFlow's threads may outlive static objects at exit.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::vector<std::unique_ptr<Workspace>>& idle() {
    static auto* idle = new std::vector<std::unique_ptr<Workspace>>;
    return *idle;
  }

  std::unique_ptr<Workspace> workspace_;
};

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_KERNELS_THREADS_H_
