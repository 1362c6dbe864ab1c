"""Folders of pools: made once by whoever comes first, removed only while nobody has them open."""

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
"""Files whose locks other processes may hold: made first, kept when a pool is made anew, and
removed last. A lock on a file that was replaced would keep nobody out."""
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
"""Names of all files that a pool of any version may have."""


def default_memory(access: Access = PRIVATE) -> str:
    """Returns the folder for pools in shared memory: `/dev/shm/datacache-<user id>`, or a group's.

    Args:
      access: Users who share the folder.
    """
    whose = os.geteuid() if access.group is None else f"group-{access.group}"
    return f"{SHARED_MEMORY}/datacache-{whose}"


def own_memory(access: Access = PRIVATE) -> Path:
    """Returns the folder that `default_memory` names, which is made if it does not exist."""
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f"The pool in memory needs shared memory. Received: no {SHARED_MEMORY}. Mount a tmpfs "
            "there (with Docker: --shm-size), or pass `memory`, a folder, or None to go without."
        )
    path = Path(default_memory(access))
    Directory.create(path, access).close()
    return path


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Header and files of a new pool.

    Attributes:
      header: Content of the header besides format and files; JSON can hold it.
      files: Bytes of each file whose room is reserved before the pool begins, by name.
      growing: Size limit in bytes of each file whose room is reserved as it fills, by name.
    """

    header: dict[str, Any]
    files: dict[str, int]
    growing: dict[str, int]


class Folder:
    """A pool's folder, which this process has open until it ends, however it ends.

    That it is open is a shared lock on the file `users`; the kernel ends it with the process. Who
    makes, opens or removes a pool holds an exclusive lock on the folder itself meanwhile.

    Attributes:
      path: Path of the folder.
      directory: The open folder.
      header: Content of the pool's header.
      is_only_user: True if no other process had it open: then nobody is in the middle of anything.

    Raises:
      CacheError: If the folder holds something else or belongs to another user, a newer version
        made it, or it is damaged while another process has it open.
      NoRoomError: If there is too little room.
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
                # Made shared at once: a child that is forked while the pool is being made inherits
                # this lock, and must keep nobody out. The change is not atomic; meanwhile the
                # folder's lock keeps others from asking.
                fcntl.flock(self._user, fcntl.LOCK_SH)
                header = _read_usable_header(self.directory, self.is_only_user)
                self.header = header or _make(self.directory, make_blueprint)
                on_error.pop_all()
            # Reading through a mapping changes no times, so this is when the pool was last opened.
            os.utime(self._user)

    @contextlib.contextmanager
    def claim(self, indices: Iterable[int]) -> Iterator[list[bool]]:
        """Claims slots among all threads and processes.

        Yields:
          True for each slot that nobody else had claimed, in their order; these are claimed within
          the context.
        """
        # A description of its own: these locks belong to open file descriptions, so that they also
        # hold between threads, and the kernel ends them with the description. Whoever cleans up
        # temporary files may have removed its name.
        with opened_again(self._claims) as handle:
            yield [lock_byte(handle, index) for index in indices]

    def map_file(self, name: str) -> mmap.mmap:
        """Maps a file of the pool for reading and writing.

        Returns:
          The mapping of the whole file, shared with other processes.
        """
        handle = self.directory.open(name)
        try:
            return mmap.mmap(handle, 0)
        finally:
            # The mapping has a descriptor of its own.
            os.close(handle)

    def close(self) -> None:
        """Says that this object does not use the pool any more."""
        os.close(self._user)
        os.close(self._claims)
        self.directory.close()


def _read_usable_header(directory: Directory, is_only_user: bool) -> dict[str, Any] | None:
    """Returns the header of a pool, or `None` if there is none, or none that can be used."""
    names = directory.names()
    if HEADER not in names:
        _refuse_strangers(directory, names)
        return None
    try:
        return read_checked_header(directory)
    except DamagedError as error:
        if not is_only_user:
            # Others have its files mapped, and would be killed if these were made anew.
            raise CacheError(
                f"{error.what} A process has it open: end it, and the next makes the pool anew."
            ) from error
        _refuse_strangers(directory, names)
        log.warning("datacache: %s It is made anew.", error.what)
        return None


