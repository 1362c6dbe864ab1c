"""Where records begin, kept beside a pool: one process of a node finds it out for all, and for later jobs."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.pool.folder import lock, lock_byte
from datacache.system.access import PRIVATE, Access, Directory
from datacache.system.forks import unshared
from datacache.system.room import reserve, says_full

ENTRY = 16
"""Bytes of an offset and a length."""


class Index:
    """The `index` file of a pool.

    Attributes:
      entries: Offset and length of each record, `[records, 2]` int64; an offset of 0 is not known yet.

    Args:
      folder: Of the pool.
      records: How many there are.
      access: Who may get at it; that of the pool.

    Raises:
      CacheError: If the file is a link, or somebody else's, or others get at it.
      NoRoomError: If there is no room for it.
    """

    def __init__(self, folder: Path, records: int, access: Access = PRIVATE) -> None:
        self._folder, self._access = folder, access
        size = records * ENTRY
        with Directory(folder, access) as directory, lock(directory):
            # A new file is a group's only once its mode is set.
            os.close(directory.open("index", make=True))
        with unshared(self._open) as handle:
            try:
                # Also what is left of one.
                os.ftruncate(handle, size)
                reserve(handle, 0, size)
            except OSError as error:
                if not says_full(error):
                    raise
                raise NoRoomError(
                    f"An index needs {size} bytes. Received: {folder}, without them."
                ) from error
            self.entries = np.ndarray((records, 2), np.int64, mmap.mmap(handle, size))

    @contextlib.contextmanager
    def alone(self, part: int) -> Iterator[None]:
        """Within it nobody else, in whatever process, looks for the records of that part."""
        with contextlib.ExitStack() as stack:
            # Without the pool, which somebody has removed since, each looks by itself.
            with contextlib.suppress(FileNotFoundError):
                lock_byte(stack.enter_context(unshared(self._open)), part, wait=True)
            yield

    def _open(self) -> int:
        with Directory(self._folder, self._access) as directory:
            return directory.open("index", make=True)
