"""Runs work on threads: in windows, and in the background during the setup of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from typing_extensions import override

from datacache import native

IN_FLIGHT = 4
"""Number of windows or batches filled concurrently: some are read while another is decoded."""
WINDOW_SAMPLES = 64
"""Number of samples filled together: enough to amortize the Python overhead per window."""
STEP_BYTES = 2**24
"""Number of bytes of one step. It takes some milliseconds, in which no other thread can map or
unmap memory."""


def windows(samples: np.ndarray, size: int = WINDOW_SAMPLES) -> list[np.ndarray]:
    """Splits samples into windows of nearly equal size, each of at most `size` samples."""
    return np.array_split(samples, -(-len(samples) // size)) if len(samples) else []


def done_in_windows(work: Callable[[np.ndarray], Any], samples: np.ndarray) -> Iterator[int]:
    """Runs work for all samples on a few threads; yields the size of each finished window."""
    parts = windows(samples)
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="datacache") as threads:
        for part, _ in zip(parts, threads.map(work, parts), strict=True):
            yield len(part)


class BackgroundSteps(threading.Thread):
    """Daemon thread that takes steps until all are done or it is closed."""

    def __init__(self, steps: Iterable[None]) -> None:
        super().__init__(name="datacache background", daemon=True)
        self._steps, self._ended = steps, False
        self.start()

    @override
    def run(self) -> None:
        for _ in self._steps:
            if self._ended:
                return

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._ended = True
        self.join()


def populate_page_tables(parts: Sequence[np.ndarray], new: bool = False) -> Iterator[None]:
    """Creates the page tables of parts of mappings in steps; `new` prepares them for writing.

    The iterator ends early if the kernel or the library does not support `populate_pages`.
    """
    # A process that opens a warm store finds its pages in memory, but has no page tables for them
    # or for its batches. A page fault at the first access to each page would nearly double the time
    # of the first epoch.
    for pages in parts:
        for begin in range(0, len(pages), STEP_BYTES):
            if not native.populate_pages(pages[begin : begin + STEP_BYTES], new):
                return
            yield
