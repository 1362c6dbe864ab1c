// Marks functions that run on both CPUs and GPUs.

#ifndef TFPOSEIDON_NATIVE_LIB_HOST_DEVICE_H_
#define TFPOSEIDON_NATIVE_LIB_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define TFPOSEIDON_HOST_DEVICE __host__ __device__
#else
#define TFPOSEIDON_HOST_DEVICE
#endif

#endif  // TFPOSEIDON_NATIVE_LIB_HOST_DEVICE_H_
