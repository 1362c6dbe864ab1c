// The GPU's library against plain references, its passes run by Thrust on the CPU. That they
// are compiled for CUDA and register is for tests/jobs/test_cuda.py; that they run there is for a
// machine with a GPU.
//
//   gpu_test [cases]

#include <thrust/system/cpp/execution_policy.h>

#include <memory>

#include "tests/native/cases.h"
#include "tfposeidon/native/lib/gpu/accumulation.h"
#include "tfposeidon/native/lib/gpu/norms.h"
#include "tfposeidon/native/lib/gpu/selection.h"

namespace tfposeidon::gpu {
namespace {

class Processor {
 public:
  auto policy() { return thrust::cpp::par; }

  template <class T>
  T* array(int64_t n) {
    held_.push_back(std::make_unique<char[]>(sizeof(T) * n));
    return reinterpret_cast<T*>(held_.back().get());
  }

  template <class T>
  T* copied(const std::vector<T>& list) {
    T* place = array<T>(list.size());
    std::copy(list.begin(), list.end(), place);
    return place;
  }

  template <class T>
  T read(const T* place) {
    return *place;
  }

 private:
  std::vector<std::unique_ptr<char[]>> held_;
};

// Adds in the order in which the passes add.
float mean_in_64_bits(const Floats& x) {
  double sum = 0;
  for (float v : x) sum += std::fabs(static_cast<double>(v));
  return static_cast<float>(sum / static_cast<double>(x.size()));
}

template <class Source>
Selected select_from(const Source& source, const Selection& selection) {
  return selected(selection.k, [&](int32_t* indices, float* values) {
    Processor machine;
    select(machine, source, selection, indices, values);
  });
}

void check_selection(const Case& c, const std::string& about) {
  const int64_t n = static_cast<int64_t>(c.x.size());
  const Vector source{c.x.data()};
  const Indices expected = exact(c.x, c.k);
  for (const Method method : {Method::kExact, Method::kDgc}) {
    const Selected s = select_from(source, {method, n, c.k, 0, 0});
    expect(s.indices == expected, "takes the k largest", about);
    check_values(s, c.x, about);
  }
  const uint64_t seed = generator();
  for (int steps : {0, 1, 5, 30}) {
    const Selected s = select_from(source, {Method::kMsTopK, n, c.k, steps, seed});
    expect(s.indices == literal_ms_top_k(c.x, c.k, steps, seed, mean_in_64_bits(c.x)),
           "is Algorithm 1", about);
    check_values(s, c.x, about);
  }
}

void check_error_feedback(const Case& c, const std::string& about) {
  const int64_t n = static_cast<int64_t>(c.x.size());
  const Floats residual = draw(n, "normal"), velocity = draw(n, "normal");
  Floats sum(n), out(n, -7), speed(n, -7);
  for (int64_t i = 0; i < n; ++i) sum[i] = residual[i] + c.x[i];
  Processor machine;
  Selected s = select_from(ErrorFeedback{residual.data(), c.x.data(), out.data()},
                           {Method::kExact, n, c.k, 0, 0});
  expect(s.indices == exact(sum, c.k), "selects from residual + gradient", about);
  check_values(s, sum, about);
  clear_sent(machine, s.indices.data(), s.values.data(), c.k, WireType::kFloat32, out.data());
  for (int32_t i : s.indices) sum[i] = 0;
  for (int64_t i = 0; i < n; ++i)
    expect(bits_of(sum[i]) == bits_of(out[i]), "the rest stays", about);

  for (int64_t i = 0; i < n; ++i) sum[i] = residual[i] + (velocity[i] * 0.9f + c.x[i]);
  const MomentumCorrection correction{residual.data(), velocity.data(), c.x.data(), 0.9f,
                                      speed.data(),    out.data()};
  s = select_from(correction, {Method::kExact, n, c.k, 0, 0});
  expect(s.indices == exact(sum, c.k), "selects from residual + velocity", about);
  clear_sent(machine, s.indices.data(), s.values.data(), c.k, WireType::kBfloat16, out.data());
  mask_sent(machine, s.indices.data(), c.k, speed.data());
  for (int64_t i = 0; i < c.k; ++i) {
    check_sent(s.values[i], out[s.indices[i]], sum[s.indices[i]], about);
    expect(speed[s.indices[i]] == 0, "velocity of what was sent is masked", about);
  }

  std::fill(out.begin(), out.end(), -7.0f);
  select_from(correction, {Method::kMsTopK, n, 0, 30, 0});
  check_sum(out, sum, about + ", k = 0");
}

void check_scatter_add(const Case& c, const std::string& about) {
  tfposeidon::check_scatter_add(c, about, [&](const Sparse& s, float* out) {
    Processor machine;
    return scatter_add(machine, s.indices.data(), s.values.data(),
                       static_cast<int64_t>(s.indices.size()), static_cast<int64_t>(c.x.size()),
                       out);
  });
}

// Conversions themselves are those of half.h, which lib_test compares with their definition.
void check_sums(const Case& c, const std::string& about) {
  const int64_t rows = 1 + below(4), n = static_cast<int64_t>(c.x.size()) / rows;
  Processor machine;
  for (const WireType wire : {WireType::kFloat16, WireType::kBfloat16}) {
    std::vector<uint16_t> halves(rows * n);
    Floats sum(n, -7), expected(n);
    for_each(machine, rows * n, Encode{c.x.data(), wire, halves.data()});
    for_each(machine, n, SumRows{halves.data(), rows, n, wire, sum.data()});
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < n; ++i) {
        const float value = rounded(c.x[row * n + i], wire);
        expected[i] = row == 0 ? value : expected[i] + value;
      }
    }
    check_sum(sum, expected, about);
  }
}

void check_norms(const Case& c, const std::string& about) {
  const std::vector<Span> vectors = cut_anywhere(c.x);
  Floats norms(vectors.size(), -7);
  Processor machine;
  l2_norms(machine, vectors, norms.data());
  check_norms_of(vectors, norms, about);
}

void run(int cases) {
  for (int number = 0; number < cases; ++number) {
    const Case c = draw_case(number);
    const std::string about = c.about + ", case " + std::to_string(number);
    check_selection(c, about);
    check_error_feedback(c, about);
    check_scatter_add(c, about);
    check_sums(c, about);
    check_norms(c, about);
  }
  std::printf("%d cases: all right\n", cases);
}

}  // namespace
}  // namespace tfposeidon::gpu

int main(int argc, char** argv) {
  tfposeidon::gpu::run(argc > 1 ? std::atoi(argv[1]) : 100);
  return 0;
}
