// Copies records in any order into a batch, past the caches.
//
// A batch is larger than what caches keep, and is read elsewhere: storing it the usual way would read each line of it
// first, and push out what is in use. See docs/results.md for what that makes of a batch.
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { LINE = 64, AHEAD = 1024, SMALL = 4096 };

static void copy(char *into, const char *from, size_t bytes) {
#if defined(__SSE2__)
  size_t head = -(uintptr_t)into % LINE;
  if (bytes >= SMALL) {
    memcpy(into, from, head);
    into += head, from += head, bytes -= head;
    for (; bytes >= LINE; into += LINE, from += LINE, bytes -= LINE) {
      _mm_prefetch(from + AHEAD, _MM_HINT_T0);
      for (int part = 0; part < LINE; part += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(into + part), _mm_loadu_si128((const __m128i *)(from + part)));
    }
  }
#endif
  memcpy(into, from, bytes);
}

// into[i] = records[places[i]] for records of so many bytes.
__attribute__((visibility("default"))) void gather_records(char *into, const char *records, int64_t bytes,
                                                           const int64_t *places, int64_t count) {
  for (int64_t i = 0; i < count; ++i) copy(into + i * bytes, records + places[i] * bytes, (size_t)bytes);
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
