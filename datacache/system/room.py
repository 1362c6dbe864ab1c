"""Room for pools: how much disks and memory have, and reserving it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from datacache.from_tfposeidon import available_memory, is_memory

STEP_BYTES = 2**26
"""Bytes that are reserved at a time. Large enough for a file system to be fast; small enough that
memory which others take meanwhile is noticed before it is too late."""

SMALL_FILES_BYTES = 2**16
"""Bytes that a pool takes beside its samples: a few pages for each of its small files."""


def free_bytes(path: Path) -> int:
    """Returns the bytes that a file system, or memory if it lies there, has for a pool."""
    while not path.exists():
        path = path.parent
    free = max(0, shutil.disk_usage(path).free - SMALL_FILES_BYTES)
    return min(free, available_memory()) if is_memory(path.stat().st_dev) else free


def reserve(handle: int, offset: int, size: int) -> None:
    """Reserves room for a part of a file.

    A file with holes would end the process (SIGBUS) that writes into one through a mapping when the
    disk is full. And a file in memory that grows beyond what there is would have the kernel end
    processes, so available memory is looked at before each step.
    """
    in_memory = is_memory(os.fstat(handle).st_dev)
    room = os.fstatvfs(handle)
    # Where a file system cannot allocate, the C library writes zeros instead, until it is full.
    if size > STEP_BYTES and size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for begin in range(offset, offset + size, STEP_BYTES):
        step = min(STEP_BYTES, offset + size - begin)
        if in_memory and not _is_allocated(handle, begin, step) and step > available_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(handle, begin, step)


def means_full(error: OSError) -> bool:
    """Returns whether an error says that there is no room, in the file system or for its owner.

    Example:
      >>> means_full(OSError(errno.ENOSPC, "")), means_full(OSError(errno.EACCES, ""))
      (True, False)
    """
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def _is_allocated(handle: int, offset: int, size: int) -> bool:
    """Returns whether a file in memory has all these pages."""
    return os.lseek(handle, offset, os.SEEK_HOLE) >= offset + size
