// Selects elements in a few data-parallel passes.
//
// As in top_k.cc, one pass collects the elements above a sampled, slightly low threshold, and the
// selection is made among these. If the sample was misleading, bisection finds the exact threshold
// in 31 passes.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_SELECTION_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_SELECTION_H_

#include <thrust/copy.h>
#include <thrust/count.h>
#include <thrust/functional.h>
#include <thrust/gather.h>
#include <thrust/iterator/tabulate_output_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/transform.h>
#include <thrust/transform_reduce.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "tfposeidon/native/lib/gpu/gpu.h"
#include "tfposeidon/native/lib/gpu/machine.h"
#include "tfposeidon/native/lib/gpu/sources.h"
#include "tfposeidon/native/lib/keys.h"
#include "tfposeidon/native/lib/sample.h"
#include "tfposeidon/native/lib/thresholds.h"

namespace tfposeidon::gpu {

// Memory is allocated for at least this many candidates.
constexpr int64_t kLeastRoom = 2 * kSmallestSampled;

template <class Index>
struct Element {
  std::make_unsigned_t<Index> place;
  float value;
};

TFPOSEIDON_HOST_DEVICE inline int32_t signed_key(float x) {
  return static_cast<int32_t>(key_of(x));
}

template <class Index, class Source>
struct ElementOf {
  Source source;
  TFPOSEIDON_HOST_DEVICE Element<Index> operator()(int64_t i) const {
    return {static_cast<std::make_unsigned_t<Index>>(i), source(i)};
  }
};

// Candidates among the elements of a vector, in the order of their indices.
template <class Index>
struct Candidates {
  Index* indices;
  float* values;
  int64_t count;
  int32_t above;  // The candidates include all elements whose key is > above.

  TFPOSEIDON_HOST_DEVICE Element<Index> operator()(int64_t i) const {
    return {static_cast<std::make_unsigned_t<Index>>(indices[i]), values[i]};
  }
};

template <class Index, class Source>
auto elements_of(const Source& source) {
  return thrust::make_transform_iterator(numbers(), ElementOf<Index, Source>{source});
}

template <class Index>
auto elements_of(const Candidates<Index>& candidates) {
  return thrust::make_transform_iterator(numbers(), candidates);
}

// Returns whether an element's key is in (low, high].
struct Inside {
  int32_t low;
  int32_t high;
  template <class Index>
  TFPOSEIDON_HOST_DEVICE bool operator()(const Element<Index>& element) const {
    const int32_t key = signed_key(element.value);
    return key > low && key <= high;
  }
};

inline Inside above(int32_t key) { return {key, static_cast<int32_t>(kKeyMask)}; }

// Writes the elements of a sequence with numbers in begin .. end - 1, and drops the others.
template <class Index>
struct Window {
  int64_t begin;
  int64_t end;
  Index* indices;
  float* values;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t number, const Element<Index>& element) const {
    if (number < begin || number >= end) return;
    indices[number - begin] = static_cast<Index>(element.place);
    values[number - begin] = element.value;
  }
};

// Counts the elements that `inside` accepts, and writes the accepted elements in the window.
template <class Machine, class Elements, class Index>
int64_t keep(Machine& machine, Elements elements, int64_t n, Inside inside,
             const Window<Index>& window) {
  const auto out = thrust::make_tabulate_output_iterator(window);
  return thrust::copy_if(machine.policy(), elements, elements + n, out, inside) - out;
}

// Writes the k elements that `thresholds` select, by index. If the band has `spare` elements too
// many, the selected window begins at first(spare).
template <class Machine, class Elements, class First, class Index>
void write_chosen(Machine& machine, Elements elements, int64_t n, int64_t k, Thresholds thresholds,
                  const First& first, Index* indices, float* values) {
  const Inside higher = above(thresholds.upper), band{thresholds.lower, thresholds.upper};
  const int64_t taken = keep(machine, elements, n, higher, Window<Index>{0, k, indices, values});
  const int64_t wanted = k - taken;
  const int64_t begin =
      first(thrust::count_if(machine.policy(), elements, elements + n, band) - wanted);
  keep(machine, elements, n, band,
       Window<Index>{begin, begin + wanted, indices + taken, values + taken});
  // Sort by index, because the band was written after the higher elements.
  thrust::sort_by_key(machine.policy(), indices, indices + k, values);
}

