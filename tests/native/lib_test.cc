// Compares the library with plain references on random and difficult inputs, for every instruction
// set of this CPU. `make check-native` runs it under the address, undefined-behavior and thread
// sanitizers.
//
//   lib_test [cases]

#include "tests/native/cases.h"
#include "tests/native/threads.h"
#include "tfposeidon/native/lib/error_feedback.h"
#include "tfposeidon/native/lib/norms.h"
#include "tfposeidon/native/lib/scatter_add.h"
#include "tfposeidon/native/lib/top_k.h"

namespace tfposeidon {
namespace {

void check_selection(const Case& c, const Engine& engine, const std::string& about) {
  const int64_t n = static_cast<int64_t>(c.x.size());
  const Vector source(c.x.data());
  const Indices expected = exact(c.x, c.k);
  Selected s =
      selected(c.k, [&](int32_t* i, float* v) { exact_top_k(source, n, c.k, engine, i, v); });
  expect(s.indices == expected, "exact_top_k selects the k largest", about);
  check_values(s, c.x, about);
  s = selected(c.k, [&](int32_t* i, float* v) { dgc_top_k(source, n, c.k, engine, i, v); });
  expect(s.indices == expected, "dgc_top_k selects the k largest", about);
  const uint64_t seed = generator();
  for (int steps : {0, 1, 5, 30}) {
    s = selected(
        c.k, [&](int32_t* i, float* v) { ms_top_k(source, n, c.k, steps, seed, engine, i, v); });
    expect(s.indices == literal_ms_top_k(c.x, c.k, steps, seed, mean_magnitude(c.x)),
           "ms_top_k is Algorithm 1", about);
    check_values(s, c.x, about);
  }
}

void check_error_feedback(const Case& c, const Engine& engine, const std::string& about) {
  const int64_t n = static_cast<int64_t>(c.x.size());
  Floats residual = draw(n, "normal"), velocity = draw(n, "normal"), sum(n), faster(n), out(n),
         velocity_out(n);
  for (int64_t i = 0; i < n; ++i) {
    sum[i] = residual[i] + c.x[i];
    faster[i] = velocity[i] * 0.9f + c.x[i];
  }
  const ErrorFeedback feedback(residual.data(), c.x.data(), out.data(), engine.loops);
  Selected s = selected(c.k, [&](int32_t* i, float* v) {
    exact_top_k(feedback, n, c.k, engine, i, v);
    clear_sent(i, v, c.k, WireType::kFloat32, engine, out.data());
  });
  expect(s.indices == exact(sum, c.k), "selects from residual + gradient", about);
  check_values(s, sum, about);
  for (int32_t i : s.indices) sum[i] = 0;
  for (int64_t i = 0; i < n; ++i)
    expect(bits_of(sum[i]) == bits_of(out[i]), "the residual has all unsent values", about);

  for (int64_t i = 0; i < n; ++i) sum[i] = residual[i] + faster[i];
  const MomentumCorrection correction(residual.data(), velocity.data(), c.x.data(), 0.9f,
                                      velocity_out.data(), out.data(), engine.loops);
  s = selected(c.k, [&](int32_t* i, float* v) {
    exact_top_k(correction, n, c.k, engine, i, v);
    clear_sent(i, v, c.k, WireType::kBfloat16, engine, out.data());
    mask_sent(i, c.k, engine, velocity_out.data());
  });
  expect(s.indices == exact(sum, c.k), "selects from residual + velocity", about);
  for (int64_t i = 0; i < c.k; ++i) {
    const int32_t place = s.indices[i];
    check_sent(s.values[i], out[place], sum[place], about);
    expect(velocity_out[place] == 0, "velocity of sent elements is 0", about);
  }
}

void check_scatter_add(const Case& c, const Engine& engine, const std::string& about) {
  tfposeidon::check_scatter_add(c, about, [&](const Sparse& s, float* out) {
    return scatter_add(s.indices.data(), s.values.data(), s.counts.data(),
                       static_cast<int64_t>(s.counts.size()), static_cast<int64_t>(c.x.size()),
                       engine.parallel, out);
  });
}

// A source of zeros with few other elements, which does not store the zeros.
class MostlyZero : public Source {
 public:
  explicit MostlyZero(std::vector<int64_t> places) : places_(std::move(places)) {}

