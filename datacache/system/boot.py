"""Since when the machine runs: what is in memory, or was written and read through it, is as it was since then."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_number() -> np.uint64:
    """Another number in each boot, from 1 to 2^31 - 1; the same for all processes and containers of the machine."""
    digits = hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()
    return np.uint64(int(digits, 16) % (2**31 - 1) + 1)
