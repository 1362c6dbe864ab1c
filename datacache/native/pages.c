// Creates the page tables of a mapping in one call. Otherwise a process that reads a store for the
// first time would have a page fault every 16 pages, because the kernel maps 16 pages per fault.
#include <stdint.h>
#include <sys/mman.h>

// This constant of linux/mman.h is missing in the headers of older systems.
enum { POPULATE_READ = 22 };

// Creates page tables for reading. `begin` and `bytes` are multiples of the page size. Returns 0 if
// the kernel does not support the call (before Linux 5.14).
__attribute__((visibility("default"))) int64_t map_pages(void* begin, int64_t bytes) {
  return !madvise(begin, (size_t)bytes, POPULATE_READ);
}
