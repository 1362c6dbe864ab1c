"""Long lists of samples, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

IN_FLIGHT = 4
"""Windows, or batches, that are filled at a time: while one is decoded, others are read."""
WINDOW_SAMPLES = 64
"""Samples that are filled together: enough that Python is not what counts."""


def windows(samples: np.ndarray, size: int = WINDOW_SAMPLES) -> list[np.ndarray]:
    """Parts of even length, at most `size`."""
    return np.array_split(samples, -(-len(samples) // size)) if len(samples) else []


def done_in_windows(work: Callable[[np.ndarray], Any], samples: np.ndarray) -> Iterator[int]:
    """Calls `work(window)` for all samples; says of each window, once it is done, how many it had."""
    parts = windows(samples)
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="datacache") as threads:
        for part, _ in zip(parts, threads.map(work, parts), strict=True):
            yield len(part)
