// One bit per value, with two means for each block (Seide et al. 2014, 1-bit SGD). Zeros are
// neither of the two.

#ifndef TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_
#define TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_

#include <cstdint>
#include <vector>

#include "tfposeidon/native/lib/parallel.h"

namespace tfposeidon {

// Values that share two means; a multiple of 32.
constexpr int64_t kOneBitBlock = 4096;

// A code: the words of all values, 32 to a word and the lowest bit first, a bit being set where a
// value is negative; then for each block three words, the means of what is positive and of what is
// negative, as their bits, and how many values are zero; then for each block that has zeros beside
// other values as many words again, a bit being set where a value is zero.
inline int64_t one_bit_blocks(int64_t n) { return (n + kOneBitBlock - 1) / kOneBitBlock; }
inline int64_t one_bit_words(int64_t n) { return (n + 31) / 32; }
// Words of a code of values none of which is zero, and the most that a code has.
inline int64_t one_bit_size(int64_t n) { return one_bit_words(n) + 3 * one_bit_blocks(n); }
inline int64_t one_bit_limit(int64_t n) { return one_bit_size(n) + one_bit_words(n); }

// Codes residual + gradient; `kept` becomes what the code does not say. Bits behind the end are 0.
// `code` has room for one_bit_limit(n) words; returns how many it has.
int64_t one_bit_encode(const float* residual, const float* gradient, int64_t n,
                       const Parallel& parallel, uint32_t* code, float* kept);

// Where each of the codes of n values begins, one after the other in `words` words. None if these
// are not whole codes.
std::vector<const uint32_t*> one_bit_split(const uint32_t* codes, int64_t words, int64_t n);

// out = the sum of what codes of n values say, added in their order.
void one_bit_sum(const std::vector<const uint32_t*>& codes, int64_t n, const Parallel& parallel,
                 float* out);

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_ONE_BIT_H_
