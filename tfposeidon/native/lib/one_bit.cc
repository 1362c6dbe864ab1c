#include "tfposeidon/native/lib/one_bit.h"

#include <algorithm>

#include "tfposeidon/native/lib/keys.h"

namespace tfposeidon {
namespace {

constexpr int64_t kLanes = 32;

struct Means {
  float of[2];  // Of what is not negative, and of what is.
};

// Lane by lane, so that compilers vectorize it and all processors add in one order.
Means means_of(const float* x, int64_t n) {
  float sums[2][kLanes] = {};
  int64_t negative = 0;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t length = std::min(kLanes, n - begin);
    for (int64_t j = 0; j < length; ++j) {
      const float value = x[begin + j];
      const uint32_t sign = bits_of(value) >> 31;
      sums[0][j] += sign ? 0.0f : value;
      sums[1][j] += sign ? value : 0.0f;
      negative += sign;
    }
  }
  double total[2] = {};
  for (int64_t j = 0; j < kLanes; ++j) {
    total[0] += sums[0][j];
    total[1] += sums[1][j];
  }
  const auto mean = [](double sum, int64_t count) { return count == 0 ? 0.0f : static_cast<float>(sum / count); };
  return {{mean(total[0], n - negative), mean(total[1], negative)}};
}

void encode_block(const float* residual, const float* gradient, int64_t n, uint32_t* words, Means* means, float* kept) {
  for (int64_t i = 0; i < n; ++i) kept[i] = residual[i] + gradient[i];
  *means = means_of(kept, n);
  for (int64_t begin = 0; begin < n; begin += 32) {
    const int64_t length = std::min<int64_t>(32, n - begin);
    uint32_t word = 0;
    for (int64_t j = 0; j < length; ++j) {
      const uint32_t sign = bits_of(kept[begin + j]) >> 31;
      word |= sign << j;
      kept[begin + j] -= sign ? means->of[1] : means->of[0];
    }
    words[begin / 32] = word;
  }
}

template <class Work>
void for_each_block(int64_t n, const Parallel& parallel, const Work& work) {
  const int64_t blocks = one_bit_blocks(n);
  const int parts = static_cast<int>(std::min<int64_t>(blocks, parts_for(n, parallel)));
  parallel.run(parts, [&](int part) {
    for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
      const int64_t begin = block * kOneBitBlock;
      work(block, begin, std::min(kOneBitBlock, n - begin));
    }
  });
}

}  // namespace

void one_bit_encode(const float* residual, const float* gradient, int64_t n, const Parallel& parallel, uint32_t* code,
                    float* kept) {
  uint32_t* means = code + one_bit_words(n);
  for_each_block(n, parallel, [&](int64_t block, int64_t begin, int64_t length) {
    Means own;
    encode_block(residual + begin, gradient + begin, length, code + begin / 32, &own, kept + begin);
    for (int sign = 0; sign < 2; ++sign) means[2 * block + sign] = bits_of(own.of[sign]);
  });
}

void one_bit_sum(const uint32_t* codes, int64_t count, int64_t n, const Parallel& parallel, float* out) {
  for_each_block(n, parallel, [&](int64_t block, int64_t begin, int64_t length) {
    std::fill_n(out + begin, length, 0.0f);
    for (int64_t c = 0; c < count; ++c) {
      const uint32_t* words = codes + c * one_bit_size(n) + begin / 32;
      const uint32_t* bits = codes + c * one_bit_size(n) + one_bit_words(n) + 2 * block;
      const float means[2] = {float_of(bits[0]), float_of(bits[1])};
      for (int64_t i = 0; i < length; ++i) out[begin + i] += means[words[i / 32] >> (i % 32) & 1];
    }
  });
}

}  // namespace tfposeidon
