// Threads and a timer for benchmarks of the native library.

#ifndef BENCHMARKS_NATIVE_TIMING_H_
#define BENCHMARKS_NATIVE_TIMING_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tfposeidon/native/lib/parallel.h"

namespace tfposeidon {

// Threads that wait for work, like TensorFlow's: starting a thread takes longer than a selection
// from a small vector.
class Pool : public Parallel {
 public:
  explicit Pool(int count) {
    for (int id = 1; id < count; ++id) threads_.emplace_back([this, id] { wait_for_work(id); });
  }

  ~Pool() override {
    post(0, nullptr);
    for (std::thread& thread : threads_) thread.join();
  }

  int threads() const override { return static_cast<int>(threads_.size()) + 1; }

  void run(int count, const std::function<void(int)>& work) const override {
    if (count == 1) return work(0);
    done_ = 0;
    const_cast<Pool*>(this)->post(count, &work);
    work(0);
    while (done_ < static_cast<int>(threads_.size())) std::this_thread::yield();
  }

 private:
  void post(int count, const std::function<void(int)>* work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      count_ = count;
      work_ = work;
      ++round_;
    }
    changed_.notify_all();
  }

  void wait_for_work(int id) {
    for (int seen = 0;; ++seen) {
      for (int spin = 0; spin < 20'000 && round_ == seen; ++spin) __builtin_ia32_pause();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return round_ != seen; });
      }
      if (work_ == nullptr) return;
      // Threads without work count, too, so that `run` returns only when no thread reads `work_`.
      if (id < count_) (*work_)(id);
      ++done_;
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> round_{0};
  mutable std::atomic<int> done_{0};
  int count_ = 0;
  const std::function<void(int)>* work_ = nullptr;
};

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace tfposeidon

#endif  // BENCHMARKS_NATIVE_TIMING_H_
