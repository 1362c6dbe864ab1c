"""Folders of pools: made once by whoever comes first, in use while anybody has them open, removed only by then."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datacache.errors import CacheError, DamagedError, NoRoomError
from datacache.pool.header import HEADER, PART, TAIL, check, drawn, no_cache, opened, tail, write
from datacache.system.access import PRIVATE, Access, Directory
from datacache.system.forks import unshared
from datacache.system.room import reserve, says_full

log = logging.getLogger("datacache")
SHARED_MEMORY = "/dev/shm"
STAYS = {"users", "claims"}
"""Whose locks others may hold: made first, and removed last."""
FILES = STAYS | {"lock", "samples", "words", "heap", "end", "index", PART, HEADER}


def default_memory(access: Access = PRIVATE) -> str:
    """Shared memory of this user, `/dev/shm/datacache-<user id>`, or of a group."""
    whose = os.geteuid() if access.group is None else f"group-{access.group}"
    return f"{SHARED_MEMORY}/datacache-{whose}"


def own_memory(access: Access = PRIVATE) -> Path:
    """The same, made if it does not exist.

    Raises:
      CacheError: If there is no shared memory, where the pool would lie on a disk, or the folder is somebody else's.
    """
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f"The pool in memory needs shared memory. Received: no {SHARED_MEMORY}. Mount a tmpfs there (with Docker: "
            "--shm-size), or pass `memory`, a folder, or None to go without."
        )
    path = Path(default_memory(access))
    Directory.made(path, access).close()
    return path


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a new pool is made of.

    Attributes:
      about: What it is, for JSON.
      files: Bytes of each file, whose room is taken before it begins.
      growing: At most so many bytes of files whose room is taken as they fill.
    """

    about: dict[str, Any]
    files: dict[str, int]
    growing: dict[str, int]


class Folder:
    """A pool's folder, which this process has open until it ends, however it ends.

    Args:
      path: Made if it does not exist.
      make: Says what a new pool in it is made of.
      access: Who may get at it.

    Attributes:
      about: What the pool is.
      first: Whether no other process had it open: then nobody is within anything.

    Raises:
      CacheError: If the folder holds something else or is somebody else's, a newer version made it, or it is damaged
        while a process has it open.
      NoRoomError: If there is too little room.
    """

    def __init__(self, path: Path, make: Callable[[], Blueprint], access: Access = PRIVATE) -> None:
        self.path = Path(path)
        with _locked(lambda: Directory.made(self.path, access)) as self.directory:
            self._user = self.directory.open("users", make=True)
            try:
                os.close(self.directory.open("claims", make=True))
                self.first = _is_alone(self._user)
                # At once: what a forked child has, too, must keep nobody out.
                fcntl.flock(self._user, fcntl.LOCK_SH)
                self.about = _whole(self.directory, self.first) or _made(self.directory, make)
            except BaseException:
                os.close(self._user)
                raise
            # What is read through a mapping leaves no time behind.
            os.utime(self._user)

    @contextlib.contextmanager
    def claim(self, places: Iterable[int]) -> Iterator[list[bool]]:
        """Within it nobody else has these places, in whatever thread, but for those that somebody has already."""
        # A description of its own: locks are per description, and so between threads, too. The kernel ends them.
        with unshared(lambda: self.directory.open("claims")) as handle:
            yield [lock_byte(handle, place) for place in places]

    def close(self) -> None:
        """Not in use any more by this object."""
        os.close(self._user)
        self.directory.close()


def _whole(directory: Directory, alone: bool) -> dict[str, Any] | None:
    """What the pool is; `None` if there is none, or none any more that can be used."""
    names = directory.names()
    if HEADER not in names:
        _refuse_strangers(directory, names)
        return None
    try:
        return check(directory)
    except DamagedError as error:
        if not alone:
            raise CacheError(
                f"{error.what} A process has it open: end it, and the next makes the pool anew."
            ) from error
        _refuse_strangers(directory, names)
        log.warning("datacache: %s It is made anew.", error.what)
        return None


