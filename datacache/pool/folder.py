"""Folders of stores: created by the first process, removed only while no process has them open."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from datacache.errors import CacheError, DamagedError, NoRoomError
from datacache.pool.header import (
    FILES,
    HEADER,
    LOCK_FILES,
    TAIL_BYTES,
    file_tail,
    new_header,
    not_a_pool,
    open_pool_folder,
    read_checked_header,
    write_header,
)
from datacache.pool.spec import PoolSpec
from datacache.system.access import Directory
from datacache.system.descriptors import (
    Descriptor,
    Owner,
    closed_on_fork,
    lock_byte,
    lock_file,
    opened_again,
)
from datacache.system.room import means_full, reserve

log = logging.getLogger("datacache")
SHARED_MEMORY = "/dev/shm"


def default_memory() -> str:
    """Returns the folder for this user's stores in shared memory.

    Returns:
      `/dev/shm/datacache-<user id>`.

    Example:
      >>> default_memory() == f"/dev/shm/datacache-{os.geteuid()}"
      True
    """
    return f"{SHARED_MEMORY}/datacache-{os.geteuid()}"


def own_memory() -> Path:
    """Returns the folder of `default_memory`, after creating it if necessary."""
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f"The store in memory needs shared memory. Received: no {SHARED_MEMORY}. Mount a tmpfs "
            "there (with Docker: --shm-size), or pass a folder as `memory`, or None to disable it."
        )
    with Directory.create(Path(default_memory())) as directory:
        return directory.path


class Folder(Owner):
    """Folder of a store, which this process has open until it exits in any way.

    A shared lock on the file `users` marks the folder as open, and the kernel releases it with the
    process. A process that creates, opens or removes a store holds an exclusive lock on the folder
    meanwhile. If `is_only_user` is true, no other process had it open, so no operation is in
    progress. All descriptors of a store belong to its folder.
    """

    def __init__(self, path: Path, make_spec: Callable[[], PoolSpec] | None) -> None:
        self.path = Path(path)
        self._opened = contextlib.ExitStack()
        find: Callable[[Path], Directory] = Directory.create if make_spec else open_pool_folder
        with _locked(lambda: find(self.path)) as self.directory, self._opened as on_error:
            on_error.enter_context(self.directory)
            header = None if make_spec else read_checked_header(self.directory)
            self._users = self.open("users", make=True)
            self._claims = self.open("claims", make=True)
            self.is_only_user = _has_no_users(self._users)
            # Downgrade at once: a child that is forked while the store is created inherits this
            # lock, and must not exclude others. The change is not atomic, but the folder's lock
            # blocks other requests in the meantime.
            fcntl.flock(self._users.fileno(), fcntl.LOCK_SH)
            if make_spec:
                header = _read_usable_header(self.directory, self.is_only_user)
                header = header or _make(self.directory, make_spec)
            assert header is not None
            self.header = header
            self._begin_use()
            self._opened = on_error.pop_all()

    def _begin_use(self) -> None:
        # Reading through a mapping changes no times, so record when the store was last opened.
        os.utime(self._users.fileno())
        if self.is_only_user and "end" in self.header["files"]:
            # After a power loss, samples on a disk may be newer than the state of their heap.
            with self.directory.open("end") as end:
                os.pwrite(end.fileno(), bytes(self.header["files"]["end"]), 0)

    def open(self, name: str, *, make: bool = False) -> Descriptor:
        """Opens a file of the store until the folder is closed."""
        return self._opened.enter_context(self.directory.open(name, make=make))

    def map_file(self, name: str) -> mmap.mmap:
        """Maps a whole file of the store for reading and writing, shared with other processes."""
        with self.directory.open(name) as handle:
            return mmap.mmap(handle.fileno(), 0)

    @contextlib.contextmanager
    def claim(self, indices: Iterable[int]) -> Iterator[list[bool]]:
        """Claims slots among all threads and processes; yields for each whether it was free."""
        # These locks belong to a separate open file description, so that they also exclude other
        # threads, and the kernel releases them with it. A cleaner of temporary files may have
        # removed the file's name.
        with opened_again(self._claims) as handle:
            yield [lock_byte(handle, index) for index in indices]

    @override
    def close(self) -> None:
        self._opened.close()


def _read_usable_header(directory: Directory, is_only_user: bool) -> dict[str, Any] | None:
    """Returns the header of a store, or `None` if it is missing or unusable."""
    strangers = directory.names() - FILES
    try:
        if HEADER in directory.names():
            return read_checked_header(directory)
    except DamagedError as error:
        if not is_only_user:
            # Other processes have its files mapped, and would be killed if these were rebuilt.
            raise CacheError(
                f"{error.what} A process has the store open. End that process, and open the store "
                "again to rebuild it."
            ) from error
        if not strangers:
            log.warning("datacache: %s The store is rebuilt.", error.what)
    if strangers:
        raise CacheError(
            f"A store must have a folder of its own. Received: {directory.path}, which contains "
            f"{min(strangers)!r}. Pass another folder, or empty this one."
        )
    return None


def _make(directory: Directory, make_spec: Callable[[], PoolSpec]) -> dict[str, Any]:
    """Creates a store, and removes partial files after an error; returns its header."""
    # Must precede the description: remains of another store would occupy the space that it plans
    # with.
    _clear(directory, FILES - LOCK_FILES)
    try:
        spec = make_spec()
        sizes = spec.files | spec.growing_files
        header = new_header(directory, sizes) | spec.to_dict()
        for name, size in sizes.items():
            _allocate(directory, name, size, file_tail(header), name in spec.files)
        # The header marks the store as complete.
        return write_header(directory, header)
    except BaseException:
        _clear(directory, FILES - LOCK_FILES)
        raise


def _clear(directory: Directory, names: Iterable[str]) -> None:
    # The header must go first: remains after a kill must not be taken for a store.
    for name in sorted(names, key=lambda name: (name != HEADER, name in LOCK_FILES)):
        directory.remove(name)


def _allocate(
    directory: Directory, name: str, size: int, tail: bytes, reserve_content: bool
) -> None:
    """Creates a file of `size` bytes and a tail; space for the content is reserved now or later."""
    with directory.open(name, make=True) as handle:
        try:
            os.ftruncate(handle.fileno(), size + TAIL_BYTES)
            begin = 0 if reserve_content else size
            reserve(handle, begin, size + TAIL_BYTES - begin)
            os.pwrite(handle.fileno(), tail, size)
            # Sync before the header is written: otherwise, after a power loss, there could be a
            # header without its files.
            os.fsync(handle.fileno())
        except OSError as error:
            if not means_full(error):
                raise
            raise NoRoomError(
                f"A store needs free space for its files. Received: {directory.path}, without "
                f"{size} bytes. Reduce the budget, or remove other stores: python -m datacache ls"
            ) from error


def remove(path: Path) -> None:
    """Removes a store that no process has open, or the remains of one."""
    with _locked(lambda: open_pool_folder(path, "ignored")) as directory, directory:
        _refuse_to_remove(directory)
        with directory.open("users", make=True) as users:
            if not _has_no_users(users):
                raise CacheError(
                    f"A store in use cannot be removed. Received: {directory.path}, which a "
                    "process has open. Wait for the process, or end it."
                )
            _clear(directory, FILES)
            directory.path.rmdir()


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


def _has_no_users(users: Descriptor) -> bool:
    """Returns whether no other process has the store open; if so, locks `users` exclusively."""
    return lock_file(users, wait=False)


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
    with closed_on_fork(
        lambda: Descriptor(os.open(".", flags, dir_fd=directory.fileno()))
    ) as handle:
        yield lock_file(handle, wait)
