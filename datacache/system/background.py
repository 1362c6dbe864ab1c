"""Work on a background thread during the setup of a job."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from typing_extensions import override

from datacache import native

STEP_BYTES = 2**24
"""Bytes of one step: some milliseconds, in which no other thread can map or unmap memory."""


class BackgroundSteps(threading.Thread):
    """Daemon thread that takes steps until all are done or it is closed.

    Example:
      >>> done = []
      >>> steps = BackgroundSteps(done.append(i) for i in range(3))
      >>> steps.join()
      >>> done
      [0, 1, 2]
    """

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


def populate_page_tables(mappings: Sequence[mmap.mmap], new: bool = False) -> Iterator[None]:
    """Creates the page tables of mappings, one step for each element of the iterator.

    A process that opens a warm store finds its pages in memory, but has no page tables for them,
    and none for its batches. A page fault at the first access of each page would nearly double the
    time of the first epoch. The iterator ends early without support by the kernel or the library.
    """
    for pages in (np.frombuffer(mapping, np.uint8) for mapping in mappings):
        for begin in range(0, len(pages), STEP_BYTES):
            if not native.populate_pages(pages[begin : begin + STEP_BYTES], new):
                return
            yield
