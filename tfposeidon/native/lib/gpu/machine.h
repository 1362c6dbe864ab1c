// Abstracts the machine that runs this folder's Thrust passes: a GPU, or in tests a CPU.
//
// A `Machine` has `policy()`, which returns Thrust's policy; `array<T>(n)`, which allocates memory
// on the machine; `copied(list)`, which copies a list to the machine; and `read(place)`, which
// returns a value from the machine's memory.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_

#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <cstdint>

namespace tfposeidon::gpu {

// Iterates over 0, 1, 2, ...
inline auto numbers() { return thrust::make_counting_iterator(int64_t{0}); }

// Calls work(i) for all i < n.
template <class Machine, class Work>
void for_each(Machine& machine, int64_t n, const Work& work) {
  thrust::for_each_n(machine.policy(), numbers(), n, work);
}

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_
