#include "tfposeidon/native/lib/inner_loops.h"

#include "tfposeidon/native/lib/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfposeidon {
namespace {

// Vectors have 64 bytes for all instruction sets. Compilers split them into the available
// registers, and sums have the same order everywhere.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Keys __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));

constexpr int64_t kGroups = kBlock / 16;

// Uses no branch, because most groups have no hit, and a mispredicted branch costs more than the
// write of a group's index.
inline int64_t list_one_by_one(const uint16_t* masks, uint16_t* hits) {
  int64_t count = 0;
  for (int64_t g = 0; g < kGroups; ++g) {
    hits[count] = (uint16_t)g;
    count += masks[g] != 0;
  }
  return count;
}

// Writes lane after lane, because usually only one lane is set.
inline void append_one_by_one(Keys values, uint32_t mask, uint32_t* out) {
  uint32_t lanes[16];
  __builtin_memcpy(lanes, &values, sizeof lanes);
  for (; mask != 0; mask &= mask - 1) *out++ = lanes[__builtin_ctz(mask)];
}

namespace plain {
constexpr char kName[] = "plain";

inline uint16_t lanes_to_bits(Keys lanes) {
#if defined(__SSE2__)
  // Packing saturates, so that a lane of all ones becomes a byte of all ones.
  __m128i quarters[4];
  __builtin_memcpy(quarters, &lanes, sizeof quarters);
  const __m128i low = _mm_packs_epi32(quarters[0], quarters[1]);
  const __m128i high = _mm_packs_epi32(quarters[2], quarters[3]);
  return (uint16_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
#else
  const Keys weights = {1,   2,   4,    8,    16,   32,   64,    128,
                        256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  lanes &= weights;
  int32_t sum = 0;
  for (int j = 0; j < 16; ++j) sum += lanes[j];
  return (uint16_t)sum;
#endif
}

inline int64_t list_groups(const uint16_t* masks, uint16_t* hits) {
  return list_one_by_one(masks, hits);
}

inline void append(Keys values, uint16_t mask, uint32_t* out) {
  append_one_by_one(values, mask, out);
}

#include "tfposeidon/native/lib/inner_loops.inc"
}  // namespace plain

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define TFPOSEIDON_HAS_F16C
namespace avx2 {
constexpr char kName[] = "avx2";

inline uint16_t lanes_to_bits(Keys lanes) {
  __m256 halves[2];
  __builtin_memcpy(halves, &lanes, sizeof halves);
  return (uint16_t)(_mm256_movemask_ps(halves[0]) | _mm256_movemask_ps(halves[1]) << 8);
}

inline int64_t list_groups(const uint16_t* masks, uint16_t* hits) {
  return list_one_by_one(masks, hits);
}

inline void append(Keys values, uint16_t mask, uint32_t* out) {
  append_one_by_one(values, mask, out);
}

#include "tfposeidon/native/lib/inner_loops.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
namespace avx512 {
constexpr char kName[] = "avx512";

inline uint16_t lanes_to_bits(Keys lanes) { return _mm512_movepi32_mask((__m512i)lanes); }

inline int64_t list_groups(const uint16_t* masks, uint16_t* hits) {
  int64_t count = 0;
  for (int64_t g = 0; g < kGroups; g += 32) {
    const __m512i some = _mm512_load_si512(masks + g);
    for (uint32_t any = _mm512_test_epi16_mask(some, some); any != 0; any &= any - 1) {
      hits[count++] = (uint16_t)(g + __builtin_ctz(any));
    }
  }
  return count;
}

// Compresses in a register and stores all of it, because a masked store is slow on some CPUs.
inline void append(Keys values, uint16_t mask, uint32_t* out) {
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(mask, (__m512i)values));
}

#include "tfposeidon/native/lib/inner_loops.inc"
}  // namespace avx512
#pragma GCC pop_options

#endif

}  // namespace

const std::vector<InnerLoops>& usable_loops() {
  // Query the CPU once, and never destroy the list, because threads may outlive static objects.
  static const std::vector<InnerLoops>* usable = [] {
    auto* found = new std::vector<InnerLoops>{plain::kLoops};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      found->push_back(avx2::kLoops);
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found->push_back(avx512::kLoops);
      }
    }
#endif
    return found;
  }();
  return *usable;
}

const InnerLoops& best_loops() { return usable_loops().back(); }

}  // namespace tfposeidon
