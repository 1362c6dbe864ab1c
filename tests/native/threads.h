// Plain threads, which replace TensorFlow's thread pool.

#ifndef TESTS_NATIVE_THREADS_H_
#define TESTS_NATIVE_THREADS_H_

#include <thread>
#include <vector>

#include "tfposeidon/native/lib/parallel.h"

namespace tfposeidon {

class Threads : public Parallel {
 public:
  explicit Threads(int count) : count_(count) {}
  int threads() const override { return count_; }
  void run(int count, const std::function<void(int)>& work) const override {
    std::vector<std::thread> running;
    for (int i = 1; i < count; ++i) running.emplace_back([&work, i] { work(i); });
    if (count > 0) work(0);
    for (std::thread& thread : running) thread.join();
  }

 private:
  int count_;
};

}  // namespace tfposeidon

#endif  // TESTS_NATIVE_THREADS_H_
