"""Offsets of records, kept beside a pool: one process finds them for its node and later jobs."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.pool.folder import lock_byte, lock_folder
from datacache.system.access import PRIVATE, Access, Directory
from datacache.system.forks import closed_on_fork
from datacache.system.room import means_full, reserve

ENTRY_BYTES = 16
"""Bytes of an offset and a length."""


class Index:
    """The `index` file of a pool.

    Attributes:
      entries: Offset and length of each record in its file, `[records, 2]` int64, shared by all
        processes; 0, where no record begins, says that the offset is not known yet.

    Raises:
      CacheError: If the file is a link, belongs to another user, or others can write it.
      NoRoomError: If there is no room for it.
    """

    def __init__(self, folder: Path, records: int, access: Access = PRIVATE) -> None:
        self._folder, self._access = folder, access
        size = records * ENTRY_BYTES
        with Directory(folder, access) as directory, lock_folder(directory):
            # Made under the lock: another member of a group would find a new file closed until its
            # group and mode are set.
            os.close(directory.open("index", make=True))
        with closed_on_fork(self._open) as handle:
            try:
                # Both change nothing where the file is complete, and complete what a kill has left.
                os.ftruncate(handle, size)
                reserve(handle, 0, size)
            except OSError as error:
                if not means_full(error):
                    raise
                raise NoRoomError(
                    f"An index needs {size} bytes. Received: {folder}, without them."
                ) from error
            self.entries = np.ndarray((records, 2), np.int64, mmap.mmap(handle, size))

    @contextlib.contextmanager
    def locked_part(self, part: int) -> Iterator[None]:
        """Locks a part of the index: nobody else, in whatever process, looks for its records."""
        with contextlib.ExitStack() as stack:
            # If somebody has removed the pool since, there is no lock, and each looks by itself.
            with contextlib.suppress(FileNotFoundError):
                handle = stack.enter_context(closed_on_fork(self._open))
                lock_byte(handle, part, wait=True)
            yield

    def _open(self) -> int:
        with Directory(self._folder, self._access) as directory:
            return directory.open("index", make=True)
