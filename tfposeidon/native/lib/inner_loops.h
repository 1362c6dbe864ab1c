// Declares inner loops that are compiled for several instruction sets; the CPU determines the set.

#ifndef TFPOSEIDON_NATIVE_LIB_INNER_LOOPS_H_
#define TFPOSEIDON_NATIVE_LIB_INNER_LOOPS_H_

#include <cstdint>
#include <vector>

namespace tfposeidon {

// Callers pass this many elements at a time: 8 KiB stay in the first-level cache, so that several
// loops over one block read memory once.
constexpr int64_t kBlock = 2048;

// Loops may write this many elements after the end of their output.
constexpr int64_t kSlack = 16;

struct Statistics {
  // Sum of |x|: four elements at distances of 16 are added in 32 bits, and these sums in 64 bits.
  double sum = 0;
  // Largest key.
  uint32_t max = 0;
};

struct InnerLoops {
  const char* name;

  // Writes the elements of x[0 .. n-1] whose key is > above, in order: indices (plus `base`) and
  // bits. Returns their number. `n` is at most kBlock; `indices` and `bits` have space for n +
  // kSlack elements.
  int64_t (*filter)(const float* x, int64_t n, int32_t above, uint32_t base, uint32_t* indices,
                    uint32_t* bits);

  // Writes the keys in (low, high] of bits[0 .. n-1]; returns their number. `keys` has space for
  // n + kSlack elements.
  int64_t (*between)(const uint32_t* bits, int64_t n, int32_t low, int32_t high, uint32_t* keys);

  // Writes those of n candidates whose key is > above: indices (plus `base`) and values. Returns
  // their number, at most `room`; writes nothing after them.
  int64_t (*compact)(const uint32_t* indices, const uint32_t* bits, int64_t n, int32_t above,
                     uint32_t base, int64_t room, int32_t* out_indices, float* out_values);

  void (*statistics)(const float* x, int64_t n, Statistics* total);

  // Returns the largest key; for benchmarks, which use it as the fastest loop that reads all data.
  uint32_t (*maximum)(const float* x, int64_t n);

  // Sums in 64 bits, in an order that depends on n alone.
  double (*sum_of_squares)(const float* x, int64_t n);

  // Returns how many of bits[0 .. n-1] have a key > above.
  int64_t (*count)(const uint32_t* bits, int64_t n, int32_t above);

  // Computes out = a + b. `out` may be `a`.
  void (*add)(const float* a, const float* b, int64_t n, float* out);

  // Computes velocity_out = momentum * velocity + gradient, and out = residual + velocity_out.
  void (*add_with_momentum)(const float* residual, const float* velocity, const float* gradient,
                            float momentum, int64_t n, float* velocity_out, float* out);

  // Copies past the caches without reading the overwritten memory, and sets the source to zero.
  void (*move_out)(float* from, int64_t n, float* to);

  void (*to_float16)(const float* x, int64_t n, uint16_t* out);
  void (*to_bfloat16)(const float* x, int64_t n, uint16_t* out);

  // Computes out = sum of `count` rows of n values at distances of `stride`, added in their order.
  void (*sum_float16)(const uint16_t* rows, int64_t count, int64_t stride, int64_t n, float* out);
  void (*sum_bfloat16)(const uint16_t* rows, int64_t count, int64_t stride, int64_t n, float* out);
};

// Returns the loops of all instruction sets that this CPU can run, the simplest first.
const std::vector<InnerLoops>& usable_loops();

// Returns the last of `usable_loops`.
const InnerLoops& best_loops();

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_INNER_LOOPS_H_
