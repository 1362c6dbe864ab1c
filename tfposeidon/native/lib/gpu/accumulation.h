// Sums sparse vectors and 16-bit vectors in data-parallel passes.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_ACCUMULATION_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_ACCUMULATION_H_

#include <thrust/copy.h>
#include <thrust/fill.h>
#include <thrust/find.h>
#include <thrust/sort.h>

#include <cstdint>

#include "tfposeidon/native/lib/gpu/gpu.h"
#include "tfposeidon/native/lib/gpu/machine.h"
#include "tfposeidon/native/lib/half.h"

namespace tfposeidon::gpu {

template <class Index>
struct OutOf {
  int64_t n;
  TFPOSEIDON_HOST_DEVICE bool operator()(Index index) const { return index < 0 || index >= n; }
};

// Adds the adjacent pairs of one index in order, on the thread of the first pair.
template <class Index>
struct AddRun {
  const Index* indices;
  const float* values;
  int64_t total;
  float* out;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const {
    const Index place = indices[i];
    if (i > 0 && indices[i - 1] == place) return;
    float sum = 0;
    for (int64_t j = i; j < total && indices[j] == place; ++j) sum += values[j];
    out[place] = sum;
  }
};

// Sorts pairs stably by index, so that the bits do not depend on the order of threads.
template <class Machine, class Index>
Outside scatter_add(Machine& machine, const Index* indices, const float* values, int64_t total,
                    int64_t n, float* out) {
  const Index* end = indices + total;
  const Index* wrong = thrust::find_if(machine.policy(), indices, end, OutOf<Index>{n});
  if (wrong != end) return {wrong - indices, machine.read(wrong)};
  thrust::fill_n(machine.policy(), out, n, 0.0f);
  Index* places = machine.template array<Index>(total);
  float* sorted = machine.template array<float>(total);
  thrust::copy_n(machine.policy(), indices, total, places);
  thrust::copy_n(machine.policy(), values, total, sorted);
  thrust::stable_sort_by_key(machine.policy(), places, places + total, sorted);
  for_each(machine, total, AddRun<Index>{places, sorted, total, out});
  return {};
}

struct Encode {
  const float* x;
  WireType wire;
  uint16_t* out;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const {
    out[i] = wire == WireType::kFloat16 ? to_float16(x[i]) : to_bfloat16(x[i]);
  }
};

struct SumRows {
  const uint16_t* rows;
  int64_t count;
  int64_t n;
  WireType wire;
  float* out;
  TFPOSEIDON_HOST_DEVICE float value(int64_t place) const {
    return wire == WireType::kFloat16 ? from_float16(rows[place]) : from_bfloat16(rows[place]);
  }
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const {
    float sum = value(i);
    // Add in the order of rows, for the same bits as on a CPU.
    for (int64_t row = 1; row < count; ++row) sum += value(row * n + i);
    out[i] = sum;
  }
};

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_ACCUMULATION_H_
