"""Room for pools: how much there is on disks and in memory, and taking it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from datacache.system.memory import available_memory, is_memory

STEP = 2**26
"""Bytes of which room is taken at a time: more than a file system needs to be fast, less than others would miss."""


def free_bytes(path: Path) -> int:
    """Room in a folder that may not exist yet: that of its file system, and no more than of memory if it lies there."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return min(free, available_memory()) if is_memory(path.stat().st_dev) else free


def reserve(handle: int, offset: int, size: int) -> None:
    """Takes the room: a file with holes would end the process that writes into one when the disk is full.

    Raises:
      OSError: If there is none, or taking it would end processes for want of memory.
    """
    in_memory = is_memory(os.fstat(handle).st_dev)
    room = os.fstatvfs(handle)
    # Where a file system cannot allocate, the C library would write until it is full.
    if size > STEP and size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for begin in range(offset, offset + size, STEP):
        step = min(STEP, offset + size - begin)
        if in_memory and not _is_taken(handle, begin, step) and step > available_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(handle, begin, step)


def says_full(error: OSError) -> bool:
    """Whether there is no room, for a file or for its owner."""
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def _is_taken(handle: int, offset: int, size: int) -> bool:
    """Whether a file in memory has all these pages."""
    return os.lseek(handle, offset, os.SEEK_HOLE) >= offset + size
