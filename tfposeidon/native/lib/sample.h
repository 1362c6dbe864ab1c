// Chooses where a threshold is sampled, and how far below the estimate it has to lie.

#ifndef TFPOSEIDON_NATIVE_LIB_SAMPLE_H_
#define TFPOSEIDON_NATIVE_LIB_SAMPLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tfposeidon/native/lib/host_device.h"

namespace tfposeidon {

// Elements of a cache line: reading one costs as much as reading all.
constexpr int64_t kLine = 16;

constexpr int64_t kSmallestSample = 4096;

// Below this there is nothing to gain by sampling.
constexpr int64_t kSmallestSampled = 8 * kSmallestSample;

// In standard deviations of the number sampled: four, so that once in some 30,000 selections there
// are too few.
constexpr double kSafe = 4.0;

struct Sampling {
  int64_t lines;  // How many are read ...
  double stride;  // ... one in each stretch of so many elements.
  int64_t rank;   // The threshold is this largest of them, counted from 1; there may be fewer.
  int64_t size() const { return lines * kLine; }
};

// A sample of n >= kSmallestSampled elements whose threshold a little more than k are above with
// high probability; with a margin of 0 it is as often too high as too low.
inline Sampling sampling(int64_t n, int64_t k, double margin) {
  // Enough to lie close above k; more is needed, relatively, the smaller k is.
  const double kept = std::clamp(0.35 * std::pow(static_cast<double>(k), 0.6), 24.0, 400.0);
  const double wanted = kept * static_cast<double>(n) / static_cast<double>(k);
  // For very small k a part of this is enough: what passes the threshold is little anyhow.
  const int64_t most = std::max<int64_t>(n / 128, kSmallestSample);
  const int64_t lines =
      std::clamp<int64_t>(static_cast<int64_t>(wanted), kSmallestSample, most) / kLine;
  const double expected =
      static_cast<double>(lines * kLine) * static_cast<double>(k) / static_cast<double>(n);
  const int64_t rank = static_cast<int64_t>(expected + margin * (std::sqrt(expected) + 2)) + 1;
  return {lines, static_cast<double>(n - kLine) / static_cast<double>(lines), rank};
}

// Cache lines at even distances, each moved by chance within its own: strided data must not fool
// it.
TFPOSEIDON_HOST_DEVICE inline int64_t line_at(int64_t i, double stride) {
  // A hash and no generator: the same places on every rank, CPU or GPU, in whatever order they are
  // asked for. Multiples of 2^64 divided by the golden ratio spread evenly.
  const uint64_t random = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u >> 40;
  const double place = (static_cast<double>(i) + static_cast<double>(random) * 0x1p-24) * stride;
  return static_cast<int64_t>(place) / kLine * kLine;
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_SAMPLE_H_
