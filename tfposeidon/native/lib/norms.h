// Computes Euclidean norms of many vectors in one pass over memory.

#ifndef TFPOSEIDON_NATIVE_LIB_NORMS_H_
#define TFPOSEIDON_NATIVE_LIB_NORMS_H_

#include <cstdint>
#include <vector>

#include "tfposeidon/native/lib/parallel.h"
#include "tfposeidon/native/lib/inner_loops.h"

namespace tfposeidon {

struct Span {
  const float* begin;
  int64_t size;
};

// Vectors are split into chunks of at most this size, so that threads share long and short vectors
// evenly. Partial sums do not depend on the number of threads.
constexpr int64_t kNormChunk = 1 << 15;

struct Chunks {
  std::vector<Span> spans;    // Each is at most kNormChunk elements of one vector.
  std::vector<int64_t> ends;  // ends[v] is the index after the last chunk of vector v.
};

Chunks chunks_of(const std::vector<Span>& vectors);

// Computes norms[v] = sqrt(sum of squares of vector v). Squares are summed in 64 bits, so that none
// overflows or underflows. The bits are the same for any number of threads and any instruction set.
void l2_norms(const std::vector<Span>& vectors, const InnerLoops& loops, const Parallel& parallel,
              float* norms);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_NORMS_H_
