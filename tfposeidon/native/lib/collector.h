// Collects candidates for the largest elements in one ordered pass over the data.

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

// Data to select from. A pass reads each block, by one thread at a time, so that a source that
// computes its values writes all of them.
class Source {
 public:
  virtual ~Source() = default;

  // Returns x[begin .. begin + n - 1], n <= kBlock; valid until the thread's next call.
  virtual const float* block(int64_t begin, int64_t n) const = 0;

  // Copies the cache line x[begin .. begin + kLine - 1] to `out`; writes nothing else.
  virtual void line(int64_t begin, float* out) const = 0;

  // Prefetches the memory that `line` reads.
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
  // The candidates include all elements of the part whose key is > above, and the first elements
  // whose key equals `above`, as many as could be among the largest.
  int32_t above;
};

// Memory of a selection; simultaneous selections need separate workspaces.
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

// Returns a key that slightly more than k of the n elements exceed with high probability, or
// kEverything if a sample cannot estimate it. `margin` is in standard deviations of the number of
// sampled elements above the key. With 0, the estimate is too high as often as too low.
int32_t sampled_threshold(const Source& source, int64_t n, int64_t k, double margin,
                          const Engine& engine);

// Collects all elements above a key in one pass. Raises the key in a part that has more than about
// 2 k such elements, because only the part's k largest elements, ties to the lowest index, can be
// among the k largest of all. Fills `statistics` unless it is null.
std::vector<Candidates> collect(const Source& source, int64_t n, int64_t k, int32_t above,
                                Statistics* statistics, const Engine& engine);

int64_t total_count(const std::vector<Candidates>& parts);

// Returns the m-th largest key of the candidates, 1 <= m <= total_count.
uint32_t nth_key(const std::vector<Candidates>& parts, int64_t m, const Engine& engine);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_COLLECTOR_H_