constexpr auto kFirst = [](int64_t) { return int64_t{0}; };

struct KeyOf {
  TFPOSEIDON_HOST_DEVICE uint32_t operator()(float x) const { return key_of(x); }
};

// Sorts n keys, and returns the m-th largest.
template <class Machine>
uint32_t nth_key(Machine& machine, uint32_t* keys, int64_t n, int64_t m) {
  thrust::sort(machine.policy(), keys, keys + n, thrust::greater<uint32_t>());
  return machine.read(keys + (m - 1));
}

template <class Machine, class Index>
uint32_t nth_key(Machine& machine, const Candidates<Index>& c, int64_t m) {
  uint32_t* keys = machine.template array<uint32_t>(c.count);
  thrust::transform(machine.policy(), c.values, c.values + c.count, keys, KeyOf{});
  return nth_key(machine, keys, c.count, m);
}

// Finds the m-th largest key of all elements without memory for their keys.
template <class Machine, class Elements>
int32_t nth_key_by_bisection(Machine& machine, Elements elements, int64_t n, int64_t m) {
  int32_t low = 0, high = static_cast<int32_t>(kKeyMask);
  while (low < high) {
    // Round up, because `low = middle` would change nothing for adjacent bounds otherwise.
    const int32_t middle = high - (high - low) / 2;
    const bool enough =
        thrust::count_if(machine.policy(), elements, elements + n, above(middle - 1)) >= m;
    (enough ? low : high) = enough ? middle : middle - 1;
  }
  return low;
}

template <class Source>
struct SampledKey {
  Source source;
  double stride;
  TFPOSEIDON_HOST_DEVICE uint32_t operator()(int64_t i) const {
    return key_of(source(line_at(i / kLine, stride) + i % kLine));
  }
};

template <class Machine, class Source>
int32_t sampled_threshold(Machine& machine, const Source& source, int64_t n, int64_t k,
                          double margin) {
  if (n < kSmallestSampled) return kEverything;
  const Sampling plan = sampling(n, k, margin);
  if (plan.rank > plan.size()) return kEverything;
  uint32_t* keys = machine.template array<uint32_t>(plan.size());
  thrust::transform(machine.policy(), numbers(), numbers() + plan.size(), keys,
                    SampledKey<Source>{source, plan.stride});
  return static_cast<int32_t>(nth_key(machine, keys, plan.size(), plan.rank)) - 1;
}

// Returns candidates that include the k largest elements; computes the whole source.
template <class Index, class Machine, class Source>
Candidates<Index> collect(Machine& machine, const Source& source, int64_t n, int64_t k,
                          double margin) {
  const int64_t room = std::min(n, std::max(2 * k, kLeastRoom));
  Candidates<Index> c{machine.template array<Index>(room), machine.template array<float>(room), 0,
                      sampled_threshold(machine, source, n, k, margin)};
  // Count all candidates, and write as many as fit. The count shows whether all of them fit.
  const Window<Index> window{0, room, c.indices, c.values};
  c.count = keep(machine, elements_of<Index>(source), n, above(c.above), window);
  if (k <= c.count && c.count <= room) return c;
  const auto all = elements_of<Index>(source.made());
  c.above = nth_key_by_bisection(machine, all, n, k);
  c.count = k;
  write_chosen(machine, all, n, k, largest(c.above), kFirst, c.indices, c.values);
  return c;
}

// Writes the k largest candidates, by index. Stable sorting selects the lowest indices of equal
// candidates, because candidates are in the order of indices. The CPU does not wait for the GPU.
template <class Machine, class Index>
void write_largest(Machine& machine, const Candidates<Index>& c, int64_t k, Index* indices,
                   float* values) {
  uint32_t* keys = machine.template array<uint32_t>(c.count);
  Index* chosen = machine.template array<Index>(c.count);
  thrust::transform(machine.policy(), c.values, c.values + c.count, keys, KeyOf{});
  thrust::sequence(machine.policy(), chosen, chosen + c.count);
  thrust::stable_sort_by_key(machine.policy(), keys, keys + c.count, chosen,
                             thrust::greater<uint32_t>());
  thrust::sort(machine.policy(), chosen, chosen + k);
  thrust::gather(machine.policy(), chosen, chosen + k, c.indices, indices);
  thrust::gather(machine.policy(), chosen, chosen + k, c.values, values);
}

