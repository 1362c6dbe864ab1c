// Random values for benchmarks, with distributions similar to those of gradients.

#ifndef BENCHMARKS_NATIVE_VALUES_H_
#define BENCHMARKS_NATIVE_VALUES_H_

#include <cmath>
#include <cstdint>
#include <string>

namespace tfposeidon {

inline uint64_t random_state = 0x9e3779b97f4a7c15u;

// Greater than 0, because callers take the logarithm.
inline double uniform() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<double>((random_state >> 11) + 1) * 0x1p-53;
}

inline float draw(const std::string& distribution) {
  const double u = uniform();
  if (distribution == "laplace")
    return static_cast<float>((random_state & 4 ? -1e-3 : 1e-3) * std::log(u));
  if (distribution == "cauchy") return static_cast<float>(1e-3 * std::tan(3.14159265 * (u - 0.5)));
  const double gauss = std::sqrt(-2 * std::log(u)) * std::cos(6.28318531 * uniform());
  // One of a hundred values is a thousand times larger.
  return static_cast<float>(gauss * (uniform() < 0.01 ? 1e-1 : 1e-4));
}

}  // namespace tfposeidon

#endif  // BENCHMARKS_NATIVE_VALUES_H_
