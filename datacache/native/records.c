// Copies records in any order into a batch with streaming stores, and computes their checksums in
// the same pass.
//
// A batch is larger than the caches, and other code reads it. Ordinary stores would first read each
// cache line of the batch, and evict other data. See docs/results/reading.md for measured times.
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Sizes in bytes of a cache line and of a part that is folded at a time, and the distance of a
// prefetch from the load. Records of fewer than SMALL bytes are copied with ordinary stores.
enum { LINE = 64, PART = 16, AHEAD = 1024, SMALL = 4096 };

static void copy(char* into, const char* from, size_t bytes) {
#if defined(__SSE2__)
  // Streaming stores must be aligned, and only whole lines are combined into one write.
  size_t head = -(uintptr_t)into % LINE;
  if (bytes >= SMALL) {
    memcpy(into, from, head);
    into += head, from += head, bytes -= head;
    for (; bytes >= LINE; into += LINE, from += LINE, bytes -= LINE) {
      // A prefetch after the end of the records is harmless, because it never faults.
      _mm_prefetch(from + AHEAD, _MM_HINT_T0);
      for (int part = 0; part < LINE; part += PART)
        _mm_stream_si128((__m128i*)(into + part), _mm_loadu_si128((const __m128i*)(from + part)));
    }
  }
#endif
  memcpy(into, from, bytes);
}

// Makes streaming stores visible before later stores, because the CPU does not order the two.
static void finish(void) {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies records[indices[i]] to into[i], for records of `bytes` bytes.
__attribute__((visibility("default"))) void gather_records(char* into, const char* records,
                                                           int64_t bytes, const int64_t* indices,
                                                           int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    copy(into + i * bytes, records + indices[i] * bytes, (size_t)bytes);
  finish();
}

// Updates a checksum. A small table is sufficient, because a CPU with carry-less multiplication has
// to process only the bytes before and after whole parts here, fewer than 32 of each.
static uint32_t byte_by_byte(uint32_t checksum, const char* from, size_t bytes) {
  static const uint32_t of_nibble[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                         0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                         0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                         0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  for (; bytes; ++from, --bytes) {
    checksum ^= (uint8_t)*from;
    checksum = checksum >> 4 ^ of_nibble[checksum & 15];
    checksum = checksum >> 4 ^ of_nibble[checksum & 15];
  }
  return checksum;
}

#if defined(__x86_64__)
// Computes the CRC-32 of zlib by carry-less multiplication. Several parts of 16 bytes are folded
// independently, because a multiplication takes several cycles, and the next one would wait for it.
// Source: Gopal, Ozturk, Guilford et al. 2009, "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction". Folding by n bits multiplies by x^(n + 32) and x^(n - 32) modulo the
// polynomial, with reflected bits.
#define NARROW __attribute__((target("pclmul,sse4.1")))
#define WIDE __attribute__((target("pclmul,sse4.1,avx2,vpclmulqdq")))

// Shifts the remainder `folded` by the number of bits that the constants `by` represent, and adds
// `next`.
NARROW static inline __m128i fold(__m128i folded, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(folded, by, 0x00),
                high = _mm_clmulepi64_si128(folded, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Reduces 128 bits to 64 bits, and these to the remainder of 32 bits by Barrett's reduction.
NARROW static inline uint32_t reduced(__m128i folded) {
  const __m128i low_words = _mm_setr_epi32(-1, 0, -1, 0),
                by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  // `polynomial` also has the quotient of x^64 by the polynomial, for Barrett's reduction.
  const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124),
                polynomial = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  folded = _mm_xor_si128(_mm_srli_si128(folded, 8), _mm_clmulepi64_si128(folded, by_128, 0x10));
  folded = _mm_xor_si128(_mm_srli_si128(folded, 4),
                         _mm_clmulepi64_si128(_mm_and_si128(folded, low_words), by_64, 0x00));
  const __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(folded, low_words), polynomial, 0x10);
  const __m128i product =
      _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), polynomial, 0x00);
  return (uint32_t)_mm_extract_epi32(_mm_xor_si128(folded, product), 1);
}

// Returns the checksum of whole parts, and copies them to `into` unless it is null. `into` must be
// aligned to 16 bytes.
NARROW static uint32_t of_parts(uint32_t checksum, char* into, const char* from, size_t bytes) {
  const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i folded = _mm_setzero_si128();
  for (size_t done = 0; done < bytes; done += PART) {
    const __m128i next = _mm_loadu_si128((const __m128i*)(from + done));
    if (into) _mm_stream_si128((__m128i*)(into + done), next);
    folded =
        done ? fold(folded, by_128, next) : _mm_xor_si128(next, _mm_cvtsi32_si128((int)checksum));
  }
  return bytes ? reduced(folded) : checksum;
}

