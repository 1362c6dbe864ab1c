// Times the GPU library, and a copy in the GPU's memory, on the first CUDA GPU. Prints one line of
// JSON; benchmarks/gpu.py compiles this program and reads the output.
//
//   gpu ELEMENTS DENSITY DISTRIBUTION

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/native/timing.h"
#include "benchmarks/native/values.h"
#include "tfposeidon/native/lib/gpu/gpu.h"

namespace tfposeidon::gpu {
namespace {

constexpr int64_t kRanks = 16, kRows = 4, kVectors = 161;
constexpr int kRounds = 31;

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Gives the same block to each call, because TensorFlow's allocator reuses memory, too.
class Reused : public Memory {
 public:
  explicit Reused(size_t bytes) : size_(bytes) { must(cudaMalloc(&block_, bytes)); }
  ~Reused() override { must(cudaFree(block_)); }

  void* allocate(size_t bytes) override {
    char* place = static_cast<char*>(block_) + used_;
    used_ += (bytes + 255) / 256 * 256;
    if (used_ > size_) {
      std::fprintf(stderr, "more than %zu bytes of memory are needed\n", size_);
      std::exit(1);
    }
    most_ = std::max(most_, used_);
    return place;
  }
  void reset() { used_ = 0; }
  size_t most() const { return most_; }

 private:
  void* block_ = nullptr;
  size_t size_, used_ = 0, most_ = 0;
};

template <class T>
T* on_gpu(const std::vector<T>& list) {
  T* place;
  must(cudaMalloc(&place, sizeof(T) * list.size()));
  must(cudaMemcpy(place, list.data(), sizeof(T) * list.size(), cudaMemcpyHostToDevice));
  return place;
}

void run(int64_t n, int64_t k, const std::string& distribution) {
  std::vector<float> drawn(n);
  for (float& v : drawn) v = draw(distribution);
  const float* x = on_gpu(drawn);
  std::reverse(drawn.begin(), drawn.end());
  const float *residual = on_gpu(drawn), *velocity = on_gpu(drawn);
  float *out = on_gpu(drawn), *speed = on_gpu(drawn), *values = on_gpu(std::vector<float>(k));
  int32_t* indices = on_gpu(std::vector<int32_t>(k));
  // Sixteen ranks send vectors of the same density with different indices.
  std::vector<int32_t> places(k * kRanks);
  for (int64_t r = 0; r < kRanks; ++r) {
    for (int64_t i = 0; i < k; ++i)
      places[r * k + i] = static_cast<int32_t>(uniform() * static_cast<double>(n));
    std::sort(places.begin() + r * k, places.begin() + (r + 1) * k);
  }
  const int32_t* all_places = on_gpu(places);
  const float* sent = on_gpu(std::vector<float>(k * kRanks, 0.5f));
  const int64_t row = n / kRows;
  uint16_t* halves = on_gpu(std::vector<uint16_t>(n));
  std::vector<Span> vectors;
  for (int64_t v = 0; v < kVectors; ++v) vectors.push_back({x + v * (n / kVectors), n / kVectors});
  float* norms = on_gpu(std::vector<float>(kVectors));

  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Reused memory(static_cast<size_t>(n) * 32 + (size_t{64} << 20));
  const Device device{stream, &memory};
  const WireType wire = WireType::kFloat32, half = WireType::kFloat16;
  const std::vector<std::pair<std::string, std::function<void()>>> entries = {
      {"copy",
       [&] { must(cudaMemcpyAsync(out, x, sizeof(float) * n, cudaMemcpyDeviceToDevice, stream)); }},
      {"exact", [&] { top_k(device, {Method::kExact, n, k, 0, 0}, x, indices, values); }},
      {"mstopk", [&] { top_k(device, {Method::kMsTopK, n, k, 30, 0}, x, indices, values); }},
      {"feedback",
       [&] {
         error_feedback_top_k(device, {Method::kExact, n, k, 0, 0}, residual, x, wire, indices,
                              values, out);
       }},
      {"correction",
       [&] {
         momentum_correction_top_k(device, {Method::kExact, n, k, 0, 0}, residual, velocity, x,
                                   0.9f, wire, indices, values, out, speed);
       }},
      {"scatter", [&] { scatter_add(device, all_places, sent, k * kRanks, n, out); }},
      {"encode", [&] { encode(device, x, n, half, halves); }},
      {"sum_rows", [&] { sum_rows(device, halves, kRows, row, half, out); }},
      {"norms", [&] { l2_norms(device, vectors, norms); }},
  };
  std::map<std::string, std::vector<double>> times;
  for (int round = -3; round < kRounds; ++round) {
    for (const auto& [name, work] : entries) {
      memory.reset();
      must(cudaStreamSynchronize(stream));
      // Use the host's clock, because selections wait for values that the CPU reads.
      const double begin = seconds();
      work();
      must(cudaStreamSynchronize(stream));
      if (round >= 0) times[name].push_back(seconds() - begin);
    }
  }
  must(cudaGetLastError());
  cudaDeviceProp about;
  must(cudaGetDeviceProperties(&about, 0));
  std::printf("{\"gpu\": \"%s\", \"elements\": %lld, \"k\": %lld, \"memory_bytes\": %zu",
              about.name, static_cast<long long>(n), static_cast<long long>(k), memory.most());
  for (const auto& [name, list] : times)
    std::printf(", \"%s_s\": %.9f", name.c_str(), median(list));
  std::printf("}\n");
}

}  // namespace
}  // namespace tfposeidon::gpu

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: gpu ELEMENTS DENSITY DISTRIBUTION\n");
    return 2;
  }
  const int64_t n = std::atoll(argv[1]);
  const int64_t k = std::max<int64_t>(1, std::llround(std::atof(argv[2]) * static_cast<double>(n)));
  tfposeidon::gpu::run(n, k, argv[3]);
  return 0;
}
