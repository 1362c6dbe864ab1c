#include "tfposeidon/native/lib/thresholds.h"

#include "tfposeidon/native/lib/keys.h"

namespace tfposeidon {

Thresholds ms_thresholds(float mean, float max, float next, int64_t k, int64_t n, int steps) {
  // The paper calls these thresholds thres1 and thres2.
  float upper = 0, lower = 0;
  bool found_upper = false;
  float left = 0, right = 1;
  for (int i = 0; i < steps; ++i) {
    const float ratio = left + (right - left) / 2;
    const float threshold = mean + ratio * (max - mean);
    // This tests count(a >= threshold) <= k (line 10) without counting; see the header.
    if (k >= n || next < threshold) {
      right = ratio;
      // Above the largest magnitude, the count is 0, which line 13 never accepts.
      if (threshold <= max) {
        upper = threshold;
        found_upper = true;
      }
    } else {
      left = ratio;
      lower = threshold;
    }
  }
  // The condition a >= t equals key > key(t) - 1.
  return {found_upper ? static_cast<int32_t>(key_of(upper)) - 1 : static_cast<int32_t>(kKeyMask),
          static_cast<int32_t>(key_of(lower)) - 1};
}

uint64_t random_below(uint64_t bound, uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % bound;
}

}  // namespace tfposeidon
