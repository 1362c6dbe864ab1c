// Selects the k elements of largest magnitude.
//
// All three methods return exactly k elements in the order of their indices. NaN and infinity count
// as larger than all numbers, so that receivers of a selection can detect them.

#ifndef TFPOSEIDON_NATIVE_LIB_TOP_K_H_
#define TFPOSEIDON_NATIVE_LIB_TOP_K_H_

#include <cstdint>

#include "tfposeidon/native/lib/collector.h"

namespace tfposeidon {

// Selects the k largest elements, ties to the lowest index, as tf.math.top_k does.
//
// A sample gives a slightly low threshold, one pass collects the elements above it, and the exact
// selection is made among these. If the sample was misleading, the pass raises the threshold or is
// repeated, so that the result is exact for every input.
template <class Index>
void exact_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
                 float* values);

// Runs Deep Gradient Compression's double sampling (Lin et al. 2018, section 3 and the authors'
// code). The threshold is the sample's estimate of the k-th key, without a margin. If too many
// elements are above it, the k largest are selected among them. If there are too few, the threshold
// is lowered by a fifth, at most five times, and then every element is collected.
template <class Index>
void dgc_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
               float* values);

// Runs MSTopK (Shi et al. 2021, Algorithm 1) in one pass; `steps` is the paper's N.
//
// The search only tests whether count(|x| >= t) <= k, that is, whether t is above the (k+1)-th
// largest magnitude. If this magnitude is known, the search needs only scalars, and the output
// equals the output of the paper's loop. Differs from the paper: if no threshold has between 1 and
// k elements above it (ties), iota1 is empty and line 28's window runs over a >= thres2, so that
// there are exactly k elements; if the input or its sum in 32 bits is not finite, thresholds are
// meaningless, and the selection is exact; elements are in the order of their indices.
template <class Index>
void ms_top_k(const Source& source, int64_t n, int64_t k, int steps, uint64_t seed,
              const Engine& engine, Index* indices, float* values);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_TOP_K_H_
