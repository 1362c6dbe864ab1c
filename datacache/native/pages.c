// Makes the page tables of a mapping at once. Otherwise a process that reads a pool for the first
// time would stop at every 16 pages, which is what the kernel maps around a page fault.
#include <stdint.h>
#include <sys/mman.h>

// Constants of linux/mman.h, which the headers of older systems lack.
enum { POPULATE_READ = 22, POPULATE_WRITE = 23 };

// Makes page tables for reading, or for writing. `begin` and `bytes` are multiples of a page.
// Returns whether the kernel could, which it can since Linux 5.14.
__attribute__((visibility("default"))) int64_t map_pages(void* begin, int64_t bytes,
                                                         int64_t write) {
  return !madvise(begin, (size_t)bytes, write ? POPULATE_WRITE : POPULATE_READ);
}