  const float* block(int64_t begin, int64_t n) const override {
    thread_local Floats own(kBlock + 2 * kWide, 0.0f);
    std::fill(own.begin(), own.end(), 0.0f);
    fill(begin, n, own.data());
    return own.data();
  }

  void line(int64_t begin, float* out) const override {
    std::fill_n(out, kLine, 0.0f);
    fill(begin, kLine, out);
  }

  void prefetch(int64_t) const override {}

  static float value(int64_t place) { return static_cast<float>(1 + place % 7); }

 private:
  static constexpr int64_t kWide = 1024;

  void fill(int64_t begin, int64_t n, float* out) const {
    for (int64_t place : places_) {
      if (begin <= place && place < begin + n) out[place - begin] = value(place);
    }
  }

  std::vector<int64_t> places_;
};

void check_past_int32() {
  const int64_t n = (int64_t{1} << 31) + 12'345;
  const std::vector<int64_t> places = {0, 77, (int64_t{1} << 31) - 1, int64_t{1} << 31, n - 1};
  const MostlyZero source(places);
  const Serial serial;  // The engine must divide the work into two parts.
  Workspace workspace;
  const Engine engine{best_loops(), serial, workspace};
  std::vector<int64_t> indices(places.size());
  Floats values(places.size());
  exact_top_k(source, n, static_cast<int64_t>(places.size()), engine, indices.data(),
              values.data());
  expect(indices == places, "indices past 2^31", "int64");
  for (size_t i = 0; i < places.size(); ++i) {
    expect(values[i] == MostlyZero::value(places[i]), "values past 2^31", "int64");
  }
}

// --------------------------------------------------------------- 16-bit values

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

// The value of a float16, from its definition.
float float16_value(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  float value = exponent == 31
                    ? (fraction ? std::nanf("") : HUGE_VALF)
                    : std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                                 (exponent ? exponent : 1) - 25);
  return half & 0x8000 ? -value : value;
}

void check_float16(const InnerLoops& loops) {
  for (uint32_t half = 0; half < 65536; ++half) {
    // Of nine values, eight use vector instructions, and the last one does not.
    const std::vector<uint16_t> halves(9, static_cast<uint16_t>(half));
    Floats values(9);
    loops.sum_float16(halves.data(), 1, 9, 9, values.data());
    for (float v : values)
      expect(same(v, float16_value(halves[0])), "float16 to float32", loops.name);
    std::vector<uint16_t> back(9);
    loops.to_float16(values.data(), 9, back.data());
    if (!std::isnan(values[0])) expect(back == halves, "float32 to float16 and back", loops.name);
  }
  for (int i = 0; i < 200'000; ++i) {
    const float x = float_of(static_cast<uint32_t>(generator()));
    if (std::isnan(x)) continue;
    const Floats many(
        9, i % 2 ? x : static_cast<float>(std::ldexp(normal(), static_cast<int>(below(50)) - 30)));
    std::vector<uint16_t> out(9);
    loops.to_float16(many.data(), 9, out.data());
    for (uint16_t half : out) {
      const double value = many[0], got = float16_value(half), magnitude = std::fabs(value);
      if (magnitude >= 65520) {
        expect(std::isinf(got), "float16 ends at 65504", loops.name);
        continue;
      }
      const double up = float16_value(static_cast<uint16_t>((half & 0x7fff) + 1));
      const double down = float16_value(static_cast<uint16_t>(std::max(0, (half & 0x7fff) - 1)));
      const double error = std::fabs(value - got);
      const bool nearest =
          error <= std::fabs(magnitude - up) && error <= std::fabs(magnitude - down);
      const bool tie = error == std::fabs(magnitude - up) || error == std::fabs(magnitude - down);
      expect(nearest && (!tie || error == 0 || half % 2 == 0), "rounds to nearest even",
             loops.name);
    }
  }
}

void check_bfloat16(const InnerLoops& loops) {
  for (int i = 0; i < 200'000; ++i) {
    uint32_t bits = static_cast<uint32_t>(generator());
    if (i % 8 == 0) bits &= 0x807fffff;                   // Draw a denormal.
    if (i % 8 == 1) bits = (bits & 0xffff0000) | 0x8000;  // Draw a tie.
    if (i % 8 == 2) bits |= 0x7f800000;                   // Draw an infinity or a NaN.
    const Floats x(33, float_of(bits));
    std::vector<uint16_t> out(33);
    Floats back(33);
    loops.to_bfloat16(x.data(), 33, out.data());
    loops.sum_bfloat16(out.data(), 1, 33, 33, back.data());
    for (float v : back) {
      if (std::isnan(x[0])) {
        expect(std::isnan(v), "NaN stays NaN", loops.name);
        continue;
      }
      const int64_t error = static_cast<int64_t>(bits_of(v)) - static_cast<int64_t>(bits);
      const bool tie = error == 0x8000 || error == -0x8000;
      const bool right = std::llabs(error) < 0x8000 || (tie && (bits_of(v) >> 16) % 2 == 0);
      expect(right, "bfloat16 rounds to nearest even", loops.name);
    }
  }
}

void check_norms(const Case& c, const Engine& engine, const std::string& about) {
  const std::vector<Span> vectors = cut_anywhere(c.x);
  Floats norms(vectors.size(), -7), plain(vectors.size());
  l2_norms(vectors, engine.loops, engine.parallel, norms.data());
  check_norms_of(vectors, norms, about);
  l2_norms(vectors, usable_loops().front(), Serial(), plain.data());
  for (size_t v = 0; v < norms.size(); ++v) {
    expect(bits_of(norms[v]) == bits_of(plain[v]) || std::isnan(plain[v]),
           "norms have the same bits everywhere", about);
  }
}

void check_sums(const InnerLoops& loops) {
  for (int i = 0; i < 50; ++i) {
    const int64_t n = below(9000), rows = 1 + below(5), stride = n + below(3);
    Floats x = draw(rows * stride, "normal"), sum(n), expected(n);
    std::vector<uint16_t> halves(x.size());
    for (const bool brain : {false, true}) {
      (brain ? loops.to_bfloat16 : loops.to_float16)(x.data(), rows * stride, halves.data());
      (brain ? loops.sum_bfloat16 : loops.sum_float16)(halves.data(), rows, stride, n, sum.data());
      for (int64_t j = 0; j < n; ++j) {
        expected[j] = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const uint16_t half = halves[r * stride + j];
          const float value =
              brain ? float_of(static_cast<uint32_t>(half) << 16) : float16_value(half);
          expected[j] = r == 0 ? value : expected[j] + value;
        }
      }
      expect(sum == expected, "sums rows in float32", loops.name);
    }
  }
}

