// One ordered pass over the data that keeps the few elements among which the largest are.

#ifndef TFPOSEIDON_NATIVE_LIB_COLLECTOR_H_
#define TFPOSEIDON_NATIVE_LIB_COLLECTOR_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "tfposeidon/native/lib/buffer.h"
#include "tfposeidon/native/lib/parallel.h"
#include "tfposeidon/native/lib/inner_loops.h"
#include "tfposeidon/native/lib/sample.h"

namespace tfposeidon {

// The data that is selected from. Each block is asked for at least once, by one thread at a time: a
// source that computes its values writes all of them on the way.
class Source {
 public:
  virtual ~Source() = default;

  // Makes x[begin .. begin + n - 1], n <= kBlock; valid until the thread's next call.
  virtual const float* block(int64_t begin, int64_t n) const = 0;

  // A cache line of it, x[begin .. begin + kLine - 1], to `out`; changes nothing.
  virtual void line(int64_t begin, float* out) const = 0;

  // Asks the CPU to fetch what `line` needs.
  virtual void prefetch(int64_t begin) const = 0;
};

class Vector : public Source {
 public:
  explicit Vector(const float* x) : x_(x) {}
  const float* block(int64_t begin, int64_t) const override { return x_ + begin; }
  void line(int64_t begin, float* out) const override {
    std::memcpy(out, x_ + begin, sizeof(float) * kLine);
  }
  void prefetch(int64_t i) const override { __builtin_prefetch(x_ + i); }

 private:
  const float* x_;
};

// Elements of one part of the data, in their order. Indices count from the part's beginning.
struct Candidates {
  Range range;
  uint32_t* indices;
  uint32_t* bits;
  int64_t count = 0;
  // Elements of the part whose key is > above are all here...
  int32_t above;
  // ... as are those equal to it that come first, as many as could be among the largest.
};

// Memory for one selection at a time.
struct Workspace {
  struct PerPart {
    Buffer<uint32_t> indices;
    Buffer<uint32_t> bits;
    Buffer<uint32_t> middle;
  };
  std::vector<PerPart> parts;
  Buffer<float> sample;
  Buffer<uint32_t> keys;
};

struct Engine {
  const InnerLoops& loops;
  const Parallel& parallel;
  Workspace& workspace;
};

// A key that, with high probability, a little more than k of the n elements are above; kEverything
// if the sample does not tell. `margin` is in standard deviations of the number sampled; 0 gives an
// estimate that is as often too high as too low.
int32_t sampled_threshold(const Source& source, int64_t n, int64_t k, double margin,
                          const Engine& engine);

// One pass: all elements above a key, raised where more than 2 k of a part are: only its k largest,
// ties by lowest index, can be among the k largest of all. Fills `statistics` too if given.
std::vector<Candidates> collect(const Source& source, int64_t n, int64_t k, int32_t above,
                                Statistics* statistics, const Engine& engine);

int64_t total_count(const std::vector<Candidates>& parts);

// The m-th largest key among them, 1 <= m <= total_count.
uint32_t nth_key(const std::vector<Candidates>& parts, int64_t m, const Engine& engine);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_COLLECTOR_H_
