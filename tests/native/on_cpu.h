// Runs the passes of the GPU library by Thrust on the CPU, where sanitizers can check them.

#ifndef TESTS_NATIVE_ON_CPU_H_
#define TESTS_NATIVE_ON_CPU_H_

#include <thrust/system/cpp/execution_policy.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "tfposeidon/native/lib/gpu/accumulation.h"
#include "tfposeidon/native/lib/gpu/gpu.h"
#include "tfposeidon/native/lib/gpu/norms.h"
#include "tfposeidon/native/lib/gpu/selection.h"

namespace tfposeidon::gpu {

constexpr const char* kWhere = "on the CPU";

class OnCpu : public Memory {
 public:
  void* allocate(size_t bytes) override {
    held_.push_back(std::make_unique<char[]>(bytes));
    std::memset(held_.back().get(), 0xa5, bytes);  // New memory is not zero.
    return held_.back().get();
  }

  Device device() { return {nullptr, this}; }

  template <class T>
  T* copied(const std::vector<T>& list) {
    T* place = static_cast<T*>(allocate(sizeof(T) * list.size()));
    std::copy(list.begin(), list.end(), place);
    return place;
  }

  template <class T>
  std::vector<T> read(const T* place, int64_t n) {
    return {place, place + n};
  }

 private:
  std::vector<std::unique_ptr<char[]>> held_;
};

using UnderTest = OnCpu;

class Machine {
 public:
  explicit Machine(const Device& device) : memory_(static_cast<OnCpu*>(device.memory)) {}

  auto policy() { return thrust::cpp::par; }

  template <class T>
  T* array(int64_t n) {
    return static_cast<T*>(memory_->allocate(sizeof(T) * n));
  }

  template <class T>
  T* copied(const std::vector<T>& list) {
    return memory_->copied(list);
  }

  template <class T>
  T read(const T* place) {
    return *place;
  }

 private:
  OnCpu* memory_;
};

#include "tfposeidon/native/lib/gpu/functions.inc"

}  // namespace tfposeidon::gpu

#endif  // TESTS_NATIVE_ON_CPU_H_
