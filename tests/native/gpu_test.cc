// Compares the GPU library with plain references. By default, Thrust runs its passes on the CPU;
// with TFPOSEIDON_ON_GPU, and gpu.cu linked, on a GPU. tests/jobs/test_cuda.py tests that it
// registers with TensorFlow.
//
//   gpu_test [cases]

#include "tests/native/cases.h"
#ifdef TFPOSEIDON_ON_GPU
#include "tests/native/on_gpu.h"
#else
#include "tests/native/on_cpu.h"
#endif

namespace tfposeidon::gpu {
namespace {

// The mean of |x| in 64 bits. On a GPU, blocks add concurrently, so the last bit of the sum may
// differ; the mean in 32 bits then differs in one of 2^29 cases.
float mean_in_64_bits(const Floats& x) {
  double sum = 0;
  for (float v : x) sum += std::fabs(static_cast<double>(v));
  return static_cast<float>(sum / static_cast<double>(x.size()));
}

float rounded_to(float x, WireType wire) {
  if (wire == WireType::kFloat16) return from_float16(to_float16(x));
  return wire == WireType::kBfloat16 ? from_bfloat16(to_bfloat16(x)) : x;
}

// Returns the results that `call(indices, values)` writes, and checks the canaries after them.
template <class Index, class Call>
Selected selected_by(UnderTest* place, int64_t k, const Call& call) {
  return selected(k, [&](int32_t* indices, float* values) {
    Index* own_indices = place->copied(std::vector<Index>(indices, indices + k + 1));
    float* own_values = place->copied(Floats(values, values + k + 1));
    call(own_indices, own_values);
    const std::vector<Index> read = place->read(own_indices, k + 1);
    std::transform(read.begin(), read.end(), indices,
                   [](Index i) { return static_cast<int32_t>(i); });
    const Floats read_values = place->read(own_values, k + 1);
    std::copy(read_values.begin(), read_values.end(), values);
  });
}

template <class Index>
void check_selection(const Case& c, const std::string& about) {
  UnderTest place;
  const float* x = place.copied(c.x);
  const auto select = [&](const Selection& selection) {
    return selected_by<Index>(&place, c.k, [&](Index* indices, float* values) {
      top_k(place.device(), selection, x, indices, values);
    });
  };
  const int64_t n = static_cast<int64_t>(c.x.size());
  const Indices expected = exact(c.x, c.k);
  for (const Method method : {Method::kExact, Method::kDgc}) {
    const Selected s = select({method, n, c.k, 0, 0});
    expect(s.indices == expected, "selects the k largest", about);
    check_values(s, c.x, about);
  }
  const uint64_t seed = generator();
  for (int steps : {0, 1, 5, 30}) {
    const Selected s = select({Method::kMsTopK, n, c.k, steps, seed});
    expect(s.indices == literal_ms_top_k(c.x, c.k, steps, seed, mean_in_64_bits(c.x)),
           "is Algorithm 1", about);
    check_values(s, c.x, about);
  }
}

// `was` is the sum from which elements are selected, and `kept` is the new residual.
void check_feedback(const Selected& s, const Floats& was, const Floats& kept, int64_t k,
                    WireType wire, const std::string& about) {
  expect(s.indices == exact(was, k), "selects from the sum", about);
  Floats stays = was;
  for (int64_t i = 0; i < k; ++i) {
    const int32_t place = s.indices[i];
    const float sent = rounded_to(was[place], wire);
    expect(bits_of(s.values[i]) == bits_of(sent) || std::isnan(sent), "values fit the wire's type",
           about);
    const bool finite = std::isfinite(was[place]) && std::isfinite(sent);
    expect(!finite || sent + kept[place] == was[place], "sent + residual = sum", about);
    stays[place] = kept[place];
  }
  check_sum(kept, stays, about);
}

template <class Index>
void check_error_feedback(const Case& c, WireType wire, const std::string& about) {
  const int64_t n = static_cast<int64_t>(c.x.size());
  const Floats residual = draw(n, "normal"), velocity = draw(n, "normal");
  Floats sum(n), speed(n);
  UnderTest place;
  const float *x = place.copied(c.x), *old = place.copied(residual), *v = place.copied(velocity);
  float *kept = place.copied(Floats(n, -7)), *faster = place.copied(Floats(n, -7));

  for (int64_t i = 0; i < n; ++i) sum[i] = residual[i] + c.x[i];
  Selected s = selected_by<Index>(&place, c.k, [&](Index* indices, float* values) {
    error_feedback_top_k(place.device(), {Method::kExact, n, c.k, 0, 0}, old, x, wire, indices,
                         values, kept);
  });
  check_feedback(s, sum, place.read(kept, n), c.k, wire, about);

  for (int64_t i = 0; i < n; ++i) {
    speed[i] = velocity[i] * 0.9f + c.x[i];
    sum[i] = residual[i] + speed[i];
  }
  const auto correct = [&](Method method, int64_t k) {
    return selected_by<Index>(&place, k, [&](Index* indices, float* values) {
      momentum_correction_top_k(place.device(), {method, n, k, 30, 0}, old, v, x, 0.9f, wire,
                                indices, values, kept, faster);
    });
  };
  correct(Method::kMsTopK, 0);
  check_sum(place.read(kept, n), sum, about + ", k = 0");
  check_sum(place.read(faster, n), speed, about + ", k = 0");
  s = correct(Method::kExact, c.k);
  check_feedback(s, sum, place.read(kept, n), c.k, wire, about);
  for (int32_t i : s.indices) speed[i] = 0;
  check_sum(place.read(faster, n), speed, about + ", velocity of sent elements is 0");
}

template <class Index>
void check_scatter_add(const Case& c, const std::string& about) {
  tfposeidon::check_scatter_add(c, about, [&](const Sparse& s, float* out) {
    UnderTest place;
    const int64_t n = static_cast<int64_t>(c.x.size());
    const Index* indices = place.copied(std::vector<Index>(s.indices.begin(), s.indices.end()));
    float* sum = place.copied(Floats(out, out + n));
    const Outside outside = scatter_add(place.device(), indices, place.copied(s.values),
                                        static_cast<int64_t>(s.indices.size()), n, sum);
    const Floats read = place.read(sum, n);
    std::copy(read.begin(), read.end(), out);
    return outside;
  });
}

// The conversions are those of half.h, which lib_test compares with their definition.
void check_sums(const Case& c, const std::string& about) {
  const int64_t rows = 1 + below(4), n = static_cast<int64_t>(c.x.size()) / rows;
  for (const WireType wire : {WireType::kFloat16, WireType::kBfloat16}) {
    UnderTest place;
    uint16_t* halves = place.copied(std::vector<uint16_t>(rows * n, 7));
    float* sum = place.copied(Floats(n, -7));
    encode(place.device(), place.copied(c.x), rows * n, wire, halves);
    sum_rows(place.device(), halves, rows, n, wire, sum);
    Floats expected(n);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < n; ++i) {
        const float value = rounded_to(c.x[row * n + i], wire);
        expected[i] = row == 0 ? value : expected[i] + value;
      }
    }
    check_sum(place.read(sum, n), expected, about);
  }
}

