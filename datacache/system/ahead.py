"""What is done on a thread of its own while the job gets ready."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from datacache import native

AT_ONCE = 2**24
"""Bytes of one step: some milliseconds, for which nobody else can map or unmap memory in this process."""


class Ahead(threading.Thread):
    """Takes steps on a thread of its own, until all are done or it is closed.

    Args:
      steps: Each is done when the iterator gives the next.
    """

    def __init__(self, steps: Iterable[None]) -> None:
        super().__init__(name="datacache ahead", daemon=True)
        self._steps, self._ended = steps, False
        self.start()

    def run(self) -> None:
        for _ in self._steps:
            if self._ended:
                return

    def close(self) -> None:
        """Ends it, whatever is left to do."""
        self._ended = True
        self.join()


def mapped(mappings: Sequence[mmap.mmap], new: bool = False) -> Iterator[None]:
    """Makes the page tables of mappings, step by step.

    A process that opens a warm pool has its pages in memory, but no way to them, and none for its batches: an epoch
    that finds each of them for the first time takes nearly twice the time.

    Args:
      mappings: From their beginnings.
      new: Whether they are new memory, to be written; otherwise nothing is written.
    """
    for pages in (np.frombuffer(mapping, np.uint8) for mapping in mappings):
        for begin in range(0, len(pages), AT_ONCE):
            if not native.map_pages(pages[begin : begin + AT_ONCE], new):
                return
            yield