def _make(directory: Directory, make_blueprint: Callable[[], Blueprint]) -> dict[str, Any]:
    """Makes a pool, or leaves nothing that takes room; returns its header."""
    # Before it is planned: what is left of another one would hold the room that the plan looks for.
    _clear(directory, FILES - LOCK_FILES)
    try:
        return _write_files(directory, make_blueprint())
    except BaseException:
        _clear(directory, FILES - LOCK_FILES)
        raise


def _write_files(directory: Directory, blueprint: Blueprint) -> dict[str, Any]:
    """Writes the files, and only then the header, which says that there is a pool."""
    sizes = blueprint.files | blueprint.growing
    header = new_header(directory, sizes) | blueprint.header
    for name, size in sizes.items():
        _allocate(directory, name, size, file_tail(header), name in blueprint.files)
    return write_header(directory, header)


def _clear(directory: Directory, names: Iterable[str]) -> None:
    """Removes files of a pool.

    The header goes first: what is left after a kill must not be taken for a pool.
    """
    for name in sorted(names, key=lambda name: (name != HEADER, name in LOCK_FILES)):
        directory.remove(name)


def remove(path: Path) -> None:
    """Removes a pool that nobody has open, or what is left of one."""
    with _locked(lambda: open_pool_folder(path, closed=False)) as directory:
        _remove(directory)
    directory.close()


def _remove(directory: Directory) -> None:
    _refuse_to_remove(directory)
    users = directory.open("users", make=True)
    try:
        if not _has_no_users(users):
            raise CacheError(
                f"A cache must not be in use to be removed. Received: {directory.path}, which a "
                "job has open. Wait, or end it."
            )
        _clear(directory, FILES)
        directory.path.rmdir()
    finally:
        os.close(users)


def _has_no_users(users: int) -> bool:
    """Returns whether no other process has the pool open.

    If so, `users` is locked exclusively, and keeps others from opening it.
    """
    return _lock_file(users, wait=False)


def _allocate(
    directory: Directory, name: str, size: int, tail: bytes, reserve_content: bool
) -> None:
    """Makes a file of `size` bytes and a tail; room for the content is reserved now or later."""
    handle = directory.open(name, make=True)
    try:
        os.ftruncate(handle, size + TAIL_BYTES)
        begin = 0 if reserve_content else size
        reserve(handle, begin, size + TAIL_BYTES - begin)
        os.pwrite(handle, tail, size)
        # Before the header is: else a header could survive a loss of power, and its files not.
        os.fsync(handle)
    except OSError as error:
        if not means_full(error):
            raise
        raise NoRoomError(
            f"A pool needs room before it begins. Received: {directory.path}, without {size} "
            "bytes. Give it a smaller budget, or remove others: python -m datacache ls"
        ) from error
    finally:
        os.close(handle)


def lock_byte(handle: int, index: int, wait: bool = False) -> bool:
    """Locks one byte of a file for an open file description.

    Such a lock needs no byte to be there, so one empty file has a lock for each sample.

    Returns:
      True if it is locked now; always `True` with `wait`.
    """
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
                # Somebody may have removed it between opening and locking: the lock of a folder
                # that has no name any more keeps nobody out.
                if not directory.is_gone:
                    yield directory
                    return
        except BaseException:
            directory.close()
            raise
        directory.close()


@contextlib.contextmanager
def lock_folder(directory: Directory, wait: bool = True) -> Iterator[bool]:
    """Locks a folder: within the context nobody else makes, opens or removes a pool there.

    Yields:
      True if it is locked now; always `True` with `wait`.
    """
    # A description of its own, with whose end the kernel ends the lock.
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
            f"A cache must have a folder of its own. Received: {directory.path}, which holds "
            f"{min(strangers)!r}. Name another, or empty it."
        )


def _refuse_to_remove(directory: Directory) -> None:
    found = directory.names()
    if not found:
        raise not_a_pool(directory.path)
    # A folder is a stranger even under the name of a file of ours.
    if strangers := found - FILES | {
        name for name in found if stat.S_ISDIR(directory.stat(name).st_mode)
    }:
        raise CacheError(
            f"A cache must hold nothing else to be removed. Received: {directory.path}, which "
            f"holds {min(strangers)!r}. Look at it, and remove it by hand."
        )