// From 2^22 elements on, sums bypass the caches.
void check_large_sums(const Parallel& parallel) {
  Workspace workspace;
  const Engine engine{best_loops(), parallel, workspace};
  for (const int64_t n : {(1 << 22) - 1, 1 << 22, (1 << 22) + 12'345}) {
    const Case c{draw(n, "normal"), 1, "n = " + std::to_string(n)};
    check_scatter_add(c, engine, c.about);
  }
}

void run(int cases) {
  for (const InnerLoops& loops : usable_loops()) {
    check_float16(loops);
    check_bfloat16(loops);
    check_sums(loops);
  }
  check_past_int32();
  const Serial serial;
  const Threads threads(3);
  const std::vector<const Parallel*> parallels = {&serial, &threads};
  std::vector<Workspace> workspaces(2);
  for (const Parallel* parallel : parallels) check_large_sums(*parallel);
  for (int number = 0; number < cases; ++number) {
    const Case c = draw_case(number);
    for (const InnerLoops& loops : usable_loops()) {
      for (size_t p = 0; p < parallels.size(); ++p) {
        const Engine engine{loops, *parallels[p], workspaces[p]};
        const std::string about = c.about + ", " + loops.name + ", " +
                                  std::to_string(parallels[p]->threads()) + " thread(s), case " +
                                  std::to_string(number);
        check_selection(c, engine, about);
        check_error_feedback(c, engine, about);
        check_scatter_add(c, engine, about);
        check_norms(c, engine, about);
      }
    }
  }
  std::printf("%d cases, instruction sets up to %s: passed\n", cases, best_loops().name);
}

}  // namespace
}  // namespace tfposeidon

int main(int argc, char** argv) {
  tfposeidon::run(argc > 1 ? std::atoi(argv[1]) : 200);
  return 0;
}
