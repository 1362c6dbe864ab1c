// One bit per value, with two means for each block (Seide et al. 2014, 1-bit SGD).

#ifndef TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_
#define TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_

#include <cstdint>

#include "tfposeidon/native/lib/parallel.h"

namespace tfposeidon {

// Values that share two means; a multiple of 32.
constexpr int64_t kOneBitBlock = 4096;

// A code: the words of all values, 32 to a word and the lowest bit first, a bit being set where a value's sign is; then
// for each block the means, as their bits, of what is not negative and of what is.
inline int64_t one_bit_blocks(int64_t n) { return (n + kOneBitBlock - 1) / kOneBitBlock; }
inline int64_t one_bit_words(int64_t n) { return (n + 31) / 32; }
inline int64_t one_bit_size(int64_t n) { return one_bit_words(n) + 2 * one_bit_blocks(n); }

// Codes residual + gradient; `kept` becomes what the code does not say. Bits behind the end are 0.
void one_bit_encode(const float* residual, const float* gradient, int64_t n, const Parallel& parallel, uint32_t* code,
                    float* kept);

// out = the sum of what `count` codes of n values say, added in their order.
void one_bit_sum(const uint32_t* codes, int64_t count, int64_t n, const Parallel& parallel, float* out);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_
