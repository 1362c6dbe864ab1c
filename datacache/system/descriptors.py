"""Manages descriptors of files and folders, each closed by its only owner, and locks on them.

A `flock` lock, or an open-file-description lock, is held until every descriptor of the open file is
closed. A forked child inherits such descriptors, and would hold its parent's locks after the parent
was killed. A child therefore closes descriptors for locks as soon as it starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

from typing_extensions import override

# Hold this lock during a fork, so that no file is open but not yet registered. It is reentrant,
# because a signal handler may fork while this thread is opening a file.
_guard = threading.RLock()
_for_locks: set[Descriptor] = set()


class Owner(ABC):
    """Object that owns descriptors, mappings or threads, and releases them in `close`."""

    @abstractmethod
    def close(self) -> None:
        """Releases all owned resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Descriptor(Owner):
    """Open file or folder; only the first `close` has an effect."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Returns the number of the descriptor, or -1 once it is closed."""
        return self._number

    @override
    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


@contextlib.contextmanager
def closed_on_fork(path: str, flags: int, folder: int | None = None) -> Iterator[Descriptor]:
    """Opens a file for locks; closes it at the end of the context and in forked children."""
    _register()
    with _guard:
        handle = Descriptor(os.open(path, flags | os.O_CLOEXEC, dir_fd=folder))
        _for_locks.add(handle)
    try:
        yield handle
    finally:
        with _guard:
            _for_locks.discard(handle)
            handle.close()


def lock_byte(handle: Descriptor, index: int, wait: bool = False, shared: bool = False) -> bool:
    """Locks one byte of a file by an open-file-description lock; returns whether it is locked."""
    # The locked byte need not exist, so a file of any size has a lock for each sample.
    request = _request(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, index)
    try:
        fcntl.fcntl(handle.fileno(), fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_byte_locked(handle: Descriptor, index: int) -> bool:
    """Returns whether another open file description has locked a byte of a file."""
    answer = fcntl.fcntl(handle.fileno(), fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, index))
    return struct.unpack_from("h", answer) != (fcntl.F_UNLCK,)


def _request(kind: int, index: int) -> bytes:
    # The fields of a `struct flock` are type, whence, start, length and pid, which must be 0.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, index, 1, 0)


@functools.cache
def _register() -> None:
    # Register at the first use, because imports must have no side effects.
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_all
    )


def _close_all() -> None:
    for handle in _for_locks:
        handle.close()
    _for_locks.clear()
    _guard.release()
