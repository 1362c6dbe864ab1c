// Random and difficult inputs, and plain references.

#ifndef TESTS_NATIVE_CASES_H_
#define TESTS_NATIVE_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tfposeidon/native/lib/keys.h"
#include "tfposeidon/native/lib/norms.h"
#include "tfposeidon/native/lib/thresholds.h"

namespace tfposeidon {

using Floats = std::vector<float>;
using Indices = std::vector<int32_t>;

inline std::mt19937_64 generator(7);

inline int64_t below(int64_t bound) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(bound));
}
inline double uniform() { return std::uniform_real_distribution<double>()(generator); }
inline double normal() { return std::normal_distribution<double>()(generator); }

inline void expect(bool truth, const char* what, const std::string& about) {
  if (truth) return;
  std::fprintf(stderr, "FAILED: %s (%s)\n", what, about.c_str());
  std::exit(1);
}

inline constexpr const char* kKinds[] = {"normal", "mostly zero", "ties",  "zero", "constant",
                                         "rising", "falling",     "heavy", "huge", "non-finite"};

inline Floats draw(int64_t n, const std::string& kind) {
  Floats x(n);
  for (int64_t i = 0; i < n; ++i) {
    double v = normal();
    if (kind == "mostly zero" && uniform() > 0.01) v = 0;
    if (kind == "ties") v = std::trunc(3 * v);
    if (kind == "zero") v = 0;
    if (kind == "constant") v = -0.5;
    if (kind == "rising") v = static_cast<double>(i);
    if (kind == "falling") v = static_cast<double>(n - i);
    if (kind == "heavy") v *= std::exp(5 * normal());
    if (kind == "huge") v = std::copysign(std::min(3.4e38, 1e38 * std::fabs(v)), v);
    x[i] = static_cast<float>(v);
  }
  if (kind == "non-finite" && n > 0) {
    for (float v : {std::nanf(""), HUGE_VALF, -HUGE_VALF, -0.0f, 1e-42f}) x[below(n)] = v;
  }
  return x;
}

// ------------------------------------------------------------------ references

inline Indices exact(const Floats& x, int64_t k) {
  Indices order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return key_of(x[a]) > key_of(x[b]); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// The mean of |x| as `Statistics` defines it; with another rounding, the search may differ.
inline float mean_magnitude(const Floats& x) {
  const size_t whole = x.size() / 64 * 64;
  double sum = 0;
  for (size_t i = 0; i < whole; i += 64) {
    for (size_t j = i; j < i + 16; ++j) {
      sum +=
          (std::fabs(x[j]) + std::fabs(x[j + 16])) + (std::fabs(x[j + 32]) + std::fabs(x[j + 48]));
    }
  }
  for (size_t i = whole; i < x.size(); ++i) sum += std::fabs(x[i]);
  return static_cast<float>(sum / static_cast<double>(x.size()));
}

// Algorithm 1, line by line, with the corrections that top_k.h lists.
inline Indices literal_ms_top_k(const Floats& x, int64_t k, int steps, uint64_t seed, float mean) {
  const int64_t n = static_cast<int64_t>(x.size());
  if (!std::isfinite(mean)) return exact(x, k);
  float u = 0;
  for (float v : x) u = std::max(u, std::fabs(v));
  float l = 0, r = 1, thres1 = 0, thres2 = 0;
  int64_t k1 = 0, k2 = n;
  for (int i = 0; i < steps; ++i) {
    const float ratio = l + (r - l) / 2;
    const float thres = mean + ratio * (u - mean);
    const int64_t nnz =
        std::count_if(x.begin(), x.end(), [&](float v) { return std::fabs(v) >= thres; });
    if (nnz <= k) {
      r = ratio;
      if (nnz > k1) k1 = nnz, thres1 = thres;
    } else {
      l = ratio;
      if (nnz < k2) k2 = nnz, thres2 = thres;
    }
  }
  Indices first, second;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    const bool in_first = k1 > 0 && a >= thres1;
    if (in_first) first.push_back(static_cast<int32_t>(i));
    if (!in_first && a >= thres2) second.push_back(static_cast<int32_t>(i));
  }
  const int64_t start = static_cast<int64_t>(random_below(second.size() - (k - k1) + 1, seed));
  first.insert(first.end(), second.begin() + start, second.begin() + start + (k - k1));
  std::sort(first.begin(), first.end());
  return first;
}

struct Case {
  Floats x;
  int64_t k;
  std::string about;
};