void check_norms(const Case& c, const std::string& about) {
  UnderTest place;
  const float* x = place.copied(c.x);
  const std::vector<Span> vectors = cut_anywhere(c.x);
  std::vector<Span> there = vectors;
  for (Span& vector : there) vector.begin = x + (vector.begin - c.x.data());
  float* norms = place.copied(Floats(vectors.size(), -7));
  l2_norms(place.device(), there, norms);
  check_norms_of(vectors, place.read(norms, static_cast<int64_t>(vectors.size())), about);
}

void run(int cases) {
  for (int number = 0; number < cases; ++number) {
    const Case c = draw_case(number);
    const std::string about = c.about + ", case " + std::to_string(number);
    check_selection<int32_t>(c, about);
    check_selection<int64_t>(c, about + ", 64 bits");
    for (const WireType wire : {WireType::kFloat32, WireType::kFloat16, WireType::kBfloat16})
      check_error_feedback<int32_t>(c, wire, about);
    check_error_feedback<int64_t>(c, WireType::kBfloat16, about + ", 64 bits");
    check_scatter_add<int32_t>(c, about);
    check_scatter_add<int64_t>(c, about + ", 64 bits");
    check_sums(c, about);
    check_norms(c, about);
  }
  std::printf("%d cases %s: passed\n", cases, kWhere);
}

}  // namespace
}  // namespace tfposeidon::gpu

int main(int argc, char** argv) {
  tfposeidon::gpu::run(argc > 1 ? std::atoi(argv[1]) : 100);
  return 0;
}
