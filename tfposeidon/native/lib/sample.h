// Chooses the elements of a sample, and the rank of the threshold in it.

#ifndef TFPOSEIDON_NATIVE_LIB_SAMPLE_H_
#define TFPOSEIDON_NATIVE_LIB_SAMPLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tfposeidon/native/lib/host_device.h"

namespace tfposeidon {

// A cache line has this many elements. Reading one of them costs as much as reading all.
constexpr int64_t kLine = 16;

constexpr int64_t kSmallestSample = 4096;

// For fewer elements, sampling saves no time.
constexpr int64_t kSmallestSampled = 8 * kSmallestSample;

// Margin in standard deviations of the number of sampled elements above the threshold. With four of
// them, about one in 30,000 selections collects too few elements.
constexpr double kSafe = 4.0;

struct Sampling {
  int64_t lines;  // Number of cache lines.
  double stride;  // Distance of two lines in elements.
  int64_t rank;   // Rank of the threshold, from 1; it may exceed the sample's size.
  int64_t size() const { return lines * kLine; }
};

// Plans a sample of n >= kSmallestSampled elements. Slightly more than k elements exceed its
// threshold with high probability, or in half of the cases with a margin of 0.
inline Sampling sampling(int64_t n, int64_t k, double margin) {
  // With this number of sampled elements above the threshold, the number of candidates is slightly
  // above k. A smaller k needs a larger fraction.
  const double kept = std::clamp(0.35 * std::pow(static_cast<double>(k), 0.6), 24.0, 400.0);
  const double wanted = kept * static_cast<double>(n) / static_cast<double>(k);
  // For very small k, a smaller sample is enough, because few elements pass the threshold anyway.
  const int64_t most = std::max<int64_t>(n / 128, kSmallestSample);
  const int64_t lines =
      std::clamp<int64_t>(static_cast<int64_t>(wanted), kSmallestSample, most) / kLine;
  const double expected =
      static_cast<double>(lines * kLine) * static_cast<double>(k) / static_cast<double>(n);
  const int64_t rank = static_cast<int64_t>(expected + margin * (std::sqrt(expected) + 2)) + 1;
  return {lines, static_cast<double>(n - kLine) / static_cast<double>(lines), rank};
}

// Returns the start of the i-th cache line. Lines are at even distances plus random offsets, so
// that strided data do not bias the sample.
TFPOSEIDON_HOST_DEVICE inline int64_t line_at(int64_t i, double stride) {
  // A hash, unlike a generator, gives the same places on every rank, CPU and GPU, in any order of
  // calls. Multiples of 2^64 divided by the golden ratio are spread evenly.
  const uint64_t random = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u >> 40;
  const double place = (static_cast<double>(i) + static_cast<double>(random) * 0x1p-24) * stride;
  return static_cast<int64_t>(place) / kLine * kLine;
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_SAMPLE_H_