inline Case draw_case(int number) {
  const int64_t sizes[] = {300, 40'000, 40'000, 200'000, 1'500'000};
  const int64_t size = number % 50 == 0 ? sizes[4] : sizes[number % 4];
  const int64_t n = 1 + below(size);
  const std::string kind = kKinds[below(std::size(kKinds))];
  const int64_t k = number % 2 ? 1 + below(n) : std::clamp<int64_t>(n / (1 + below(2000)), 1, n);
  return {draw(n, kind), k, kind + ", n = " + std::to_string(n) + ", k = " + std::to_string(k)};
}

struct Selected {
  Indices indices;
  Floats values;
};

template <class Select>
Selected selected(int64_t k, const Select& call) {
  // The canaries after the end show that exactly k elements are written.
  Selected s{Indices(k + 1, -7), Floats(k + 1, -7)};
  call(s.indices.data(), s.values.data());
  expect(s.indices[k] == -7 && s.values[k] == -7, "writes k elements", "");
  s.indices.pop_back();
  s.values.pop_back();
  return s;
}

inline void check_values(const Selected& s, const Floats& x, const std::string& about) {
  for (size_t i = 0; i < s.indices.size(); ++i) {
    expect(bits_of(s.values[i]) == bits_of(x[s.indices[i]]), "values are those at the indices",
           about);
  }
}

// Checks that a sent value fits the wire type, and that sent value and residual are the sum.
inline void check_sent(float value, float stays, float was, const std::string& about) {
  expect((bits_of(value) & 0xffff) == 0, "values fit the wire's type", about);
  const bool finite = std::isfinite(was) && std::isfinite(value);
  expect(!finite || value + stays == was, "sent + residual = sum", about);
}

// Index-value pairs of several ranks, and their sum.
struct Sparse {
  Indices indices;
  Floats values;
  std::vector<int64_t> counts;
  Floats sum;
};

inline Sparse draw_sparse(const Floats& x) {
  const int64_t n = static_cast<int64_t>(x.size());
  Sparse s;
  const bool ascending = below(4) > 0;
  for (int64_t rank = 1 + below(4); rank > 0; --rank) {
    Indices own(below(std::min<int64_t>(n, 5000) + 1));
    for (int32_t& i : own) i = static_cast<int32_t>(below(n));
    if (ascending) std::sort(own.begin(), own.end());
    s.indices.insert(s.indices.end(), own.begin(), own.end());
    s.counts.push_back(static_cast<int64_t>(own.size()));
  }
  s.sum.assign(n, 0);
  for (int32_t i : s.indices) s.values.push_back(x[i]), s.sum[i] += x[i];
  return s;
}

// Replaces an index by one outside 0 .. n-1, and returns its position; `s` must have an index.
inline int64_t spoil(Sparse* s) {
  const int64_t place = below(static_cast<int64_t>(s->indices.size()));
  const int32_t wrong[] = {static_cast<int32_t>(s->sum.size()), -1,
                           std::numeric_limits<int32_t>::max(),
                           std::numeric_limits<int32_t>::min()};
  s->indices[place] = wrong[below(4)];
  return place;
}

inline void check_sum(const Floats& sum, const Floats& expected, const std::string& about) {
  for (size_t i = 0; i < sum.size(); ++i) {
    expect(bits_of(sum[i]) == bits_of(expected[i]) || std::isnan(expected[i]), "adds in rank order",
           about);
  }
}

// `add(sparse, out)` sums into `out`, and returns an index that is out of range.
template <class Add>
void check_scatter_add(const Case& c, const std::string& about, const Add& add) {
  Sparse s = draw_sparse(c.x);
  Floats out(c.x.size(), -7);
  expect(add(s, out.data()).place == -1, "all indices are inside", about);
  check_sum(out, s.sum, about);
  if (s.indices.empty()) return;
  const int64_t place = spoil(&s);
  const auto outside = add(s, out.data());
  expect(outside.place == place && outside.index == s.indices[place],
         "finds the index that is outside", about);
}

// Cuts `x` into consecutive vectors, including empty and short ones.
inline std::vector<Span> cut_anywhere(const Floats& x) {
  std::vector<Span> vectors;
  const int64_t n = static_cast<int64_t>(x.size());
  for (int64_t begin = 0; begin < n;) {
    const int64_t most = below(3) ? 1 + below(100) : 3 * kNormChunk;
    const int64_t size = std::min(below(most + 1), n - begin);
    vectors.push_back({x.data() + begin, size});
    begin += size;
  }
  return vectors;
}

inline void check_norms_of(const std::vector<Span>& vectors, const Floats& norms,
                           const std::string& about) {
  for (size_t v = 0; v < vectors.size(); ++v) {
    long double sum = 0;
    for (int64_t i = 0; i < vectors[v].size; ++i) {
      sum += static_cast<long double>(vectors[v].begin[i]) * vectors[v].begin[i];
    }
    const float expected = static_cast<float>(std::sqrt(sum));
    const bool close = std::fabs(norms[v] - expected) <= 1e-6f * expected;
    expect(close || norms[v] == expected || (std::isnan(expected) && std::isnan(norms[v])),
           "computes norms", about);
  }
}

}  // namespace tfposeidon

#endif  // TESTS_NATIVE_CASES_H_
