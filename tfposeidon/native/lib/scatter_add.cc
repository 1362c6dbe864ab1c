#include "tfposeidon/native/lib/scatter_add.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tfposeidon/native/lib/inner_loops.h"

namespace tfposeidon {
namespace {

// A tile of this many elements is summed in the first-level cache, and then written once.
constexpr int64_t kTile = 1 << 14;

// A sum of at least this size (16 MiB) is written past the caches, because it would not fit.
constexpr int64_t kLarge = 1 << 22;

// Pairs are prefetched this far ahead, which is a few tiles of a segment.
constexpr int64_t kAhead = 512;

template <class Index>
Outside first_outside(const Index* indices, int64_t total, int64_t n) {
  for (int64_t i = 0; i < total; ++i) {
    if (indices[i] < 0 || indices[i] >= n) return {i, indices[i]};
  }
  return {};
}

// Adds the pairs in [range.begin, range.end), tile by tile, and returns their number. Expects
// ascending segments; for other segments, writes stay in the range, and the sum of the returned
// numbers is too small.
template <class Index>
int64_t add_ascending(const Index* indices, const float* values, const std::vector<int64_t>& ends,
                      Range range, bool large, float* out) {
  using Unsigned = std::make_unsigned_t<Index>;
  std::vector<int64_t> cursor(ends.size() - 1);
  for (size_t s = 0; s + 1 < ends.size(); ++s) {
    cursor[s] = std::lower_bound(indices + ends[s], indices + ends[s + 1],
                                 static_cast<Index>(range.begin)) -
                indices;
  }
  alignas(64) float own[kTile] = {};
  int64_t used = 0;
  for (int64_t begin = range.begin; begin < range.end; begin += kTile) {
    const int64_t length = std::min(kTile, range.end - begin);
    float* tile = large ? own : out + begin;
    if (!large) std::memset(tile, 0, sizeof(float) * length);
    for (size_t s = 0; s < cursor.size(); ++s) {
      int64_t i = cursor[s];
      for (; i < ends[s + 1]; ++i) {
        // Prefetch here, because there are more segments than the CPU's prefetchers follow.
        __builtin_prefetch(indices + i + kAhead);
        __builtin_prefetch(values + i + kAhead);
        // The difference wraps around below `begin`, so that one comparison checks both bounds.
        const Unsigned place = static_cast<Unsigned>(indices[i]) - static_cast<Unsigned>(begin);
        if (place >= static_cast<Unsigned>(length)) break;
        tile[place] += values[i];
      }
      used += i - cursor[s];
      cursor[s] = i;
    }
    if (large) best_loops().move_out(tile, length, out + begin);
  }
  return used;
}

// Adds the pairs in a range, in any order of indices; each thread reads all pairs.
template <class Index>
void add_unordered(const Index* indices, const float* values, int64_t total, Range range,
                   float* out) {
  std::memset(out + range.begin, 0, sizeof(float) * range.size());
  for (int64_t i = 0; i < total; ++i) {
    if (indices[i] >= range.begin && indices[i] < range.end) out[indices[i]] += values[i];
  }
}

}  // namespace

template <class Index>
Outside scatter_add(const Index* indices, const float* values, const int64_t* counts,
                    int64_t segments, int64_t n, const Parallel& parallel, float* out) {
  std::vector<int64_t> ends(segments + 1, 0);
  for (int64_t s = 0; s < segments; ++s) ends[s + 1] = ends[s] + counts[s];
  const int64_t total = ends.back();
  // Check no indices first, because that would be another pass over them. Search for the cause only
  // if pairs were not added.
  std::atomic<int64_t> used{0};
  for_each_part(n, parallel, [&](Range range) {
    used += add_ascending(indices, values, ends, range, n >= kLarge, out);
  });
  if (used == total) return {};
  const Outside outside = first_outside(indices, total, n);
  if (outside.place < 0)
    for_each_part(n, parallel,
                  [&](Range range) { add_unordered(indices, values, total, range, out); });
  return outside;
}

template Outside scatter_add(const int32_t*, const float*, const int64_t*, int64_t, int64_t,
                             const Parallel&, float*);
template Outside scatter_add(const int64_t*, const float*, const int64_t*, int64_t, int64_t,
                             const Parallel&, float*);

}  // namespace tfposeidon
