"""Folders of pools: made once by whoever comes first, in use while anybody has them open, removed only by then."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SHARED_MEMORY = "/dev/shm"
FORMAT = 1
HEADER = "header.json"
FILES = {"lock", "users", "claims", "samples", "words", "heap", "end", "header.part", HEADER}


class CacheError(RuntimeError):
    """A folder that is no cache, or that cannot hold one."""


class NoRoomError(CacheError):
    """Too little room for a pool."""


def default_memory() -> str:
    """Shared memory of this user: `/dev/shm/datacache-<user id>`."""
    return f"{SHARED_MEMORY}/datacache-{os.getuid()}"


def require_shared_memory() -> None:
    """Looks whether there is any.

    Raises:
      CacheError: If not; otherwise the pool would lie on a disk.
    """
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f"The pool in memory needs shared memory. Received: no {SHARED_MEMORY}. Mount a tmpfs there (with Docker: "
            "--shm-size), or pass `memory`, a folder, or None to go without."
        )


class Folder:
    """A pool's folder.

    Args:
      path: Made if it does not exist.
      make: Makes the files of a new pool in it and returns what it is, for JSON.

    Raises:
      CacheError: If the folder holds something else, or there is no room.
    """

    def __init__(self, path: Path, make: Callable[[Path], dict[str, Any]]) -> None:
        self.path = Path(path)
        with _locked(self.path, create=True):
            if not (self.path / HEADER).exists():
                _refuse_strangers(self.path)
                beside = self.path / "header.part"
                about = {"format": FORMAT} | make(self.path)
                beside.write_text(json.dumps(about | {"digest": _digest(about)}))
                beside.replace(self.path / HEADER)
            self.about = read_header(self.path)
            # Until this process ends, however it ends.
            self._user = os.open(self.path / "users", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._user, fcntl.LOCK_SH)
            # What is read through a mapping leaves no time behind.
            os.utime(self._user)

    @contextlib.contextmanager
    def claim(self, places: Iterable[int]) -> Iterator[list[bool]]:
        """Within it nobody else has these places, in whatever thread, but for those that somebody has already."""
        # A description of its own: locks are per description, and so between threads, too. The kernel ends them.
        handle = os.open(self.path / "claims", os.O_RDWR | os.O_CREAT)
        try:
            yield [lock_byte(handle, place) for place in places]
        finally:
            os.close(handle)

    def close(self) -> None:
        """Not in use any more by this object."""
        os.close(self._user)


def is_pool(path: Path) -> bool:
    """Whether there is a pool."""
    return (path / HEADER).exists()


def read_header(path: Path) -> dict[str, Any]:
    """What a pool's folder says of it.

    Raises:
      CacheError: If it is none, or of a newer format.
    """
    try:
        about = json.loads((path / HEADER).read_text())
    except FileNotFoundError as error:
        raise CacheError(
            f"A cache must have a {HEADER}. Received: {path}, without one. Name another folder."
        ) from error
    except ValueError as error:
        raise CacheError(
            f"A cache must be whole. Received: {path / HEADER}, which is no JSON. Remove {path}."
        ) from error
    if not isinstance(about, dict) or not {"format", "layout", "part"} <= about.keys():
        raise CacheError(f"A cache must say what it holds. Received: {path / HEADER}, which does not. Remove {path}.")
    if about["format"] > FORMAT:
        raise CacheError(
            f"A cache must be of a format up to {FORMAT}. Received: format {about['format']} in {path}. Use a newer "
            "tfposeidon, or another folder."
        )
    if about.pop("digest", None) != _digest(about):
        raise CacheError(
            f"A cache must be as it was made. Received: {path / HEADER}, which was changed. Remove {path}."
        )
    return about


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def remove(path: Path) -> None:
    """Removes a pool that nobody has open, or what is left of one.

    Raises:
      CacheError: If somebody has, or the folder is none, or holds anything else.
    """
    # Before a lock is made in it.
    _refuse_to_remove(path)
    with _locked(path, create=False):
        users = os.open(path / "users", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _refuse_to_remove(path)
            # First that it is one: what is left after a kill is no cache, and is taken over by the next. Last the
            # lock, which keeps the next one out.
            for name in (HEADER, *sorted(FILES - {HEADER, "lock"}), "lock"):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                # Somebody may make a new one by now.
                path.rmdir()
        except BlockingIOError as error:
            raise CacheError(
                f"A cache must not be in use to be removed. Received: {path}, which a job has open. Wait, or end it."
            ) from error
        finally:
            os.close(users)


def allocate(path: Path, size: int) -> None:
    """Makes a file with room for so many bytes.

    Raises:
      NoRoomError: If there is not as much room.
    """
    with path.open("wb") as stream:
        try:
            reserve(stream.fileno(), 0, size)
        except OSError as error:
            if not says_full(error):
                raise
            os.ftruncate(stream.fileno(), 0)
            raise NoRoomError(
                f"A pool needs room before it begins. Received: {path.parent}, without {size} bytes. Give it a smaller "
                "budget, or remove others: python -m datacache ls"
            ) from error


def reserve(handle: int, offset: int, size: int) -> None:
    """Takes the room: a file with holes would end the process that writes into one when the disk is full.

    Raises:
      OSError: If there is none.
    """
    if not size:
        return
    # Where a file system cannot allocate, the C library would write until it is full.
    room = os.fstatvfs(handle)
    if size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(handle, offset, size)


def says_full(error: OSError) -> bool:
    """Whether there is no room, for a file or for its owner."""
    return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


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


def unlock_byte(handle: int, place: int) -> None:
    """The inverse."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, place, 1, 0))


def free_bytes(path: Path) -> int:
    """Room on the file system of a folder that may not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextlib.contextmanager
def _locked(path: Path, create: bool) -> Iterator[None]:
    while True:
        if create:
            _make_folder(path)
        try:
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            if create:
                continue
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Somebody may have removed the folder in the meantime: then this is the lock of nothing.
            if os.fstat(handle).st_nlink:
                yield
                return
        finally:
            os.close(handle)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CacheError(
            f"A cache must have a folder that it can write to. Received: {path} ({error.strerror}). Name another."
        ) from error


def _refuse_strangers(path: Path) -> None:
    strangers = {found.name for found in path.iterdir()} - FILES
    if strangers:
        raise CacheError(
            f"A cache must have a folder of its own. Received: {path}, which holds {min(strangers)!r}. Name another, "
            "or empty it."
        )


def _refuse_to_remove(path: Path) -> None:
    found = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if not found:
        read_header(path)
    if found - FILES:
        raise CacheError(
            f"A cache must hold nothing else to be removed. Received: {path}, which holds {min(found - FILES)!r}. "
            "Look at it, and remove it by hand."
        )
