// The machine that this folder's passes run on. They are Thrust's, the same code on a GPU and, in
// the tests, on a CPU.
//
// A `Machine` has `policy()`, Thrust's; `array<T>(n)`, memory there; `copied(list)`, a list brought
// there; and `read(place)`, one value from there.

#ifndef TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_
#define TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_

#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <cstdint>

namespace tfposeidon::gpu {

// 0, 1, 2, ...
inline auto numbers() { return thrust::make_counting_iterator(int64_t{0}); }

// Calls work(i) for all i < n.
template <class Machine, class Work>
void for_each(Machine& machine, int64_t n, const Work& work) {
  thrust::for_each_n(machine.policy(), numbers(), n, work);
}

}  // namespace tfposeidon::gpu

#endif  // TFPOSEIDON_NATIVE_LIB_GPU_MACHINE_H_
