// Euclidean norms of many vectors, in one pass over memory.

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

// Vectors cut into chunks, so that long and short ones are the same work for threads. What is
// summed first does not depend on how many threads there are.
constexpr int64_t kNormChunk = 1 << 15;

struct Chunks {
  std::vector<Span> spans;    // At most kNormChunk elements of one vector each.
  std::vector<int64_t> ends;  // ends[v]: behind the last chunk of vector v.
};

Chunks chunks_of(const std::vector<Span>& vectors);

// norms[v] = sqrt(sum of squares of vector v), summed in 64 bits: the same bits for any number of
// threads and any instruction set, and no square is too large or too small.
void l2_norms(const std::vector<Span>& vectors, const InnerLoops& loops, const Parallel& parallel,
              float* norms);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_NORMS_H_
