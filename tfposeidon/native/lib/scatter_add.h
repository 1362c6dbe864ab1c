// Sums the elements that several ranks selected.

#ifndef TFPOSEIDON_NATIVE_LIB_SCATTER_ADD_H_
#define TFPOSEIDON_NATIVE_LIB_SCATTER_ADD_H_

#include <cstdint>

#include "tfposeidon/native/lib/parallel.h"

namespace tfposeidon {

// First index that is outside the sum, and its position among the pairs, or -1 if there is none.
struct Outside {
  int64_t place = -1;
  int64_t index = 0;
};

// Sets out[0 .. n-1] = 0, then out[indices[i]] += values[i] in the order of segments, with the same
// bits for any number of threads. Segment s, from rank s, has `counts[s]` pairs; ascending segments
// are fastest. `out` is complete if no index is outside 0 .. n-1.
template <class Index>
Outside scatter_add(const Index* indices, const float* values, const int64_t* counts,
                    int64_t segments, int64_t n, const Parallel& parallel, float* out);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_SCATTER_ADD_H_
