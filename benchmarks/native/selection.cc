// Times the native library's passes over memory, and one read, one addition and one zero fill of
// the same data in the same run. Prints one line of JSON; benchmarks/selection.py compiles this
// program and reads the output.
//
//   selection ELEMENTS DENSITY DISTRIBUTION [FILE]
//
// FILE holds float32 values, for the distribution "file".

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "benchmarks/native/timing.h"
#include "benchmarks/native/values.h"
#include "tfposeidon/native/lib/error_feedback.h"
#include "tfposeidon/native/lib/keys.h"
#include "tfposeidon/native/lib/scatter_add.h"
#include "tfposeidon/native/lib/top_k.h"

namespace tfposeidon {
namespace {

void fill(const std::string& distribution, const char* file, std::vector<float>* x) {
  if (distribution != "file") {
    for (float& v : *x) v = draw(distribution);
    return;
  }
  std::FILE* stream = file ? std::fopen(file, "rb") : nullptr;
  const size_t have = stream ? std::fread(x->data(), sizeof(float), x->size(), stream) : 0;
  if (have == 0) {
    std::fprintf(stderr, "The distribution \"file\" needs a file of float32 values.\n");
    std::exit(2);
  }
  std::fclose(stream);
  for (size_t i = have; i < x->size(); ++i) (*x)[i] = (*x)[i % have];
}

// Prevents the compiler from omitting reads without a use.
volatile uint32_t sink;

void run(int64_t n, int64_t k, const std::string& distribution, const char* file) {
  constexpr int64_t kRanks = 16;
  std::vector<float> x(n), residual(n), out(n), values(k * kRanks);
  std::vector<int32_t> indices(k * kRanks);
  fill(distribution, file, &x);
  std::transform(x.rbegin(), x.rend(), residual.begin(), [](float v) { return v / 2; });
  const Pool pool(static_cast<int>(std::thread::hardware_concurrency()));
  Workspace workspace;
  const Engine engine{best_loops(), pool, workspace};
  const Vector source(x.data());
  const ErrorFeedback feedback(residual.data(), x.data(), out.data(), engine.loops);

  std::vector<std::pair<std::string, std::function<void()>>> entries = {
      {"read",
       [&] {
         for_each_part(n, pool, [&](Range range) {
           sink = engine.loops.maximum(x.data() + range.begin, range.size());
         });
       }},
      {"exact", [&] { exact_top_k(source, n, k, engine, indices.data(), values.data()); }},
      {"mstopk", [&] { ms_top_k(source, n, k, 30, 0, engine, indices.data(), values.data()); }},
      {"dgc", [&] { dgc_top_k(source, n, k, engine, indices.data(), values.data()); }},
      {"add",
       [&] {
         for_each_part(n, pool, [&](Range range) {
           const int64_t b = range.begin;
           engine.loops.add(residual.data() + b, x.data() + b, range.size(), out.data() + b);
         });
       }},
      {"feedback",
       [&] {
         exact_top_k(feedback, n, k, engine, indices.data(), values.data());
         clear_sent(indices.data(), values.data(), k, WireType::kFloat32, engine, out.data());
       }},
      {"zero",
       [&] {
         for_each_part(n, pool, [&](Range range) {
           std::memset(out.data() + range.begin, 0, sizeof(float) * range.size());
         });
       }},
  };
  // Sixteen ranks send vectors of the same density with different indices.
  std::vector<int32_t> places(k * kRanks);
  const std::vector<int64_t> counts(kRanks, k);
  for (int64_t r = 0; r < kRanks; ++r) {
    for (int64_t i = 0; i < k; ++i)
      places[r * k + i] = static_cast<int32_t>(uniform() * static_cast<double>(n));
    std::sort(places.begin() + r * k, places.begin() + (r + 1) * k);
  }
  const std::vector<float> sent(k * kRanks, 0.5f);
  entries.push_back({"scatter", [&] {
                       scatter_add(places.data(), sent.data(), counts.data(), kRanks, n, pool,
                                   out.data());
                     }});

  // The work is about equal for all lengths.
  const int rounds = static_cast<int>(std::clamp<int64_t>((int64_t{1} << 31) / n, 11, 301));
  std::map<std::string, std::vector<double>> times;
  for (int round = -2; round < rounds; ++round) {
    for (auto& [name, work] : entries) {
      const double begin = seconds();
      work();
      if (round >= 0) times[name].push_back(seconds() - begin);
    }
  }
  std::printf(
      "{\"elements\": %lld, \"k\": %lld, \"distribution\": \"%s\", \"passes\": \"%s\", "
      "\"threads\": %d",
      static_cast<long long>(n), static_cast<long long>(k), distribution.c_str(), engine.loops.name,
      pool.threads());
  for (auto& [name, list] : times) std::printf(", \"%s_s\": %.9f", name.c_str(), median(list));
  std::printf("}\n");
}

}  // namespace
}  // namespace tfposeidon

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: selection ELEMENTS DENSITY DISTRIBUTION [FILE]\n");
    return 2;
  }
  const int64_t n = std::atoll(argv[1]);
  const int64_t k = std::max<int64_t>(1, std::llround(std::atof(argv[2]) * static_cast<double>(n)));
  tfposeidon::run(n, k, argv[3], argc > 4 ? argv[4] : nullptr);
  return 0;
}
