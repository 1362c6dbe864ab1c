// Reads a part of a file in one call. Python's own way makes four system calls and lets other
// threads go first at each: of many threads that read, most would wait for the interpreter.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

// Reads up to `bytes` bytes from `offset` on. Returns how many there were, or -1 with the cause in
// errno.
__attribute__((visibility("default"))) int64_t read_file(const char* path, int64_t offset,
                                                         int64_t bytes, char* into) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  int64_t done = 0;
  while (done < bytes) {
    // The kernel may read fewer bytes than it is asked for, and at most 2 GiB in one call.
    const ssize_t count = pread(file, into + done, (size_t)(bytes - done), (off_t)(offset + done));
    // A signal came before anything was read; Python's own way tries again, too.
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (count < 0) done = -1;
      break;
    }
    done += count;
  }
  // Closing may change errno.
  const int problem = errno;
  close(file);
  errno = problem;
  return done;
}
