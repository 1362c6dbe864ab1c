#include "tfposeidon/native/lib/error_feedback.h"

#include <algorithm>

namespace tfposeidon {
namespace {

// Elements are prefetched this many steps before their use, because they are far apart.
constexpr int64_t kInFlight = 24;

// Calls work(i) for all i < k, and prefetches places[indices[i]]. Indices are distinct, so threads
// never write to the same element.
template <class Index, class Work>
void for_each_place(const Index* indices, int64_t k, const Parallel& parallel, const float* places,
                    const Work& work) {
  constexpr int64_t kPerThread = 8192;
  const int parts = static_cast<int>(std::clamp<int64_t>(k / kPerThread, 1, parallel.threads()));
  parallel.run(parts, [&](int part) {
    const int64_t end = k * (part + 1) / parts;
    for (int64_t i = k * part / parts; i < end; ++i) {
      __builtin_prefetch(places + indices[std::min(i + kInFlight, end - 1)], 1);
      work(i);
    }
  });
}

// Rounds at most kBlock values to the wire's type and back.
void round_to(WireType wire, const float* values, int64_t n, const InnerLoops& loops,
              float* rounded) {
  uint16_t half[kBlock];
  if (wire == WireType::kFloat16) {
    loops.to_float16(values, n, half);
    loops.sum_float16(half, 1, n, n, rounded);
  } else {
    loops.to_bfloat16(values, n, half);
    loops.sum_bfloat16(half, 1, n, n, rounded);
  }
}

}  // namespace

template <class Index>
void clear_sent(const Index* indices, float* values, int64_t k, WireType wire, const Engine& engine,
                float* residual) {
  if (wire == WireType::kFloat32) {
    for_each_place(indices, k, engine.parallel, residual,
                   [&](int64_t i) { residual[indices[i]] = 0; });
    return;
  }
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    const int64_t length = std::min(kBlock, k - begin);
    float rounded[kBlock];
    round_to(wire, values + begin, length, engine.loops, rounded);
    for (int64_t i = 0; i < length; ++i) {
      residual[indices[begin + i]] = values[begin + i] - rounded[i];
      values[begin + i] = rounded[i];
    }
  }
}

template <class Index>
void mask_sent(const Index* indices, int64_t k, const Engine& engine, float* velocity) {
  for_each_place(indices, k, engine.parallel, velocity,
                 [&](int64_t i) { velocity[indices[i]] = 0; });
}

template void clear_sent(const int32_t*, float*, int64_t, WireType, const Engine&, float*);
template void clear_sent(const int64_t*, float*, int64_t, WireType, const Engine&, float*);
template void mask_sent(const int32_t*, int64_t, const Engine&, float*);
template void mask_sent(const int64_t*, int64_t, const Engine&, float*);

}  // namespace tfposeidon
