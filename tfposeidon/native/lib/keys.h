// Represents magnitudes as integers: the bits of |x| have the order of |x|, with infinity and NaN
// above all numbers.

#ifndef TFPOSEIDON_NATIVE_LIB_KEYS_H_
#define TFPOSEIDON_NATIVE_LIB_KEYS_H_

#include <cstdint>
#include <cstring>

#include "tfposeidon/native/lib/host_device.h"

namespace tfposeidon {

constexpr uint32_t kKeyMask = 0x7fffffffu;
constexpr uint32_t kInfinityKey = 0x7f800000u;

// Keys are compared with `key > above`. Every key passes this threshold.
constexpr int32_t kEverything = -1;

TFPOSEIDON_HOST_DEVICE inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TFPOSEIDON_HOST_DEVICE inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

TFPOSEIDON_HOST_DEVICE inline uint32_t key_of(float x) { return bits_of(x) & kKeyMask; }

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_KEYS_H_