def _made(directory: Directory, make: Callable[[], Blueprint]) -> dict[str, Any]:
    """Makes a pool, or leaves nothing that takes room."""
    # Before it is planned: what is left of another one would hold the room that the plan looks for.
    _clear(directory, FILES - STAYS)
    try:
        return _written(directory, make())
    except BaseException:
        _clear(directory, FILES - STAYS)
        raise


def _written(directory: Directory, blueprint: Blueprint) -> dict[str, Any]:
    """First the files, then what says that it is a pool."""
    sizes = blueprint.files | blueprint.growing
    about = drawn(directory, sizes) | blueprint.about
    for name, size in sizes.items():
        _allocate(directory, name, size, tail(about), name in blueprint.files)
    return write(directory, about)


def _clear(directory: Directory, names: Iterable[str]) -> None:
    """Removes files of a pool: first what says that it is one, for what a kill leaves is taken over by the next."""
    for name in sorted(names, key=lambda name: (name != HEADER, name in STAYS)):
        directory.remove(name)


def remove(path: Path) -> None:
    """Removes a pool that nobody has open, or what is left of one.

    Raises:
      CacheError: If somebody has, or the folder is none or somebody else's, or holds anything else.
    """
    with _locked(lambda: opened(path, closed=False)) as directory:
        _remove(directory)
    directory.close()


def _remove(directory: Directory) -> None:
    _refuse_to_remove(directory)
    users = directory.open("users", make=True)
    try:
        if not _is_alone(users):
            raise CacheError(
                f"A cache must not be in use to be removed. Received: {directory.path}, which a job has open. Wait, "
                "or end it."
            )
        _clear(directory, FILES)
        directory.path.rmdir()
    finally:
        os.close(users)


def _is_alone(users: int) -> bool:
    """Whether no other process has the pool open; then none may until this one says so."""
    return _flocked(users, wait=False)


def _allocate(directory: Directory, name: str, size: int, tail: bytes, now: bool) -> None:
    """Makes a file with room for so many bytes, which is taken `now` or later."""
    handle = directory.open(name, make=True)
    try:
        os.ftruncate(handle, size + TAIL)
        reserve(handle, 0 if now else size, size + TAIL if now else TAIL)
        os.pwrite(handle, tail, size)
        os.fsync(handle)
    except OSError as error:
        if not says_full(error):
            raise
        raise NoRoomError(
            f"A pool needs room before it begins. Received: {directory.path}, without {size} bytes. Give it a smaller "
            "budget, or remove others: python -m datacache ls"
        ) from error
    finally:
        os.close(handle)


def lock_byte(handle: int, place: int, wait: bool = False) -> bool:
    """Locks one byte of an open file description; without `wait`, says whether it could."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def _locked(open_folder: Callable[[], Directory]) -> Iterator[Directory]:
    """The folder, in which nobody else makes or removes anything within the context; it stays open after it."""
    while True:
        directory = open_folder()
        try:
            with lock(directory):
                # Somebody may have removed it in the meantime: then this is the lock of nothing.
                if not directory.has_gone:
                    yield directory
                    return
        except BaseException:
            directory.close()
            raise
        directory.close()


@contextlib.contextmanager
def lock(directory: Directory, wait: bool = True) -> Iterator[bool]:
    """Within it nobody else makes or removes anything in the folder; without `wait`, says whether that is so."""
    # A description of its own, with which the kernel ends the lock.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with unshared(lambda: os.open(".", flags, dir_fd=directory.descriptor)) as handle:
        yield _flocked(handle, wait)


def _flocked(handle: int, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _refuse_strangers(directory: Directory, names: set[str]) -> None:
    if strangers := names - FILES:
        raise CacheError(
            f"A cache must have a folder of its own. Received: {directory.path}, which holds {min(strangers)!r}. Name "
            "another, or empty it."
        )


def _refuse_to_remove(directory: Directory) -> None:
    found = directory.names()
    if not found:
        raise no_cache(directory.path)
    if strangers := found - FILES | {
        name for name in found if stat.S_ISDIR(directory.stat(name).st_mode)
    }:
        raise CacheError(
            f"A cache must hold nothing else to be removed. Received: {directory.path}, which holds "
            f"{min(strangers)!r}. Look at it, and remove it by hand."
        )
