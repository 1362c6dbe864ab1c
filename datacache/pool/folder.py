"""Folders of stores: created by the first process, removed only while no process has them open."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datacache.errors import CacheError, DamagedError, NoRoomError
from datacache.pool.header import (
    HEADER,
    TAIL_BYTES,
    UNFINISHED_HEADER,
    file_tail,
    new_header,
    not_a_pool,
    open_pool_folder,
    read_checked_header,
    write_header,
)
from datacache.system.access import PRIVATE, Access, Directory
from datacache.system.forks import closed_on_fork, opened_again
from datacache.system.room import means_full, reserve

log = logging.getLogger("datacache")
SHARED_MEMORY = "/dev/shm"
LOCK_FILES = {"users", "claims"}
"""Files whose locks other processes may hold: created first, retained when a store is rebuilt, and
removed last. A lock on a replaced file would not exclude other processes."""
FILES = LOCK_FILES | {
    "lock",
    "samples",
    "words",
    "heap",
    "end",
    "index",
    UNFINISHED_HEADER,
    HEADER,
}
"""Names of all files of a store in any version."""


def default_memory(access: Access = PRIVATE) -> str:
    """Returns the folder for stores in shared memory.

    Args:
      access: Users who share the folder; by default only this user.

    Returns:
      `/dev/shm/datacache-<user id>`, or `/dev/shm/datacache-group-<group id>`.
    """
    whose = os.geteuid() if access.group is None else f"group-{access.group}"
    return f"{SHARED_MEMORY}/datacache-{whose}"


def own_memory(access: Access = PRIVATE) -> Path:
    """Returns the folder of `default_memory`, after creating it if necessary."""
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f"The store in memory needs shared memory. Received: no {SHARED_MEMORY}. Mount a tmpfs "
            "there (with Docker: --shm-size), or pass a folder as `memory`, or None to disable it."
        )
    path = Path(default_memory(access))
    Directory.create(path, access).close()
    return path


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Header and files of a new store, with the bytes of each file by name.

    The content of `files` is reserved before the store is used, that of `growing` as it fills, up
    to this limit. `header` holds values for JSON, besides format and files.
    """

    header: dict[str, Any]
    files: dict[str, int]
    growing: dict[str, int]


class Folder:
    """Folder of a store, which this process has open until it exits in any way.

    A shared lock on the file `users` marks the folder as open, and the kernel releases it with the
    process. A process that creates, opens or removes a store holds an exclusive lock on the folder
    meanwhile. If `is_only_user` is true, no other process had it open, so no operation is in
    progress.
    """

    def __init__(
        self, path: Path, make_blueprint: Callable[[], Blueprint], access: Access = PRIVATE
    ) -> None:
        self.path = Path(path)
        with _locked(lambda: Directory.create(self.path, access)) as self.directory:
            with contextlib.ExitStack() as on_error:
                self._user = self.directory.open("users", make=True)
                on_error.callback(os.close, self._user)
                self._claims = self.directory.open("claims", make=True)
                on_error.callback(os.close, self._claims)
                self.is_only_user = _has_no_users(self._user)
                # Downgrade at once: a child that is forked while the store is created inherits this
                # lock, and must not exclude others. The change is not atomic, but the folder's lock
                # blocks other requests in the meantime.
                fcntl.flock(self._user, fcntl.LOCK_SH)
                header = _read_usable_header(self.directory, self.is_only_user)
                self.header = header or _make(self.directory, make_blueprint)
                on_error.pop_all()
            # Reading through a mapping changes no times, so record when the store was last opened.
            os.utime(self._user)

    @contextlib.contextmanager
    def claim(self, indices: Iterable[int]) -> Iterator[list[bool]]:
        """Claims slots among all threads and processes; yields for each whether it was free."""
        # These locks belong to a separate open file description, so that they also exclude other
        # threads, and the kernel releases them with it. A cleaner of temporary files may have
        # removed the file's name.
        with opened_again(self._claims) as handle:
            yield [lock_byte(handle, index) for index in indices]

    def map_file(self, name: str) -> mmap.mmap:
        """Maps a whole file of the store for reading and writing, shared with other processes."""
        handle = self.directory.open(name)
        try:
            return mmap.mmap(handle, 0)
        finally:
            # The mapping has its own descriptor.
            os.close(handle)

    def close(self) -> None:
        """Ends this object's use of the store."""
        os.close(self._user)
        os.close(self._claims)
        self.directory.close()


def _read_usable_header(directory: Directory, is_only_user: bool) -> dict[str, Any] | None:
    """Returns the header of a store, or `None` if it is missing or unusable."""
    names = directory.names()
    if HEADER not in names:
        _refuse_strangers(directory, names)
        return None
    try:
        return read_checked_header(directory)
    except DamagedError as error:
        if not is_only_user:
            # Other processes have its files mapped, and would be killed if these were rebuilt.
            raise CacheError(
                f"{error.what} A process has the store open. End that process, and open the store "
                "again to rebuild it."
            ) from error
        _refuse_strangers(directory, names)
        log.warning("datacache: %s The store is rebuilt.", error.what)
        return None


