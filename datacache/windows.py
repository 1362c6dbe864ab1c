"""Windows: long lists of samples, processed a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

IN_FLIGHT = 4
"""Windows, or batches, that are filled concurrently: some are read while another is decoded."""
WINDOW_SAMPLES = 64
"""Samples that are filled together: enough to amortize the Python overhead per window."""


def windows(samples: np.ndarray, size: int = WINDOW_SAMPLES) -> list[np.ndarray]:
    """Returns samples in windows of nearly equal size."""
    return np.array_split(samples, -(-len(samples) // size)) if len(samples) else []


def done_in_windows(work: Callable[[np.ndarray], Any], samples: np.ndarray) -> Iterator[int]:
    """Runs work for all samples on a few threads; yields the sizes of finished windows."""
    parts = windows(samples)
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="datacache") as threads:
        for part, _ in zip(parts, threads.map(work, parts), strict=True):
            yield len(part)