struct Magnitudes {
  double sum;
  uint32_t max;
};

struct MagnitudeOf {
  TFPOSEIDON_HOST_DEVICE Magnitudes operator()(float x) const {
    return {std::fabs(static_cast<double>(x)), key_of(x)};
  }
};

struct Both {
  TFPOSEIDON_HOST_DEVICE Magnitudes operator()(const Magnitudes& a, const Magnitudes& b) const {
    return {a.sum + b.sum, a.max > b.max ? a.max : b.max};
  }
};

template <class Machine, class Source, class Index>
void ms_top_k(Machine& machine, const Source& source, const Selection& s, Index* indices,
              float* values) {
  const int64_t wanted = std::min(s.k + 1, s.n);
  const Candidates<Index> c = collect<Index>(machine, source, s.n, wanted, kSafe);
  const float* x = source.made().x;
  const Magnitudes all = thrust::transform_reduce(machine.policy(), x, x + s.n, MagnitudeOf{},
                                                  Magnitudes{0, 0}, Both{});
  // Thresholds are meaningless unless all values are finite. Unlike on the CPU, the sum is in 64
  // bits throughout, and is finite if all values are.
  if (all.max >= kInfinityKey) return write_largest(machine, c, s.k, indices, values);

  const float mean = static_cast<float>(all.sum / static_cast<double>(s.n));
  const float next = float_of(nth_key(machine, c, wanted));
  const Thresholds found = ms_thresholds(mean, float_of(all.max), next, s.k, s.n, s.steps);
  const auto first = [&](int64_t spare) {
    return static_cast<int64_t>(random_below(static_cast<uint64_t>(spare) + 1, s.seed));
  };
  if (found.lower >= c.above) {
    write_chosen(machine, elements_of(c), c.count, s.k, found, first, indices, values);
  } else {
    write_chosen(machine, elements_of<Index>(source.made()), s.n, s.k, found, first, indices,
                 values);
  }
}

template <class Source>
struct Make {
  Source source;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const { source(i); }
};

// Selects elements, and computes the whole source.
template <class Machine, class Source, class Index>
void select(Machine& machine, const Source& source, const Selection& s, Index* indices,
            float* values) {
  if (s.k == 0) {
    for_each(machine, s.n, Make<Source>{source});
  } else if (s.method == Method::kMsTopK) {
    ms_top_k(machine, source, s, indices, values);
  } else {
    // dgc has the same output as exact, and its sample without a margin would often be misleading.
    write_largest(machine, collect<Index>(machine, source, s.n, s.k, kSafe), s.k, indices, values);
  }
}

TFPOSEIDON_HOST_DEVICE inline float rounded(float x, WireType wire) {
  if (wire == WireType::kFloat16) return from_float16(to_float16(x));
  return wire == WireType::kBfloat16 ? from_bfloat16(to_bfloat16(x)) : x;
}

// Rounds values to the wire's type, and stores the rounding error (0 for float32) in the residual.
template <class Index>
struct ClearSent {
  const Index* indices;
  float* values;
  WireType wire;
  float* residual;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const {
    const float sent = rounded(values[i], wire);
    residual[indices[i]] = wire == WireType::kFloat32 ? 0 : values[i] - sent;
    values[i] = sent;
  }
};

template <class Machine, class Index>
void clear_sent(Machine& machine, const Index* indices, float* values, int64_t k, WireType wire,
                float* residual) {
  for_each(machine, k, ClearSent<Index>{indices, values, wire, residual});
}

// Sets the velocity of sent elements to 0.
template <class Index>
struct MaskSent {
  const Index* indices;
  float* velocity;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const { velocity[indices[i]] = 0; }
};

template <class Machine, class Index>
void mask_sent(Machine& machine, const Index* indices, int64_t k, float* velocity) {
  for_each(machine, k, MaskSent<Index>{indices, velocity});
}

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_SELECTION_H_
