// Times the norms of many vectors, and one read of them. Prints one line of JSON;
// benchmarks/norms.py compiles this program and reads the output.
//
//   norms SIZE...

#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "benchmarks/native/timing.h"
#include "tfposeidon/native/lib/norms.h"

namespace tfposeidon {
namespace {

// Prevents the compiler from omitting reads without a use.
volatile uint32_t sink;

void run(const std::vector<int64_t>& sizes) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<float> values(total);
  for (int64_t i = 0; i < total; ++i) values[i] = static_cast<float>(i % 1000) * 1e-3f;
  std::vector<Span> vectors;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    vectors.push_back({values.data() + begin, size});
    begin += size;
  }
  std::vector<float> norms(sizes.size());
  const InnerLoops& loops = best_loops();
  const Pool pool(static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<double> read_s, norms_s;
  for (int round = -2; round < 31; ++round) {
    double start = seconds();
    for_each_part(total, pool, [&](Range range) {
      sink = loops.maximum(values.data() + range.begin, range.size());
    });
    const double read = seconds() - start;
    start = seconds();
    l2_norms(vectors, loops, pool, norms.data());
    if (round < 0) continue;
    read_s.push_back(read);
    norms_s.push_back(seconds() - start);
  }
  std::printf("{\"passes\": \"%s\", \"threads\": %d, \"read_s\": %.9f, \"norms_s\": %.9f}\n",
              loops.name, pool.threads(), median(read_s), median(norms_s));
}

}  // namespace
}  // namespace tfposeidon

int main(int argc, char** argv) {
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  tfposeidon::run(sizes);
  return 0;
}
