// Simulates a slow file system if it is preloaded: files in one folder open late, and all processes
// share one rate of bytes.
//
//   SLOW_SOURCE_FOLDER     folder of the slow files
//   SLOW_SOURCE_STATE      file that the processes share: time of the next byte, opens, bytes
//   SLOW_SOURCE_OPEN_MS    milliseconds of each open; concurrent opens do not wait for each other
//   SLOW_SOURCE_MB_S       10^6 bytes per second over all processes; 0 for no limit
//   SLOW_SOURCE_FAIL_EVERY N: each N-th open fails with EIO; 0 for none
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 1 << 16 };

struct shared {
  uint64_t next_ns, opens, bytes;
};

static struct shared* state;
static const char* folder;
static double open_ms, mb_s;
static uint64_t fail_every;
static char slow[MOST_DESCRIPTORS];

static int (*next_open)(const char*, int, ...);
static int (*next_openat)(int, const char*, int, ...);
static int (*next_close)(int);
static ssize_t (*next_read)(int, void*, size_t);
static ssize_t (*next_pread)(int, void*, size_t, off_t);

static double number(const char* name) {
  const char* value = getenv(name);
  return value ? atof(value) : 0;
}

__attribute__((constructor)) static void start(void) {
  next_open = dlsym(RTLD_NEXT, "open64");
  next_openat = dlsym(RTLD_NEXT, "openat64");
  next_close = dlsym(RTLD_NEXT, "close");
  next_read = dlsym(RTLD_NEXT, "read");
  next_pread = dlsym(RTLD_NEXT, "pread64");
  folder = getenv("SLOW_SOURCE_FOLDER");
  open_ms = number("SLOW_SOURCE_OPEN_MS");
  mb_s = number("SLOW_SOURCE_MB_S");
  fail_every = (uint64_t)number("SLOW_SOURCE_FAIL_EVERY");
  const char* path = getenv("SLOW_SOURCE_STATE");
  int file = path ? next_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  int shared = file >= 0 && ftruncate(file, sizeof *state) == 0;
  int flags = shared ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
  state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, flags, shared ? file : -1, 0);
  if (file >= 0) next_close(file);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void wait_ns(uint64_t ns) {
  struct timespec left = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
  while (nanosleep(&left, &left) && errno == EINTR) {
  }
}

static int opened(const char* path, int file) {
  struct stat about;
  if (file < 0 || file >= MOST_DESCRIPTORS || !folder || strncmp(path, folder, strlen(folder)))
    return file;
  if (fstat(file, &about) || !S_ISREG(about.st_mode)) return file;
  uint64_t count = __sync_add_and_fetch(&state->opens, 1);
  wait_ns((uint64_t)(open_ms * 1e6));
  if (fail_every && count % fail_every == 0) {
    next_close(file);
    errno = EIO;
    return -1;
  }
  slow[file] = 1;
  return file;
}

static ssize_t came(int file, ssize_t bytes) {
  if (bytes <= 0 || file < 0 || file >= MOST_DESCRIPTORS || !slow[file]) return bytes;
  int error = errno;
  __sync_add_and_fetch(&state->bytes, (uint64_t)bytes);
  if (mb_s > 0) {
    // Each read reserves the time after the reads of all processes, which share the rate.
    uint64_t cost = (uint64_t)((double)bytes / mb_s * 1e3), now, before, after;
    do {
      now = now_ns();
      before = state->next_ns;
      after = (before > now ? before : now) + cost;
    } while (!__sync_bool_compare_and_swap(&state->next_ns, before, after));
    wait_ns(after - now);
  }
  errno = error;
  return bytes;
}

#define MODE(flags)                      \
  mode_t mode = 0;                       \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list more;                        \
    va_start(more, flags);               \
    mode = va_arg(more, mode_t);         \
    va_end(more);                        \
  }

#define OPEN(name)                                     \
  int name(const char* path, int flags, ...) {         \
    MODE(flags)                                        \
    return opened(path, next_open(path, flags, mode)); \
  }
#define OPENAT(name)                                         \
  int name(int at, const char* path, int flags, ...) {       \
    MODE(flags)                                              \
    return opened(path, next_openat(at, path, flags, mode)); \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int close(int file) {
  if (file >= 0 && file < MOST_DESCRIPTORS) slow[file] = 0;
  return next_close(file);
}
ssize_t read(int file, void* into, size_t bytes) {
  return came(file, next_read(file, into, bytes));
}
ssize_t pread(int file, void* into, size_t bytes, off_t at) {
  return came(file, next_pread(file, into, bytes, at));
}
ssize_t pread64(int file, void* into, size_t bytes, off64_t at) {
  return came(file, next_pread(file, into, bytes, at));
}
