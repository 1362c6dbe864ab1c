"""Windows: long lists of samples, a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

IN_FLIGHT = 4
"""Windows, or batches, that are filled at a time: while one is decoded, others are read."""
WINDOW_SAMPLES = 64
"""Samples that are filled together: enough to make the time per window in Python small."""


def windows(samples: np.ndarray, size: int = WINDOW_SAMPLES) -> list[np.ndarray]:
    """Returns samples in windows of even size."""
    return np.array_split(samples, -(-len(samples) // size)) if len(samples) else []


def done_in_windows(work: Callable[[np.ndarray], Any], samples: np.ndarray) -> Iterator[int]:
    """Does work for all samples, on a few threads.

    Yields:
      The number of samples of each window, in order, once its work is done.
    """
    parts = windows(samples)
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="datacache") as threads:
        for part, _ in zip(parts, threads.map(work, parts), strict=True):
            yield len(part)
