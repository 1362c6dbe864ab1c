// Measures how fast one thread copies the records of a file in random order into one buffer.
//
//   random_records FILE RECORD_BYTES RECORDS BATCH PASSES
//
// Prints records per second, one line for each pass.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int count, char** arguments) {
  if (count != 6) return 2;
  size_t bytes = strtoull(arguments[2], NULL, 10), records = strtoull(arguments[3], NULL, 10);
  size_t batch = strtoull(arguments[4], NULL, 10), loops = strtoull(arguments[5], NULL, 10);
  int file = open(arguments[1], O_RDONLY);
  const char* data = mmap(NULL, bytes * records, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
  char* buffer = aligned_alloc(64, (bytes * batch + 63) / 64 * 64);
  size_t* order = malloc(records * sizeof *order);
  if (file < 0 || data == MAP_FAILED || !buffer || !order) return 1;
  uint64_t random = 88172645463325252u;
  for (size_t i = 0; i < records; ++i) order[i] = i;
  for (size_t pass = 0; pass < loops; ++pass) {
    for (size_t i = records; i-- > 1;) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      size_t j = random % (i + 1), kept = order[i];
      order[i] = order[j], order[j] = kept;
    }
    double begin = now_s();
    for (size_t i = 0; i < records; ++i)
      memcpy(buffer + i % batch * bytes, data + order[i] * bytes, bytes);
    printf("%.1f\n", (double)records / (now_s() - begin));
    fflush(stdout);
  }
  return 0;
}
