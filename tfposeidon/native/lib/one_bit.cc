#include "tfposeidon/native/lib/one_bit.h"

#include <algorithm>

#include "tfposeidon/native/lib/keys.h"

namespace tfposeidon {
namespace {

constexpr int64_t kLanes = 32;

struct Means {
  float of[2];  // Of what is positive, and of what is negative.
  uint32_t zeros;
};

// By their bits: the other comparison takes the smallest values for zeros where a thread flushes
// them.
bool is_zero(float value) { return bits_of(value) << 1 == 0; }

// Without -0, which is a zero.
bool is_negative(float value) { return bits_of(value) > 0x80000000u; }

// Lane by lane, so that compilers vectorize it and all CPUs add in one order.
Means means_of(const float* x, int64_t n) {
  float sums[2][kLanes] = {};
  int64_t negative = 0, zeros = 0;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t length = std::min(kLanes, n - begin);
    for (int64_t j = 0; j < length; ++j) {
      const float value = x[begin + j];
      const uint32_t sign = is_negative(value);
      sums[0][j] += sign ? 0.0f : value;
      sums[1][j] += sign ? value : 0.0f;
      negative += sign;
      zeros += is_zero(value);
    }
  }
  double total[2] = {};
  for (int64_t j = 0; j < kLanes; ++j) {
    total[0] += sums[0][j];
    total[1] += sums[1][j];
  }
  const auto mean = [](double sum, int64_t count) {
    return count == 0 ? 0.0f : static_cast<float>(sum / count);
  };
  return {{mean(total[0], n - negative - zeros), mean(total[1], negative)},
          static_cast<uint32_t>(zeros)};
}

Means encode_block(const float* residual, const float* gradient, int64_t n, uint32_t* signs,
                   uint32_t* mask, float* kept) {
  for (int64_t i = 0; i < n; ++i) kept[i] = residual[i] + gradient[i];
  const Means means = means_of(kept, n);
  for (int64_t begin = 0; begin < n; begin += 32) {
    const int64_t length = std::min<int64_t>(32, n - begin);
    uint32_t negative = 0, zero = 0;
    for (int64_t j = 0; j < length; ++j) {
      const float value = kept[begin + j];
      const uint32_t sign = is_negative(value), none = is_zero(value);
      negative |= sign << j;
      zero |= none << j;
      kept[begin + j] = none ? value : value - means.of[sign];
    }
    signs[begin / 32] = negative;
    mask[begin / 32] = zero;
  }
  return means;
}

// Words that say which values of a block of n are zero: none where all are, as both means are then.
int64_t mask_words(uint32_t zeros, int64_t n) {
  return 0 < zeros && zeros < n ? one_bit_words(n) : 0;
}

int64_t block_length(int64_t block, int64_t n) {
  return std::min(kOneBitBlock, n - block * kOneBitBlock);
}

// The means of a code's block, and its zeros.
const uint32_t* block_words(const uint32_t* code, int64_t block, int64_t n) {
  return code + one_bit_words(n) + 3 * block;
}

// Counts the words of the masks of blocks `first` to before `last`.
int64_t masks_of(const uint32_t* code, int64_t first, int64_t last, int64_t n) {
  int64_t words = 0;
  for (int64_t block = first; block < last; ++block) {
    words += mask_words(block_words(code, block, n)[2], block_length(block, n));
  }
  return words;
}

void add_block(const uint32_t* signs, const uint32_t* mask, const float means[2], int64_t n,
               float* out) {
  const auto bit = [](const uint32_t* words, int64_t i) { return words[i / 32] >> (i % 32) & 1; };
  if (mask == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] += means[bit(signs, i)];
    return;
  }
  const float said[3] = {means[0], means[1], 0.0f};
  for (int64_t i = 0; i < n; ++i) out[i] += said[bit(mask, i) ? 2 : bit(signs, i)];
}

// Calls work(block, end) once for each part, which has the blocks from `block` to before `end`.
template <class Work>
void for_parts(int64_t n, const Parallel& parallel, const Work& work) {
  const int64_t blocks = one_bit_blocks(n);
  const int parts = static_cast<int>(std::min<int64_t>(blocks, parts_for(n, parallel)));
  parallel.run(parts, [&](int part) { work(blocks * part / parts, blocks * (part + 1) / parts); });
}

}  // namespace

int64_t one_bit_encode(const float* residual, const float* gradient, int64_t n,
                       const Parallel& parallel, uint32_t* code, float* kept) {
  // Where a mask belongs depends on all blocks before it, which threads do not know: each block has
  // room for one, and those that are needed are moved up afterwards.
  uint32_t* masks = code + one_bit_size(n);
  for_parts(n, parallel, [&](int64_t block, int64_t end) {
    for (; block < end; ++block) {
      const int64_t begin = block * kOneBitBlock;
      const Means own = encode_block(residual + begin, gradient + begin, block_length(block, n),
                                     code + begin / 32, masks + begin / 32, kept + begin);
      uint32_t* said = code + one_bit_words(n) + 3 * block;
      for (int sign = 0; sign < 2; ++sign) said[sign] = bits_of(own.of[sign]);
      said[2] = own.zeros;
    }
  });
  uint32_t* end = masks;
  for (int64_t block = 0; block < one_bit_blocks(n); ++block) {
    const uint32_t* own = masks + block * kOneBitBlock / 32;
    end = std::copy_n(own, masks_of(code, block, block + 1, n), end);
  }
  return end - code;
}

std::vector<const uint32_t*> one_bit_split(const uint32_t* codes, int64_t words, int64_t n) {
  std::vector<const uint32_t*> begins;
  const uint32_t* end = codes + words;
  while (codes < end) {
    // A code may come from a peer that disagrees about n: nothing is read behind its end.
    if (n == 0 || end - codes < one_bit_size(n)) return {};
    begins.push_back(codes);
    const int64_t masks = masks_of(codes, 0, one_bit_blocks(n), n);
    if (end - codes - one_bit_size(n) < masks) return {};
    codes += one_bit_size(n) + masks;
  }
  return begins;
}

void one_bit_sum(const std::vector<const uint32_t*>& codes, int64_t n, const Parallel& parallel,
                 float* out) {
  for_parts(n, parallel, [&](int64_t first, int64_t end) {
    // Each thread adds all codes to its own blocks: in their order, and no two to one value.
    std::fill(out + first * kOneBitBlock, out + std::min(end * kOneBitBlock, n), 0.0f);
    for (const uint32_t* code : codes) {
      const uint32_t* mask = code + one_bit_size(n) + masks_of(code, 0, first, n);
      for (int64_t block = first; block < end; ++block) {
        const uint32_t* said = block_words(code, block, n);
        const int64_t begin = block * kOneBitBlock, length = block_length(block, n),
                      more = mask_words(said[2], length);
        const float means[2] = {float_of(said[0]), float_of(said[1])};
        add_block(code + begin / 32, more ? mask : nullptr, means, length, out + begin);
        mask += more;
      }
    }
  });
}

}  // namespace tfposeidon
