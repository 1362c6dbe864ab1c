// Reads a part of a file in one call. Python makes four system calls and releases the GIL at each,
// so that most of many reading threads would wait for the GIL.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

// Reads up to `bytes` bytes from `offset`. Returns the number of bytes read, or -1 with the cause
// in errno. Stores the size of the file after the read, its modification time (ns), its status
// change time (ns) and its inode number in `about`.
__attribute__((visibility("default"))) int64_t read_file(const char* path, int64_t offset,
                                                         int64_t bytes, char* into,
                                                         int64_t* about) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  int64_t done = 0;
  while (done < bytes) {
    // The kernel may read fewer bytes than requested, and at most 2 GiB in one call.
    const ssize_t count = pread(file, into + done, (size_t)(bytes - done), (off_t)(offset + done));
    // A signal interrupted the call before it read any bytes. Retry, as Python does.
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (count < 0) done = -1;
      break;
    }
    done += count;
  }
  struct stat found;
  if (done >= 0 && fstat(file, &found) < 0) done = -1;
  if (done >= 0) {
    about[0] = (int64_t)found.st_size;
    about[1] = (int64_t)found.st_mtim.tv_sec * 1000000000 + found.st_mtim.tv_nsec;
    about[2] = (int64_t)found.st_ctim.tv_sec * 1000000000 + found.st_ctim.tv_nsec;
    about[3] = (int64_t)found.st_ino;
  }
  // Restore errno, which `close` may change.
  const int problem = errno;
  close(file);
  errno = problem;
  return done;
}

// Updates a CRC-32C, the checksum of TFRecord files.
static uint32_t crc32c_in_c(uint32_t checksum, const char* from, int64_t bytes) {
  for (; bytes; ++from, --bytes) {
    checksum ^= (uint8_t)*from;
    for (int bit = 0; bit < 8; ++bit) checksum = checksum >> 1 ^ (0x82f63b78 & -(checksum & 1));
  }
  return checksum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_of_words(uint32_t checksum,
                                                                  const char* from, int64_t words) {
  uint64_t wide = checksum, word;
  for (; words; from += sizeof word, --words) {
    memcpy(&word, from, sizeof word);
    wide = _mm_crc32_u64(wide, word);
  }
  return (uint32_t)wide;
}
#endif

// Returns the CRC-32C of `bytes` bytes.
__attribute__((visibility("default"))) int64_t crc32c(const char* from, int64_t bytes) {
  uint32_t checksum = 0xffffffff;
  int64_t words = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) words = bytes / 8;
  checksum = crc32c_of_words(checksum, from, words);
#endif
  return (uint32_t)~crc32c_in_c(checksum, from + 8 * words, bytes - 8 * words);
}
