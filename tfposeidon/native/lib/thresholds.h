// Which elements a method takes, as thresholds on their keys.

#ifndef TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_
#define TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_

#include <cstdint>

namespace tfposeidon {

// All elements with a key > upper, and of those with a key in (lower, upper], the band, as many in
// a row as are still wanted.
struct Thresholds {
  int32_t upper;
  int32_t lower;
};

// Everything above the k-th key, and the first of those equal to it.
inline Thresholds largest(uint32_t kth) {
  return {static_cast<int32_t>(kth), static_cast<int32_t>(kth) - 1};
}

// Lines 4 to 24 of MSTopK (Shi et al. 2021, Algorithm 1) on n magnitudes of which `next` is the
// (k+1)-th largest, or the smallest where k = n: count(a >= t) <= k exactly when next < t.
Thresholds ms_thresholds(float mean, float max, float next, int64_t k, int64_t n, int steps);

// Line 27's random number in 0 .. bound - 1, from the seed alone: splitmix64 modulo the bound.
uint64_t random_below(uint64_t bound, uint64_t seed);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_
