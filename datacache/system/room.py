"""Free space for stores on disks and in memory, and its reservation."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from datacache.from_tfposeidon import available_memory, is_memory

STEP_BYTES = 2**26
"""Bytes that are reserved at a time. Large enough to be fast on a file system, and small enough to
notice in time if other processes use up the memory."""

SMALL_FILES_BYTES = 2**16
"""Bytes of a store besides its samples: a few pages for each of its small files."""


def free_bytes(path: Path) -> int:
    """Returns the bytes that a store may use in a file system, or in memory if it lies there."""
    while not path.exists():
        path = path.parent
    free = max(0, shutil.disk_usage(path).free - SMALL_FILES_BYTES)
    return min(free, available_memory()) if is_memory(path.stat().st_dev) else free


def reserve(handle: int, offset: int, size: int) -> None:
    """Reserves space for a part of a file.

    A process that writes into a hole of a sparse file through a mapping is killed if the disk is
    full (SIGBUS). For a file in memory that exceeds the available memory, the kernel kills
    processes, so available memory is checked before each step.
    """
    in_memory = is_memory(os.fstat(handle).st_dev)
    room = os.fstatvfs(handle)
    # If a file system does not support allocation, the C library writes zeros until it is full.
    if size > STEP_BYTES and size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for begin in range(offset, offset + size, STEP_BYTES):
        step = min(STEP_BYTES, offset + size - begin)
        if in_memory and not _is_allocated(handle, begin, step) and step > available_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(handle, begin, step)


def means_full(error: OSError) -> bool:
    """Returns whether an error means that the file system or its owner's quota is full.

    Example:
      >>> means_full(OSError(errno.ENOSPC, "")), means_full(OSError(errno.EACCES, ""))
      (True, False)
    """
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def _is_allocated(handle: int, offset: int, size: int) -> bool:
    """Returns whether a file in memory has all these pages."""
    return os.lseek(handle, offset, os.SEEK_HOLE) >= offset + size
