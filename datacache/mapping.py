"""A file that is mapped, with page tables that are made while the job gets ready."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np

from datacache import native

AT_ONCE = 2**24
"""Bytes of one call: some milliseconds, for which nobody else can map or unmap memory in this process."""


class MappingAhead(threading.Thread):
    """Makes the page tables of a mapping on a thread of its own, where that takes no reading.

    A process that opens a warm pool has its pages in memory, but no way to them: an epoch that finds each of them for
    the first time takes nearly twice the time.

    Args:
      folder: Of the file.
      pages: What is mapped, from its beginning.
    """

    def __init__(self, folder: Path, pages: mmap.mmap) -> None:
        super().__init__(name="datacache mapping", daemon=True)
        self._pages = np.frombuffer(pages, np.uint8)
        self._ended = not native.in_memory(folder)
        self.start()

    def run(self) -> None:
        for begin in range(0, len(self._pages), AT_ONCE):
            if self._ended or not native.map_pages(self._pages[begin : begin + AT_ONCE]):
                return

    def close(self) -> None:
        """Ends it, whatever is left to do."""
        self._ended = True
        self.join()
