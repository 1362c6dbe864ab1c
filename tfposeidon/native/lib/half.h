// Converts 16-bit values by integer arithmetic, which preserves denormals and gives the same bits
// on every CPU and GPU.

#ifndef TFPOSEIDON_NATIVE_LIB_HALF_H_
#define TFPOSEIDON_NATIVE_LIB_HALF_H_

#include <cstdint>

#include "tfposeidon/native/lib/keys.h"

namespace tfposeidon {

// Dtype in which values are sent.
enum class WireType { kFloat32, kFloat16, kBfloat16 };

// Uses no bfloat16 instruction of the CPU, which would flush denormals, so that ranks would differ.
TFPOSEIDON_HOST_DEVICE inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  // Add half of the last retained place, minus one if that place is even, so that ties go to even.
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // Keep NaN as a quiet NaN, because rounding could carry over into infinity.
  const uint32_t quiet = bits | 0x400000;
  return static_cast<uint16_t>(((bits & kKeyMask) > kInfinityKey ? quiet : rounded) >> 16);
}

TFPOSEIDON_HOST_DEVICE inline float from_bfloat16(uint16_t x) {
  return float_of(static_cast<uint32_t>(x) << 16);
}

TFPOSEIDON_HOST_DEVICE inline uint16_t to_float16(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
  const uint32_t key = key_of(x);
  if (key > kInfinityKey) return static_cast<uint16_t>(sign | 0x7e00 | ((key >> 13) & 0x3ff));
  // Magnitudes of at least 65536 become infinity.
  if (key >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (key < 0x38800000u) {
    // For a denormal, the last bits of the sum with 1/2 are its bits, rounded to even.
    return static_cast<uint16_t>(sign | (bits_of(float_of(key) + 0.5f) - 0x3f000000u));
  }
  // The exponent's bias falls from 127 to 15. From 65520 on, rounding carries over into infinity.
  return static_cast<uint16_t>(sign | ((key - 0x38000000u + 0xfff + ((key >> 13) & 1)) >> 13));
}

TFPOSEIDON_HOST_DEVICE inline float from_float16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t exponent = (x >> 10) & 31;
  const uint32_t fraction = x & 0x3ff;
  // Denormals are multiples of 2^-24, which float32 holds as normal values.
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  if (exponent == 31)
    return float_of(sign | kInfinityKey | (fraction << 13) | (fraction != 0 ? 0x400000u : 0));
  return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_HALF_H_
