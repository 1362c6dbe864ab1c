// Makes the page tables of a mapping at once. Otherwise a process that reads a pool for the first
// time would stop at every 16 pages, which is what the kernel maps around a page fault.
#include <stdint.h>
#include <sys/mman.h>
#include <sys/vfs.h>

// Constants of linux/magic.h and linux/mman.h, which the headers of older systems lack.
enum { TMPFS = 0x01021994, POPULATE_READ = 22, POPULATE_WRITE = 23 };

// Returns whether a folder lies in a tmpfs, whose files are in memory and nowhere else.
__attribute__((visibility("default"))) int64_t in_memory(const char* path) {
  struct statfs about;
  return !statfs(path, &about) && (unsigned long)about.f_type == TMPFS;
}

// Makes page tables for reading, or for writing. `begin` and `bytes` are multiples of a page.
// Returns whether the kernel could, which it can since Linux 5.14.
__attribute__((visibility("default"))) int64_t map_pages(void* begin, int64_t bytes,
                                                         int64_t write) {
  return !madvise(begin, (size_t)bytes, write ? POPULATE_WRITE : POPULATE_READ);
}
