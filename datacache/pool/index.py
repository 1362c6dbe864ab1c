"""Offsets of records, stored with their samples for all processes of a node and later jobs."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.system.access import Directory
from datacache.system.descriptors import Descriptor, closed_on_fork, lock_byte
from datacache.system.room import means_full, reserve

ENTRY_BYTES = 16
"""Bytes of an offset and a length."""


class Index:
    """The `index` file of a store, shared by all processes.

    `entries` has offset and length of each record in its file, `[records, 2]` int64. No record
    starts at 0, which marks an unknown offset.
    """

    def __init__(self, folder: Path, records: int) -> None:
        self._folder = folder
        size = records * ENTRY_BYTES
        with self._open() as handle:
            try:
                # Both do nothing for a complete file, and complete the file of a killed process.
                os.ftruncate(handle.fileno(), size)
                reserve(handle, 0, size)
            except OSError as error:
                if not means_full(error):
                    raise
                raise NoRoomError(
                    f"A record index needs {size} bytes. Received: {folder}, without this space."
                ) from error
            self.entries = np.ndarray((records, 2), np.int64, mmap.mmap(handle.fileno(), size))

    @contextlib.contextmanager
    def locked_part(self, part: int) -> Iterator[None]:
        """Locks a part of the index against concurrent searches for its records."""
        with contextlib.ExitStack() as stack:
            # If the store has been removed, there is no lock, and each process searches on its own.
            with contextlib.suppress(FileNotFoundError):
                lock_byte(stack.enter_context(closed_on_fork(self._open)), part, wait=True)
            yield

    def _open(self) -> Descriptor:
        with Directory(self._folder, "removed") as directory:
            return directory.open("index", make=True)
