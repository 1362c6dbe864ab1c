#include "tfposeidon/native/lib/top_k.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tfposeidon/native/lib/keys.h"
#include "tfposeidon/native/lib/sample.h"
#include "tfposeidon/native/lib/thresholds.h"

namespace tfposeidon {
namespace {

constexpr int kMostLowerings = 5;

struct Counts {
  int64_t higher = 0;
  int64_t band = 0;
};

// Output position of the next element, and index of the next band element within the band.
struct Cursor {
  int64_t out = 0;
  int64_t band = 0;
};

int64_t overlap(Range a, Range b) {
  return std::max<int64_t>(0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

// Writes the selected elements of a run while `cursor` is before `out_end`.
template <class Index>
void write_run(int64_t base, const uint32_t* run_indices, const uint32_t* bits, int64_t n,
               Thresholds thresholds, Range window, int64_t out_end, Cursor* cursor, Index* indices,
               float* values) {
  // Copy the cursor, because for the compiler a store through `indices` could change *cursor.
  Cursor at = *cursor;
  for (int64_t i = 0; i < n && at.out < out_end; ++i) {
    const int32_t key = static_cast<int32_t>(bits[i] & kKeyMask);
    const bool higher = key > thresholds.upper;
    const bool band = !higher && key > thresholds.lower;
    // Write every element, and overwrite it if it is not selected, which is cheaper than a branch
    // that is hard to predict.
    indices[at.out] = static_cast<Index>(base + run_indices[i]);
    values[at.out] = float_of(bits[i]);
    at.out += higher || (band && at.band >= window.begin && at.band < window.end);
    at.band += band;
  }
  *cursor = at;
}

// Writes the elements of a run with a key > above.
template <class Index>
void write_all_above(int64_t base, const uint32_t* run_indices, const uint32_t* bits, int64_t n,
                     int32_t above, int64_t out_end, Cursor* cursor, const InnerLoops& loops,
                     Index* indices, float* values) {
  if constexpr (sizeof(Index) == sizeof(int32_t)) {
    cursor->out +=
        loops.compact(run_indices, bits, n, above, static_cast<uint32_t>(base),
                      out_end - cursor->out, indices + cursor->out, values + cursor->out);
  } else {
    write_run(base, run_indices, bits, n, {above, above}, {}, out_end, cursor, indices, values);
  }
}

// Writes k elements. `runs(part, work)` calls work(base, indices, bits, count) for runs of elements
// in their order. The runs contain all elements with a key > lower. If the band has `spare`
// elements too many, the selected window begins at first(spare).
template <class Index, class Runs, class First>
void write_chosen(const Runs& runs, int parts, int64_t k, Thresholds thresholds, const First& first,
                  const Engine& engine, Index* indices, float* values) {
  std::vector<Counts> counts(parts);
  engine.parallel.run(parts, [&](int part) {
    Counts own;
    runs(part, [&](int64_t, const uint32_t*, const uint32_t* bits, int64_t n) {
      const int64_t higher = engine.loops.count(bits, n, thresholds.upper);
      own.higher += higher;
      own.band += engine.loops.count(bits, n, thresholds.lower) - higher;
    });
    counts[part] = own;
  });
  Counts total;
  for (const Counts& own : counts) total = {total.higher + own.higher, total.band + own.band};
  const int64_t wanted = k - total.higher;
  const int64_t begin = first(total.band - wanted);
  const Range window{begin, begin + wanted};
  // Compute the output position of each part first, so that threads need not wait for each other.
  std::vector<Cursor> cursors(parts + 1);
  for (int part = 0; part < parts; ++part) {
    const int64_t band_end = cursors[part].band + counts[part].band;
    const int64_t taken = counts[part].higher + overlap(window, {cursors[part].band, band_end});
    cursors[part + 1] = {cursors[part].out + taken, band_end};
  }
  engine.parallel.run(parts, [&](int part) {
    Cursor at = cursors[part];
    runs(part, [&](int64_t base, const uint32_t* run_indices, const uint32_t* bits, int64_t n) {
      const int64_t end = cursors[part + 1].out;
      if (wanted == total.band) {
        write_all_above(base, run_indices, bits, n, thresholds.lower, end, &at, engine.loops,
                        indices, values);
      } else {
        write_run(base, run_indices, bits, n, thresholds, window, end, &at, indices, values);
      }
    });
  });
}

auto runs_of_candidates(const std::vector<Candidates>& parts) {
  return [&parts](int part, auto&& work) {
    const Candidates& c = parts[part];
    work(c.range.begin, c.indices, c.bits, c.count);
  };
}

// Reads runs from the source, for a band that candidates do not cover.
auto runs_of_source(const Source& source, int64_t n, int parts, int32_t lower,
                    const InnerLoops& loops) {
  return [&source, n, parts, lower, &loops](int part, auto&& work) {
    const Range range = part_of(n, parts, part);
    uint32_t indices[kBlock + kSlack], bits[kBlock + kSlack];
    for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
      const int64_t length = std::min(kBlock, range.end - begin);
      const int64_t found =
          loops.filter(source.block(begin, length), length, lower, 0, indices, bits);
      work(begin, indices, bits, found);
    }
  };
}

// Writes all candidates above the k-th key, and the first candidates equal to it.
template <class Index>
void write_largest(const std::vector<Candidates>& parts, int64_t k, const Engine& engine,
                   Index* indices, float* values) {
  write_chosen(
      runs_of_candidates(parts), static_cast<int>(parts.size()), k,
      largest(nth_key(parts, k, engine)), [](int64_t) { return int64_t{0}; }, engine, indices,
      values);
}

// Writes the selection if the band contains all elements that are not higher. All higher elements
// are candidates, and their indices determine the position of the window, so that only the window
// is read.
template <class Index, class First>
void write_around(const Source& source, const std::vector<Candidates>& parts, int64_t n, int64_t k,
                  int32_t upper, const First& first, const InnerLoops& loops, Index* indices,
                  float* values) {
  int64_t wanted = k, out = 0;
  for (const Candidates& c : parts) wanted -= loops.count(c.bits, c.count, upper);
  // The window's next element has index `cursor` plus the number of higher elements before it.
  int64_t cursor = first(n - k);
  const auto put = [&](int64_t index, float value) {
    indices[out] = static_cast<Index>(index);
    values[out++] = value;
  };
  const auto take_until = [&](int64_t end) {
    for (int64_t length; wanted > 0 && cursor < end; cursor += length, wanted -= length) {
      length = std::min({wanted, end - cursor, kBlock});
      const float* x = source.block(cursor, length);
      for (int64_t i = 0; i < length; ++i) put(cursor + i, x[i]);
    }
  };
  for (const Candidates& c : parts) {
    for (int64_t i = 0; i < c.count; ++i) {
      if (static_cast<int32_t>(c.bits[i] & kKeyMask) <= upper) continue;
      const int64_t higher = c.range.begin + c.indices[i];
      take_until(higher);
      put(higher, float_of(c.bits[i]));
      cursor += wanted > 0;
    }
  }
  take_until(n);
}

}  // namespace

template <class Index>
void exact_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
                 float* values) {
  if (k == 0) return;
  const int32_t above = sampled_threshold(source, n, k, kSafe, engine);
  std::vector<Candidates> parts = collect(source, n, k, above, nullptr, engine);
  if (total_count(parts) < k) parts = collect(source, n, k, kEverything, nullptr, engine);
  write_largest(parts, k, engine, indices, values);
}

template <class Index>
void dgc_top_k(const Source& source, int64_t n, int64_t k, const Engine& engine, Index* indices,
               float* values) {
  if (k == 0) return;
  int32_t above = sampled_threshold(source, n, k, 0.0, engine);
  std::vector<Candidates> parts = collect(source, n, k, above, nullptr, engine);
  for (int lowerings = 0; total_count(parts) < k; ++lowerings) {
    // A few non-zeros may be far below the threshold, so collect all elements after some steps.
    const bool goes_on = lowerings < kMostLowerings && above > 0;
    above = goes_on ? static_cast<int32_t>(key_of(0.8f * float_of(static_cast<uint32_t>(above))))
                    : kEverything;
    parts = collect(source, n, k, above, nullptr, engine);
  }
  write_largest(parts, k, engine, indices, values);
}

template <class Index>
void ms_top_k(const Source& source, int64_t n, int64_t k, int steps, uint64_t seed,
              const Engine& engine, Index* indices, float* values) {
  if (k == 0) return;
  // Collect one element more than selected, because the search uses the (k+1)-th largest.
  const int64_t wanted = std::min(k + 1, n);
  const int32_t above = sampled_threshold(source, n, wanted, kSafe, engine);
  Statistics statistics;
  std::vector<Candidates> parts = collect(source, n, wanted, above, &statistics, engine);
  // Pass no statistics to a second pass, which would count all elements twice.
  if (total_count(parts) < wanted) parts = collect(source, n, wanted, kEverything, nullptr, engine);
  // Check the sum as well, because the sum of large finite values may be infinite.
  if (statistics.max >= kInfinityKey || !std::isfinite(statistics.sum)) {
    return write_largest(parts, k, engine, indices, values);
  }

  const float next = float_of(nth_key(parts, wanted, engine));
  const float mean = static_cast<float>(statistics.sum / static_cast<double>(n));
  const Thresholds found = ms_thresholds(mean, float_of(statistics.max), next, k, n, steps);
  const auto first = [&](int64_t spare) {
    return static_cast<int64_t>(random_below(static_cast<uint64_t>(spare) + 1, seed));
  };
  const int part_count = static_cast<int>(parts.size());
  const bool complete = std::all_of(parts.begin(), parts.end(),
                                    [&](const Candidates& c) { return found.lower >= c.above; });
  if (complete) {
    write_chosen(runs_of_candidates(parts), part_count, k, found, first, engine, indices, values);
  } else if (found.lower == kEverything) {
    write_around(source, parts, n, k, found.upper, first, engine.loops, indices, values);
  } else {
    const auto runs = runs_of_source(source, n, part_count, found.lower, engine.loops);
    write_chosen(runs, part_count, k, found, first, engine, indices, values);
  }
}

template void exact_top_k(const Source&, int64_t, int64_t, const Engine&, int32_t*, float*);
template void exact_top_k(const Source&, int64_t, int64_t, const Engine&, int64_t*, float*);
template void dgc_top_k(const Source&, int64_t, int64_t, const Engine&, int32_t*, float*);
template void dgc_top_k(const Source&, int64_t, int64_t, const Engine&, int64_t*, float*);
template void ms_top_k(const Source&, int64_t, int64_t, int, uint64_t, const Engine&, int32_t*,
                       float*);
template void ms_top_k(const Source&, int64_t, int64_t, int, uint64_t, const Engine&, int64_t*,
                       float*);

}  // namespace tfposeidon
