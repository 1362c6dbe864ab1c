// Abstracts threads that the caller owns: TensorFlow's pool in ops, plain threads in tests.

#ifndef TFPOSEIDON_NATIVE_LIB_PARALLEL_H_
#define TFPOSEIDON_NATIVE_LIB_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <functional>

namespace tfposeidon {

class Parallel {
 public:
  virtual ~Parallel() = default;

  virtual int threads() const = 0;

  // Calls work(0) ... work(count - 1), in parallel if there are threads, and waits for all calls.
  virtual void run(int count, const std::function<void(int)>& work) const = 0;
};

class Serial : public Parallel {
 public:
  int threads() const override { return 1; }
  void run(int count, const std::function<void(int)>& work) const override {
    for (int i = 0; i < count; ++i) work(i);
  }
};

struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// With fewer elements per thread, another thread costs more time than it saves.
constexpr int64_t kElementsPerThread = 1 << 19;

// Indices within a part have 32 bits.
constexpr int64_t kLargestPart = int64_t{1} << 31;

inline int parts_for(int64_t n, const Parallel& parallel) {
  const int64_t busy = std::clamp<int64_t>(n / kElementsPerThread, 1, parallel.threads());
  return static_cast<int>(std::max(busy, n / kLargestPart + 1));
}

// Returns one of several even shares. Shares begin at cache lines, so that threads share no line.
inline Range part_of(int64_t n, int parts, int part) {
  auto begin_of = [&](int64_t i) { return i == parts ? n : n * i / parts / 64 * 64; };
  return {begin_of(part), begin_of(part + 1)};
}

// Calls work(range) for every part of 0 .. n - 1.
template <class Work>
void for_each_part(int64_t n, const Parallel& parallel, const Work& work) {
  const int parts = parts_for(n, parallel);
  parallel.run(parts, [&](int part) { work(part_of(n, parts, part)); });
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_PARALLEL_H_
