#include "tfposeidon/native/lib/norms.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace tfposeidon {
namespace {

// A thread claims this many chunks at once, because many vectors of a network are short.
constexpr int64_t kTaken = 4;

int64_t total_size(const std::vector<Span>& vectors) {
  int64_t total = 0;
  for (const Span& vector : vectors) total += vector.size;
  return total;
}

}  // namespace

Chunks chunks_of(const std::vector<Span>& vectors) {
  Chunks chunks;
  for (const Span& vector : vectors) {
    for (int64_t begin = 0; begin < vector.size; begin += kNormChunk) {
      chunks.spans.push_back({vector.begin + begin, std::min(kNormChunk, vector.size - begin)});
    }
    chunks.ends.push_back(static_cast<int64_t>(chunks.spans.size()));
  }
  return chunks;
}

void l2_norms(const std::vector<Span>& vectors, const InnerLoops& loops, const Parallel& parallel,
              float* norms) {
  const Chunks chunks = chunks_of(vectors);
  const int64_t count = static_cast<int64_t>(chunks.spans.size());
  std::vector<double> squares(count);
  std::atomic<int64_t> next{0};
  parallel.run(parts_for(total_size(vectors), parallel), [&](int) {
    for (int64_t begin; (begin = next.fetch_add(kTaken)) < count;) {
      for (int64_t i = begin; i < std::min(begin + kTaken, count); ++i) {
        squares[i] = loops.sum_of_squares(chunks.spans[i].begin, chunks.spans[i].size);
      }
    }
  });
  // Add on one thread in the order of chunks, so that the bits do not depend on other threads.
  int64_t begin = 0;
  for (size_t v = 0; v < vectors.size(); ++v) {
    double sum = 0;
    for (; begin < chunks.ends[v]; ++begin) sum += squares[begin];
    norms[v] = static_cast<float>(std::sqrt(sum));
  }
}

}  // namespace tfposeidon
