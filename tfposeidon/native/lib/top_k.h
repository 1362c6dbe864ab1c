// Selection of the k elements of largest magnitude.
//
// All three methods return exactly k elements in the order of their indices. NaN and infinity count
// as larger than everything, so that they are never hidden.

#ifndef TFPOSEIDON_NATIVE_LIB_TOP_K_H_
#define TFPOSEIDON_NATIVE_LIB_TOP_K_H_

#include <cstdint>

#include "tfposeidon/native/lib/collector.h"

namespace tfposeidon {

// The very k largest, ties to the lowest index, as tf.math.top_k has it.
//
// One streaming pass: a threshold from a sample lies a little low, the pass keeps what is above it,
// and the exact choice is made among these. Where the sample was wrong the pass raises the
// threshold or is made again: the result is exact for every input.
template <class Index>
void exact_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
                 float* values);

// Deep Gradient Compression's double sampling (Lin et al. 2018, section 3 and the authors' code):
// the threshold is the sample's own k-th, without a margin; too many are selected among again, too
// few lower it by a fifth, at most five times, until there are enough.
template <class Index>
void dgc_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
               float* values);

// MSTopK (Shi et al. 2021, Algorithm 1), `steps` being its N, in one pass.
//
// The search asks only whether count(|x| >= t) <= k, that is, whether t is above the (k+1)-th
// largest magnitude: knowing that one, all its decisions are replayed on scalars. The output is
// that of the literal loop. Differs from the paper: where no threshold has between 1 and k elements
// above it (ties), iota1 is empty and line 28's window runs over a >= thres2, so that there are
// exactly k; where the input or its sum in 32 bits is not finite no threshold means anything, and
// the choice is exact; elements come in order of index.
template <class Index>
void ms_top_k(const Source& source, int64_t n, int64_t k, int steps, uint64_t seed,
              const Engine& engine, Index* indices, float* values);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_TOP_K_H_
