// Computes norms of any number of vectors in three data-parallel passes.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_NORMS_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_NORMS_H_

#include <cmath>
#include <cstdint>

#include "tfposeidon/native/lib/gpu/machine.h"
#include "tfposeidon/native/lib/host_device.h"
#include "tfposeidon/native/lib/norms.h"

namespace tfposeidon::gpu {

// A chunk has this many lanes. Adjacent threads sum adjacent lanes, and read adjacent memory.
constexpr int64_t kLanes = 256;

struct SumLane {
  const Span* chunks;
  double* sums;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t i) const {
    const Span chunk = chunks[i / kLanes];
    double sum = 0;
    for (int64_t j = i % kLanes; j < chunk.size; j += kLanes) {
      const double x = chunk.begin[j];
      sum += x * x;
    }
    sums[i] = sum;
  }
};

// Adds a chunk's lanes into its first lane.
struct SumLanes {
  double* sums;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t chunk) const {
    // Add on one thread in the order of lanes, so that the bits do not depend on the schedule.
    double sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[chunk * kLanes + lane];
    sums[chunk * kLanes] = sum;
  }
};

struct RootOfChunks {
  const double* sums;
  const int64_t* ends;
  float* norms;
  TFPOSEIDON_HOST_DEVICE void operator()(int64_t v) const {
    double sum = 0;
    for (int64_t chunk = v == 0 ? 0 : ends[v - 1]; chunk < ends[v]; ++chunk)
      sum += sums[chunk * kLanes];
    norms[v] = static_cast<float>(sqrt(sum));
  }
};

template <class Machine>
void l2_norms(Machine& machine, const std::vector<Span>& vectors, float* norms) {
  const Chunks chunks = chunks_of(vectors);
  const int64_t count = static_cast<int64_t>(chunks.spans.size());
  double* sums = machine.template array<double>(count * kLanes);
  for_each(machine, count * kLanes, SumLane{machine.copied(chunks.spans), sums});
  for_each(machine, count, SumLanes{sums});
  for_each(machine, static_cast<int64_t>(vectors.size()),
           RootOfChunks{sums, machine.copied(chunks.ends), norms});
}

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_NORMS_H_
