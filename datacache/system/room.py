"""Measures, budgets and reserves free space for stores on disks and in memory."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from datacache.from_tfposeidon import available_memory, is_memory, parse_share, parse_size
from datacache.system.descriptors import Descriptor

STEP_BYTES = 2**26
"""Number of bytes that are reserved at a time: large enough to be fast on a file system, and small
enough to notice in time if other processes use up the memory."""
OVERHEAD_BYTES = 2**16
"""Number of bytes that a store may use besides its samples: a few pages for header and padding."""


def budget_bytes(budget: int | str, free: int) -> int:
    """Returns how many bytes a budget allows if `free` bytes are free."""
    text = str(budget)
    try:
        share, size_bytes = (parse_share(text), 0.0) if "%" in text else (0.0, parse_size(text))
    except ValueError:
        share = size_bytes = 0.0
    if not share and not size_bytes:
        raise ValueError(
            '`budget` must be a size above 0: bytes (10**9), "20GB" (powers of ten), "16GiB" '
            f'(powers of two) or a share of the free space ("80%"). Received: budget={budget!r}'
        )
    # Round the share, because 0.29 * 100 is slightly less than 29.
    return min(round(share * free + size_bytes), free)


def free_bytes(path: Path) -> int:
    """Returns how many bytes a new store may use in the file system of `path`, or in memory."""
    while not path.exists():
        path = path.parent
    free = max(0, shutil.disk_usage(path).free - OVERHEAD_BYTES)
    return min(free, available_memory()) if is_memory(path.stat().st_dev) else free


def reserve(file: Descriptor, offset: int, size: int) -> None:
    """Reserves space for a part of a file; raises `OSError` if disk or memory is full."""
    # Writing into a hole of a sparse file on a full disk kills the process (SIGBUS). For a file in
    # memory, the kernel kills processes, so available memory is checked before each step.
    handle = file.fileno()
    in_memory = is_memory(os.fstat(handle).st_dev)
    room = os.fstatvfs(handle)
    # Without support for allocation, the C library writes zeros until the disk is full.
    if size > STEP_BYTES and size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for begin in range(offset, offset + size, STEP_BYTES):
        step = min(STEP_BYTES, offset + size - begin)
        is_allocated = in_memory and os.lseek(handle, begin, os.SEEK_HOLE) >= begin + step
        if in_memory and not is_allocated and step > available_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(handle, begin, step)


def means_full(error: OSError) -> bool:
    """Returns whether an error means that the file system or its owner's quota is full."""
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