def _make(directory: Directory, make_blueprint: Callable[[], Blueprint]) -> dict[str, Any]:
    """Creates a store, and removes partial files after an error; returns its header."""
    # Must precede the blueprint: remains of another store would occupy the space that it plans
    # with.
    _clear(directory, FILES - LOCK_FILES)
    try:
        return _write_files(directory, make_blueprint())
    except BaseException:
        _clear(directory, FILES - LOCK_FILES)
        raise


def _write_files(directory: Directory, blueprint: Blueprint) -> dict[str, Any]:
    """Writes the files, and only then the header, which marks the store as complete."""
    sizes = blueprint.files | blueprint.growing
    header = new_header(directory, sizes) | blueprint.header
    for name, size in sizes.items():
        _allocate(directory, name, size, file_tail(header), name in blueprint.files)
    return write_header(directory, header)


def _clear(directory: Directory, names: Iterable[str]) -> None:
    """Removes files of a store."""
    # The header must go first: remains after a kill must not be taken for a store.
    for name in sorted(names, key=lambda name: (name != HEADER, name in LOCK_FILES)):
        directory.remove(name)


def remove(path: Path) -> None:
    """Removes a store that no process has open, or the remains of one."""
    with _locked(lambda: open_pool_folder(path, closed=False)) as directory:
        _remove(directory)
    directory.close()


def _remove(directory: Directory) -> None:
    _refuse_to_remove(directory)
    users = directory.open("users", make=True)
    try:
        if not _has_no_users(users):
            raise CacheError(
                f"A store in use cannot be removed. Received: {directory.path}, which a process "
                "has open. Wait for the process, or end it."
            )
        _clear(directory, FILES)
        directory.path.rmdir()
    finally:
        os.close(users)


def _has_no_users(users: int) -> bool:
    """Returns whether no other process has the store open; if so, locks `users` exclusively."""
    return _lock_file(users, wait=False)


def _allocate(
    directory: Directory, name: str, size: int, tail: bytes, reserve_content: bool
) -> None:
    """Creates a file of `size` bytes and a tail; space for the content is reserved now or later."""
    handle = directory.open(name, make=True)
    try:
        os.ftruncate(handle, size + TAIL_BYTES)
        begin = 0 if reserve_content else size
        reserve(handle, begin, size + TAIL_BYTES - begin)
        os.pwrite(handle, tail, size)
        # Sync before the header is written: otherwise, after a power loss, there could be a header
        # without its files.
        os.fsync(handle)
    except OSError as error:
        if not means_full(error):
            raise
        raise NoRoomError(
            f"A store needs free space for its files. Received: {directory.path}, without {size} "
            "bytes. Reduce the budget, or remove other stores: python -m datacache ls"
        ) from error
    finally:
        os.close(handle)


def lock_byte(handle: int, index: int, wait: bool = False) -> bool:
    """Locks one byte of a file for an open file description; returns whether it is locked."""
    # The locked byte need not exist, so one empty file has a lock for each sample.
    # struct flock: type, whence, start, length, and a pid that must be 0 for these locks.
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def _locked(open_folder: Callable[[], Directory]) -> Iterator[Directory]:
    """Opens a folder and locks it within the context; the folder stays open after it."""
    while True:
        directory = open_folder()
        try:
            with lock_folder(directory):
                # Another process may have removed it between opening and locking: the lock of a
                # removed folder does not exclude other processes.
                if not directory.is_gone:
                    yield directory
                    return
        except BaseException:
            directory.close()
            raise
        directory.close()


@contextlib.contextmanager
def lock_folder(directory: Directory, wait: bool = True) -> Iterator[bool]:
    """Locks a folder against other processes that create, open or remove a store there."""
    # A separate open file description, with which the kernel releases the lock.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closed_on_fork(lambda: os.open(".", flags, dir_fd=directory.descriptor)) as handle:
        yield _lock_file(handle, wait)


def _lock_file(handle: int, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _refuse_strangers(directory: Directory, names: set[str]) -> None:
    if strangers := names - FILES:
        raise CacheError(
            f"A store must have a folder of its own. Received: {directory.path}, which contains "
            f"{min(strangers)!r}. Pass another folder, or empty this one."
        )


def _refuse_to_remove(directory: Directory) -> None:
    found = directory.names()
    if not found:
        raise not_a_pool(directory.path)
    # A folder does not belong to a store, even under the name of one of its files.
    if strangers := found - FILES | {
        name for name in found if stat.S_ISDIR(directory.stat(name).st_mode)
    }:
        raise CacheError(
            f"A folder to remove must contain only a store. Received: {directory.path}, which "
            f"contains {min(strangers)!r}. Inspect the folder, and remove it manually."
        )
