#include "tfposeidon/native/lib/collector.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "tfposeidon/native/lib/keys.h"

namespace tfposeidon {
namespace {

uint32_t nth_of(uint32_t* keys, int64_t n, int64_t m) {
  std::nth_element(keys, keys + (m - 1), keys + n, std::greater<uint32_t>());
  return keys[m - 1];
}

// Reduces candidates to the k largest, ties to the lowest index, in their order.
void shrink(Candidates* c, int64_t k, Buffer<uint32_t>* scratch, const InnerLoops& loops) {
  uint32_t* keys = scratch->reserve(c->count);
  for (int64_t i = 0; i < c->count; ++i) keys[i] = c->bits[i] & kKeyMask;
  const uint32_t kth = nth_of(keys, c->count, k);
  int64_t ties = k - loops.count(c->bits, c->count, static_cast<int32_t>(kth));
  int64_t kept = 0;
  for (int64_t i = 0; i < c->count; ++i) {
    const uint32_t key = c->bits[i] & kKeyMask;
    const bool tie = key == kth && ties > 0;
    // Write every candidate, and overwrite it if it is dropped, which is cheaper than a branch.
    c->bits[kept] = c->bits[i];
    c->indices[kept] = c->indices[i];
    kept += key > kth || tie;
    ties -= tie;
  }
  c->count = kept;
  c->above = static_cast<int32_t>(kth);
}

// Range (low, high] that contains the wanted key with high probability.
struct Bracket {
  int32_t low;
  int32_t high;
};

// Brackets the m-th of `total` keys by a sample at even distances; `key_at(i)` returns a key.
template <class KeyAt>
Bracket bracket(const KeyAt& key_at, int64_t total, int64_t m) {
  constexpr int64_t kSample = 1024;
  uint32_t sample[kSample];
  for (int64_t s = 0; s < kSample; ++s) sample[s] = key_at(total * s / kSample);
  const double middle = static_cast<double>(m) / static_cast<double>(total) * kSample;
  // The number of sampled keys above the m-th is about binomial; use four standard deviations.
  const double spread = 4 * std::sqrt(std::max(1.0, middle * (1 - middle / kSample))) + 4;
  const int64_t first = static_cast<int64_t>(middle - spread);
  const int64_t last = static_cast<int64_t>(middle + spread) + 1;
  const int64_t high = first < 1 ? kKeyMask : nth_of(sample, kSample, first);
  const int64_t low = last > kSample ? -1 : static_cast<int64_t>(nth_of(sample, kSample, last)) - 1;
  return {static_cast<int32_t>(low), static_cast<int32_t>(high)};
}

}  // namespace

int32_t sampled_threshold(const Source& source, int64_t n, int64_t k, double margin,
                          const Engine& engine) {
  if (n < kSmallestSampled) return kEverything;
  const Sampling plan = sampling(n, k, margin);
  if (plan.rank > plan.size()) return kEverything;
  float* sample = engine.workspace.sample.reserve(plan.size());
  const int parts = plan.lines > 2048 ? parts_for(n, engine.parallel) : 1;
  engine.parallel.run(parts, [&](int part) {
    // Prefetch each line this many steps before its use, because lines are far apart.
    constexpr int64_t kInFlight = 16;
    const int64_t end = plan.lines * (part + 1) / parts;
    for (int64_t i = plan.lines * part / parts; i < end; ++i) {
      source.prefetch(line_at(std::min(i + kInFlight, end - 1), plan.stride));
      source.line(line_at(i, plan.stride), sample + i * kLine);
    }
  });
  // Treat the sample as candidates, so that the same search finds the key of a rank.
  Candidates all;
  all.bits = reinterpret_cast<uint32_t*>(sample);
  all.count = plan.size();
  if (engine.workspace.parts.empty()) engine.workspace.parts.resize(1);
  // Subtract 1, because keys are compared by >, and keys equal to the sampled key must pass.
  return static_cast<int32_t>(nth_key({all}, plan.rank, engine)) - 1;
}

std::vector<Candidates> collect(const Source& source, int64_t n, int64_t k, int32_t above,
                                Statistics* statistics, const Engine& engine) {
  const int count = parts_for(n, engine.parallel);
  // At least k elements and 4 blocks are added between two calls of `shrink`, so that the calls
  // together cost time proportional to the pass for any data.
  const int64_t limit = 2 * k + 4 * kBlock;
  std::vector<Candidates> parts(count);
  std::vector<Statistics> partial(count);
  if (engine.workspace.parts.size() < static_cast<size_t>(count))
    engine.workspace.parts.resize(count);
  engine.parallel.run(count, [&](int part) {
    Workspace::PerPart& memory = engine.workspace.parts[part];
    Candidates c;
    c.range = part_of(n, count, part);
    const int64_t room = std::min(limit + kBlock, c.range.size()) + kSlack;
    c.indices = memory.indices.reserve(room);
    c.bits = memory.bits.reserve(room);
    c.above = above;
    Statistics own;
    for (int64_t begin = c.range.begin; begin < c.range.end; begin += kBlock) {
      const int64_t length = std::min(kBlock, c.range.end - begin);
      const float* x = source.block(begin, length);
      if (statistics != nullptr) engine.loops.statistics(x, length, &own);
      const uint32_t base = static_cast<uint32_t>(begin - c.range.begin);
      c.count +=
          engine.loops.filter(x, length, c.above, base, c.indices + c.count, c.bits + c.count);
      if (c.count > limit) shrink(&c, k, &memory.middle, engine.loops);
    }
    parts[part] = c;
    partial[part] = own;
  });
  // Add in the order of parts, so that the order of threads has no effect.
  for (const Statistics& own : partial) {
    if (statistics == nullptr) break;
    statistics->sum += own.sum;
    statistics->max = std::max(statistics->max, own.max);
  }
  return parts;
}

int64_t total_count(const std::vector<Candidates>& parts) {
  int64_t total = 0;
  for (const Candidates& c : parts) total += c.count;
  return total;
}

uint32_t nth_key(const std::vector<Candidates>& parts, int64_t m, const Engine& engine) {
  const int64_t total = total_count(parts);
  Bracket keys{kEverything, static_cast<int32_t>(kKeyMask)};
  size_t part_at = 0;
  int64_t before = 0;
  // Calls must have ascending places.
  const auto key_at = [&](int64_t place) {
    while (place - before >= parts[part_at].count) before += parts[part_at++].count;
    return parts[part_at].bits[place - before] & kKeyMask;
  };
  if (total > kSmallestSample) keys = bracket(key_at, total, m);
  for (;;) {
    std::vector<int64_t> higher(parts.size()), inside(parts.size());
    const auto look = [&](int part) {
      const Candidates& c = parts[part];
      uint32_t* middle = engine.workspace.parts[part].middle.reserve(c.count + kSlack);
      higher[part] = engine.loops.count(c.bits, c.count, keys.high);
      inside[part] = engine.loops.between(c.bits, c.count, keys.low, keys.high, middle);
    };
    engine.parallel.run(static_cast<int>(parts.size()), look);
    const int64_t above = std::accumulate(higher.begin(), higher.end(), int64_t{0});
    const int64_t left = std::accumulate(inside.begin(), inside.end(), int64_t{0});
    if (above < m && m <= above + left) {
      uint32_t* all = engine.workspace.keys.reserve(left);
      int64_t filled = 0;
      for (size_t part = 0; part < parts.size(); filled += inside[part++]) {
        std::copy_n(engine.workspace.parts[part].middle.data(), inside[part], all + filled);
      }
      return nth_of(all, left, m - above);
    }
    // The sample was misleading. The second iteration searches all keys, and always succeeds.
    keys = {kEverything, static_cast<int32_t>(kKeyMask)};
  }
}

}  // namespace tfposeidon