// Does the same as `of_parts` for whole blocks of four parts.
NARROW static uint32_t of_four_parts(uint32_t checksum, char* into, const char* from,
                                     size_t bytes) {
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  __m128i folded[4] = {_mm_setzero_si128()};
  for (size_t done = 0; done < bytes; done += sizeof folded) {
    _mm_prefetch(from + done + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m128i next = _mm_loadu_si128((const __m128i*)(from + done) + part);
      if (into) _mm_stream_si128((__m128i*)(into + done) + part, next);
      folded[part] = done ? fold(folded[part], by_512, next) : next;
    }
    if (!done) folded[0] = _mm_xor_si128(folded[0], _mm_cvtsi32_si128((int)checksum));
  }
  // The four remainders form a message of four parts with the same checksum, so fold these parts.
  return bytes ? of_parts(0, NULL, (const char*)folded, sizeof folded) : checksum;
}

// Does the same as `of_parts` for whole blocks of eight parts, two in each register.
WIDE static uint32_t of_eight_parts(uint32_t checksum, char* into, const char* from, size_t bytes) {
  const __m256i by_1024 = _mm256_set_epi64x(0x14a7fe880, 0x1e88ef372, 0x14a7fe880, 0x1e88ef372);
  __m256i folded[4] = {_mm256_setzero_si256()};
  for (size_t done = 0; done < bytes; done += sizeof folded) {
    _mm_prefetch(from + done + AHEAD, _MM_HINT_T0);
    _mm_prefetch(from + done + AHEAD + LINE, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const __m256i next = _mm256_loadu_si256((const __m256i*)(from + done) + pair);
      if (into) _mm256_stream_si256((__m256i*)(into + done) + pair, next);
      const __m256i low = _mm256_clmulepi64_epi128(folded[pair], by_1024, 0x00);
      const __m256i high = _mm256_clmulepi64_epi128(folded[pair], by_1024, 0x11);
      folded[pair] = done ? _mm256_xor_si256(_mm256_xor_si256(low, high), next) : next;
    }
    if (!done)
      folded[0] =
          _mm256_xor_si256(folded[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)checksum)));
  }
  return bytes ? of_parts(0, NULL, (const char*)folded, sizeof folded) : checksum;
}

// Updates a checksum with a record, and copies the record unless `into` is null. As in zlib, the
// checksum is inverted before and after.
static uint32_t checked(uint32_t checksum, char* into, const char* from, size_t bytes, int wide) {
  uint32_t (*const of_blocks)(uint32_t, char*, const char*, size_t) =
      wide ? of_eight_parts : of_four_parts;
  // The head ends at the alignment of the widest streaming store; without a copy it is empty.
  const size_t block = (wide ? 8 : 4) * PART, ahead = -(uintptr_t)into % (2 * PART);
  const size_t head = ahead < bytes ? ahead : bytes;
  const size_t blocks = (bytes - head) / block * block,
               parts = (bytes - head - blocks) / PART * PART;
  const size_t rest = bytes - head - blocks - parts;
  char* const behind = into ? into + head + blocks : NULL;
  checksum = byte_by_byte(~checksum, from, head);
  checksum = of_blocks(checksum, into ? into + head : NULL, from + head, blocks);
  checksum = of_parts(checksum, behind, from + head + blocks, parts);
  if (into) {
    memcpy(into, from, head);
    memcpy(behind + parts, from + bytes - rest, rest);
  }
  return ~byte_by_byte(checksum, from + bytes - rest, rest);
}
#endif

// Returns the number of parts of 16 bytes that this CPU multiplies at a time: 0, 1 or 2.
__attribute__((visibility("default"))) int64_t parts_at_a_time(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq") ? 2 : 1;
#endif
  return 0;
}

// Updates checksums[i] with the bytes of records[indices[i]], and copies the bytes to into[i]
// unless `into` is null. `at_a_time` is at most the result of `parts_at_a_time`.
__attribute__((visibility("default"))) void check_records(char* into, const char* records,
                                                          int64_t bytes, const int64_t* indices,
                                                          int64_t count, uint32_t* checksums,
                                                          int64_t at_a_time) {
  for (int64_t i = 0; i < count; ++i) {
    char* const target = into ? into + i * bytes : NULL;
    const char* const record = records + indices[i] * bytes;
#if defined(__x86_64__)
    if (at_a_time) {
      checksums[i] = checked(checksums[i], target, record, (size_t)bytes, at_a_time > 1);
      continue;
    }
#endif
    (void)at_a_time;
    // Read the copy if there is one, because another process may rewrite the record concurrently.
    if (target) copy(target, record, (size_t)bytes);
    checksums[i] = ~byte_by_byte(~checksums[i], target ? target : record, (size_t)bytes);
  }
  finish();
}
