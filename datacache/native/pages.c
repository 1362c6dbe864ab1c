// Makes the entries of page tables for a mapping at once: a process that maps a pool would else
// stop at every 16 pages.
#include <stdint.h>
#include <sys/mman.h>
#include <sys/vfs.h>

enum { TMPFS = 0x01021994, POPULATE_READ = 22, POPULATE_WRITE = 23 };

// Returns whether a folder is kept in memory, and nowhere else.
__attribute__((visibility("default"))) int64_t in_memory(const char* path) {
  struct statfs about;
  return !statfs(path, &about) && (unsigned long)about.f_type == TMPFS;
}

// `begin` and `bytes` are multiples of a page, and it is written to unless it only is to be read;
// returns whether the kernel could, which it can since Linux 5.14.
__attribute__((visibility("default"))) int64_t map_pages(void* begin, int64_t bytes,
                                                         int64_t write) {
  return !madvise(begin, (size_t)bytes, write ? POPULATE_WRITE : POPULATE_READ);
}
