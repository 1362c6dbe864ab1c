"""Folders of stores: created by the first process, removed only while no process has them open.

The header of a store describes its files, which are checked against it before they are mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from datacache.errors import CacheError, DamagedError, NoRoomError
from datacache.pool.spec import PoolSpec
from datacache.system.access import Directory, Others
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
FORMAT = 3
HEADER = "header.json"
UNFINISHED_HEADER = "header.part"
LOCK_FILES = {"users", "claims"}
"""Files whose locks other processes may hold: created first, retained when a store is rebuilt, and
removed last. A lock on a replaced file would not exclude other processes."""
FILES = LOCK_FILES | {
    *("lock", "samples", "words", "heap", "end", "index", UNFINISHED_HEADER, HEADER)
}
"""Names of all files of a store in any version."""
TAIL_BYTES = 64
"""Bytes after the content of each file that identify its store: a whole cache line."""
ID_BYTES = 16
"""Random bytes that identify a store."""


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
            # The lock is granted if no other process has the store open.
            self.is_only_user = lock_file(self._users, wait=False)
            # Downgrade at once: a child that is forked while the store is created inherits this
            # lock, and must not exclude others. The change is not atomic, but the folder's lock
            # blocks other requests in the meantime.
            fcntl.flock(self._users.fileno(), fcntl.LOCK_SH)
            if make_spec:
                header = _read_usable_header(self.directory, self.is_only_user)
                header = header or _make(self.directory, make_spec)
            assert header is not None
            self.header = header
            # Reading through a mapping changes no times, so record when the store was last opened.
            os.utime(self._users.fileno())
            self._opened = on_error.pop_all()

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


def is_pool(path: Path) -> bool:
    """Returns whether a folder contains a finished store."""
    return (path / HEADER).exists()


def open_pool_folder(path: Path, others: Others = "refused") -> Directory:
    """Opens the folder of an existing store."""
    try:
        return Directory(path, others)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_a_pool(path) from error


def _not_a_pool(path: Path) -> CacheError:
    return CacheError(
        f"A store must have a {HEADER}. Received: {path}, without one. Pass another folder."
    )


def read_checked_header(directory: Directory) -> dict[str, Any]:
    """Returns the header of a store, after checks of the header and of the sizes of all files."""
    header, path = _read_header(directory), directory.path
    if header["name"] != path.resolve().name:
        # The name is the fingerprint: a different name would serve samples of a different source.
        raise DamagedError(
            f"A store must not be renamed. Received: {path}, created as {header['name']}.", path
        )
    tail = _file_tail(header)
    for name, size in header["files"].items():
        _check_file(directory, name, size, tail)
    return header


def _file_tail(header: dict[str, Any]) -> bytes:
    return bytes.fromhex(header["id"]) * (TAIL_BYTES // ID_BYTES)


def _write_header(directory: Directory, header: dict[str, Any]) -> dict[str, Any]:
    """Writes the header last and durably, which completes a store; returns it as read back."""
    # Write, sync, then rename: after a power loss there is a complete header or none.
    with directory.open(UNFINISHED_HEADER, make=True) as handle:
        with open(handle.fileno(), "w", closefd=False) as stream:
            json.dump(header | {"digest": _digest(header)}, stream)
        os.fsync(handle.fileno())
    directory.rename(UNFINISHED_HEADER, HEADER)
    return _read_header(directory)


def _read_header(directory: Directory) -> dict[str, Any]:
    folder, path = directory.path, directory.path / HEADER
    try:
        header = json.loads(directory.read(HEADER))
    except FileNotFoundError as error:
        names = directory.names()
        if not names or names - FILES:
            raise _not_a_pool(folder) from error
        raise CacheError(
            f"A store must be complete. Received: {folder}, which is being created, or "
            "is left of a killed process. Wait, or remove it with `python -m datacache rm`."
        ) from error
    except ValueError as error:
        raise DamagedError(
            f"The header of a store must be JSON. Received: {path}, which is not JSON.", folder
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise DamagedError(
            f"The header of a store must state its format. Received: {path}, without a format.",
            folder,
        )
    # Must precede the digest: a newer format may compute it differently, and such a store must not
    # be rebuilt.
    _check_format(header["format"], folder)
    if header.pop("digest", None) != _digest(header):
        raise DamagedError(
            f"The header of a store must not be modified. Received: {path}, which was modified.",
            folder,
        )
    return header


def _check_format(found: int, path: Path) -> None:
    if found > FORMAT:
        raise CacheError(
            f"The format of a store must be at most {FORMAT}. Received: format {found} in {path}. "
            "Use a newer tfposeidon, or another folder."
        )
    if found < FORMAT:
        raise DamagedError(
            f"The format of a store must be {FORMAT}. Received: format {found} in {path}, created "
            "by an older tfposeidon.",
            path,
        )


def _check_file(directory: Directory, name: str, size: int, tail: bytes) -> None:
    """Checks size and tail of a file: reading beyond its end would kill the process (SIGBUS)."""
    folder, path = directory.path, directory.path / name
    try:
        handle = directory.open(name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise DamagedError(
            f"All files of a store must exist. Received: no {path}.", folder
        ) from error
    with handle:
        found = os.fstat(handle.fileno()).st_size
        if found != size + TAIL_BYTES:
            raise DamagedError(
                f"Files of a store must be complete. Received: {path} of {found} bytes, expected "
                f"{size + TAIL_BYTES} bytes.",
                folder,
            )
        if os.pread(handle.fileno(), TAIL_BYTES, size) != tail:
            raise DamagedError(
                f"Files of a store must belong to it. Received: {path} of another store.", folder
            )


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


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
        name, number = directory.path.resolve().name, secrets.token_hex(ID_BYTES)
        header = {"format": FORMAT, "id": number, "name": name, "files": sizes} | spec.to_dict()
        for name, size in sizes.items():
            _allocate(directory, name, size, _file_tail(header), name in spec.files)
        # The header marks the store as complete.
        return _write_header(directory, header)
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
            if not lock_file(users, wait=False):
                raise CacheError(
                    f"A store in use cannot be removed. Received: {directory.path}, which a "
                    "process has open. Wait for the process, or end it."
                )
            _clear(directory, FILES)
            directory.path.rmdir()


def _refuse_to_remove(directory: Directory) -> None:
    found = directory.names()
    if not found:
        raise _not_a_pool(directory.path)
    # A folder does not belong to a store, even under the name of one of its files.
    if strangers := found - FILES | {
        name for name in found if stat.S_ISDIR(directory.stat(name).st_mode)
    }:
        raise CacheError(
            f"A folder to remove must contain only a store. Received: {directory.path}, which "
            f"contains {min(strangers)!r}. Inspect the folder, and remove it manually."
        )


@contextlib.contextmanager
def _locked(open_folder: Callable[[], Directory]) -> Iterator[Directory]:
    """Opens a folder and locks it within the context; the folder stays open after it."""
    while True:
        directory = open_folder()
        try:
            with lock_folder(directory):
                # Another process may have removed the folder between opening and locking, and the
                # lock of a removed folder does not exclude other processes.
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
