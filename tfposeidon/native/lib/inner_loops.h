// The inner loops, compiled for several instruction sets; the best one is chosen at run time.

#ifndef TFPOSEIDON_NATIVE_LIB_INNER_LOOPS_H_
#define TFPOSEIDON_NATIVE_LIB_INNER_LOOPS_H_

#include <cstdint>
#include <vector>

namespace tfposeidon {

// How many elements the callers hand over at a time: 8 KiB stay in the first-level cache, so that
// several loops over one block read memory once.
constexpr int64_t kBlock = 2048;

// How far behind their output's end loops may write.
constexpr int64_t kSlack = 16;

struct Statistics {
  double sum = 0;    // of |x|: four elements 16 apart are added in 32 bits, and these sums in 64
  uint32_t max = 0;  // the largest key
};

struct InnerLoops {
  const char* name;

  // Appends those of x[0 .. n-1] whose key is > above, in order: indices (plus `base`) and bits.
  // Returns how many. `n` is at most kBlock; `indices` and `bits` have room for n + kSlack.
  int64_t (*filter)(const float* x, int64_t n, int32_t above, uint32_t base, uint32_t* indices,
                    uint32_t* bits);

  // Appends the keys in (low, high] of bits[0 .. n-1]; returns how many. `keys` has room for n +
  // kSlack.
  int64_t (*between)(const uint32_t* bits, int64_t n, int32_t low, int32_t high, uint32_t* keys);

  // Writes those of n candidates whose key is > above: indices (plus `base`) and values. Returns
  // how many; there are at most `room`, and nothing is written behind them.
  int64_t (*compact)(const uint32_t* indices, const uint32_t* bits, int64_t n, int32_t above,
                     uint32_t base, int64_t room, int32_t* out_indices, float* out_values);

  void (*statistics)(const float* x, int64_t n, Statistics* total);

  // The largest key: the fastest read there is, to compare with.
  uint32_t (*maximum)(const float* x, int64_t n);

  // In 64 bits, in an order that n alone decides.
  double (*sum_of_squares)(const float* x, int64_t n);

  // How many of bits[0 .. n-1] have a key > above.
  int64_t (*count)(const uint32_t* bits, int64_t n, int32_t above);

  // out = a + b. `out` may be `a`.
  void (*add)(const float* a, const float* b, int64_t n, float* out);

  // velocity_out = momentum * velocity + gradient; out = residual + velocity_out.
  void (*add_with_momentum)(const float* residual, const float* velocity, const float* gradient,
                            float momentum, int64_t n, float* velocity_out, float* out);

  // Copies past the caches, without reading what is overwritten, and leaves zeros.
  void (*move_out)(float* from, int64_t n, float* to);

  void (*to_float16)(const float* x, int64_t n, uint16_t* out);
  void (*to_bfloat16)(const float* x, int64_t n, uint16_t* out);

  // out = sum of `count` rows of n values that lie `stride` apart, added in their order.
  void (*sum_float16)(const uint16_t* rows, int64_t count, int64_t stride, int64_t n, float* out);
  void (*sum_bfloat16)(const uint16_t* rows, int64_t count, int64_t stride, int64_t n, float* out);
};

// All that this CPU can run, the plainest first.
const std::vector<InnerLoops>& usable_loops();

// The last of `usable_loops`.
const InnerLoops& best_loops();

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_PASSES_H_
