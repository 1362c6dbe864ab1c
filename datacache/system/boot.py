"""Boots of the machine: memory and the page cache do not change on their own during one boot."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_number() -> np.uint64:
    """Returns a number from 1 to 2^31 - 1 that, with high probability, differs between boots.

    It is equal in all processes and containers of the machine, which share the kernel. It is never
    0, which represents "in no boot", and fits into the upper bits of a sample's word.
    """
    digits = hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()
    return np.uint64(int(digits, 16) % (2**31 - 1) + 1)
