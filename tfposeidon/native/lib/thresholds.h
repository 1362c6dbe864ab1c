// Describes the elements that a method selects, by thresholds on their keys.

#ifndef TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_
#define TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_

#include <cstdint>

namespace tfposeidon {

// Selects all elements with a key > upper, and a window of consecutive elements of the band, whose
// keys are in (lower, upper].
struct Thresholds {
  int32_t upper;
  int32_t lower;
};

// Selects all elements above the k-th key, and the first elements equal to it.
inline Thresholds largest(uint32_t kth) {
  return {static_cast<int32_t>(kth), static_cast<int32_t>(kth) - 1};
}

// Runs lines 4 to 24 of MSTopK (Shi et al. 2021, Algorithm 1) on n magnitudes. `next` is the
// (k+1)-th largest magnitude, or the smallest if k = n: count(a >= t) <= k if and only if next < t.
Thresholds ms_thresholds(float mean, float max, float next, int64_t k, int64_t n, int steps);

// Returns line 27's random number in 0 .. bound - 1: splitmix64 of the seed, modulo the bound.
uint64_t random_below(uint64_t bound, uint64_t seed);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_THRESHOLDS_H_
