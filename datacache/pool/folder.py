"""Creates, opens and removes the files of stores.

A store is one file in a folder of its own. The first line of the file is a header, which describes
the sections after it and is checked before the file is mapped. The first process creates the store,
and `remove` deletes a store only while no process has it open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from datacache.errors import CacheError, DamagedError, NoRoomError
from datacache.pool.spec import PoolSpec, aligned
from datacache.system.access import Directory
from datacache.system.descriptors import (
    Descriptor,
    Owner,
    closed_on_fork,
    is_byte_locked,
    lock_byte,
)
from datacache.system.room import means_full, reserve

log = logging.getLogger("datacache")
SHARED_MEMORY = "/dev/shm"
FORMAT = 5
STORE, UNFINISHED = "datacache.store", "datacache.part"
FILES = {STORE, UNFINISHED}
IN_USE = 2**62
"""Byte that each process locks while it has a store open; claims lock bytes of lower indices."""
MOST_HEADER_BYTES = 2**24
"""Largest number of bytes to read as the header: a damaged file may have no line break."""


def default_memory() -> str:
    """Returns the folder for this user's stores in shared memory.

    Returns:
      `/dev/shm/datacache-<user id>`.
    """
    return f"{SHARED_MEMORY}/datacache-{os.geteuid()}"


def own_memory() -> Path:
    """Returns the folder of `default_memory`, after creating it if necessary."""
    if not os.path.isdir(SHARED_MEMORY):
        raise CacheError(
            f'memory="auto" requires {SHARED_MEMORY}, a folder in shared memory. Received: a '
            "machine without it. Mount a tmpfs there (in Docker, remove --ipc=none), or pass "
            "another folder as `memory`, or None to disable the store in memory."
        )
    with Directory.create(Path(default_memory())) as directory:
        return directory.path


class StoreFile(Owner):
    """Open file of a store.

    A shared lock marks the file as open; the kernel releases the lock however the process ends.
    While a process creates, opens or removes a store, it holds an exclusive lock on the folder. If
    `is_only_user` is true, no other process had the store open, so no other process was filling it.
    `content` is the mapped file, and `sections` are parts of it by name, all `[bytes]` uint8.
    """

    def __init__(self, folder: Path, make_spec: Callable[[], PoolSpec] | None) -> None:
        find: Callable[[Path], Directory] = Directory.create if make_spec else _open_folder
        with contextlib.ExitStack() as opened, _locked(find, folder) as directory:
            if make_spec:
                _make_if_unusable(directory, make_spec)
            self.file = opened.enter_context(open_store(directory))
            self.spec, header_bytes = read_header(self.file, folder)
            self.is_only_user = not is_byte_locked(self.file, IN_USE)
            # Do not use `flock`, which network file systems emulate by a lock of all bytes, because
            # this lock would exclude the locks of samples.
            lock_byte(self.file, IN_USE, shared=True)
            # Record when the store was last opened, because reading a mapping changes no times.
            os.utime(directory.fileno())
            self.content = np.frombuffer(mmap.mmap(self.file.fileno(), 0), np.uint8)
            self.sections = {
                name: self.content[header_bytes + begin : header_bytes + end]
                for name, (begin, end) in self.spec.sections.items()
            }
            self.heap_begin = header_bytes + self.spec.sections["heap"][0]
            opened.pop_all()

    @contextlib.contextmanager
    def locked_bytes(self, indices: Iterable[int], wait: bool = False) -> Iterator[list[bool]]:
        """Locks bytes of the file against other threads and processes; yields which are locked."""
        # Locks of a separate open file description also exclude other threads. Open it by the
        # descriptor, because a cleaner of temporary files may have removed the file's name.
        with closed_on_fork(f"/proc/self/fd/{self.file.fileno()}", os.O_RDWR) as handle:
            yield [lock_byte(handle, index, wait) for index in indices]

    @override
    def close(self) -> None:
        # The mapping is released with the last array that refers to it.
        self.content, self.sections = np.empty(0, np.uint8), {}
        self.file.close()


def open_store(directory: Directory, flags: int = os.O_RDWR) -> Descriptor:
    """Opens the file of a store; raises `CacheError` if it does not exist."""
    try:
        return directory.open(STORE, flags)
    except FileNotFoundError as error:
        names = directory.names()
        if not names or names - FILES:
            raise _not_a_store(directory.path) from error
        raise CacheError(
            f"A store must be complete. Received: {directory.path}, whose creation has not "
            "finished. Wait for the process that creates it; if none does, remove it: python -m "
            f"datacache rm {directory.path}"
        ) from error


def read_header(file: Descriptor, folder: Path) -> tuple[PoolSpec, int]:
    """Checks the file of a store; returns its description and the size of its header in bytes."""
    path = folder / STORE
    with open(file.fileno(), "rb", closefd=False) as stream:
        line = stream.readline(MOST_HEADER_BYTES)
    try:
        header = json.loads(line)
        found = int(header["format"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            "A store must begin with a header in JSON, which states its format. Received: "
            f"{path}, without one.",
            folder,
        ) from error
    # Check the format first, because a newer store may have another digest, but is not damaged.
    if found > FORMAT:
        raise CacheError(
            f"The format of a store must be at most {FORMAT}. Received: format {found} in "
            f"{folder}, created by a newer tfposeidon. Install that release, or pass another "
            "folder."
        )
    if found < FORMAT:
        raise DamagedError(
            f"The format of a store must be {FORMAT}. Received: format {found} in {folder}, "
            "created by an older tfposeidon.",
            folder,
        )
    # The name is the fingerprint, so a renamed store would serve samples of another source.
    if header.pop("digest", None) != _digest(header) or header["name"] != folder.resolve().name:
        raise DamagedError(
            f"A store must be neither modified nor renamed. Received: {path}, which was created "
            f"as {header.get('name')}.",
            folder,
        )
    spec = PoolSpec.from_dict(header["store"])
    expected, found = len(line) + spec.content_bytes, os.fstat(file.fileno()).st_size
    # Reading beyond the end of a mapped file would kill the process (SIGBUS).
    if found != expected:
        raise DamagedError(
            f"The file of a store must be complete. Received: {path} of {found} bytes, expected "
            f"{expected} bytes.",
            folder,
        )
    return spec, len(line)


def remove(folder: Path) -> None:
    """Removes a store that no process has open, or the remains of an incomplete store."""
    with _locked(_open_folder, folder) as directory:
        found = directory.names()
        if not found:
            raise _not_a_store(folder)
        if strangers := found - FILES:
            raise CacheError(
                f"A folder to remove must contain only a store. Received: {folder}, which contains "
                f"{min(strangers)!r}. Inspect the folder, and remove it manually."
            )
        if STORE in found:
            with directory.open(STORE) as file:
                if is_byte_locked(file, IN_USE):
                    raise CacheError(
                        f"A store must not be in use when it is removed. Received: {folder}, which "
                        "a process has open. Wait until that process ends, or end it."
                    )
        _clear(directory)
        directory.path.rmdir()


def _open_folder(folder: Path) -> Directory:
    try:
        return Directory(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_a_store(folder) from error


def _not_a_store(folder: Path) -> CacheError:
    return CacheError(
        f"A store must be a folder with a file {STORE}. Received: {folder}. Pass another folder."
    )


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _make_if_unusable(directory: Directory, make_spec: Callable[[], PoolSpec]) -> None:
    """Creates the store of a folder if it is missing or damaged."""
    if STORE in directory.names():
        with directory.open(STORE) as file:
            try:
                read_header(file, directory.path)
                return
            except DamagedError as error:
                log.warning("datacache: %s The store is rebuilt.", error.what)
    if strangers := directory.names() - FILES:
        raise CacheError(
            f"A store must have a folder of its own. Received: {directory.path}, which contains "
            f"{min(strangers)!r}. Pass another folder, or empty this one."
        )
    # Remove remains before `make_spec` measures the free space. A process that has the old file
    # open can still read it.
    _clear(directory)
    try:
        _make(directory, make_spec())
    except BaseException:
        _clear(directory)
        raise


def _make(directory: Directory, spec: PoolSpec) -> None:
    """Creates the file of a store. The file gets its final name once it is complete."""
    header = {"format": FORMAT, "name": directory.path.resolve().name, "store": asdict(spec)}
    line = json.dumps(header | {"digest": _digest(header)}).encode()
    header_bytes = aligned(len(line) + 1)
    with directory.open(UNFINISHED, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        try:
            os.ftruncate(file.fileno(), header_bytes + spec.content_bytes)
            reserve(file, 0, header_bytes + spec.reserved_bytes)
            os.pwrite(file.fileno(), line.ljust(header_bytes - 1) + b"\n", 0)
        except OSError as error:
            if not means_full(error):
                raise
            raise NoRoomError(
                f"A store needs {spec.reserved_bytes} bytes of free space. Received: "
                f"{directory.path}, on a file system with less. Reduce the budget, or list other "
                "stores (python -m datacache ls) and remove them (python -m datacache rm)."
            ) from error
    os.replace(UNFINISHED, STORE, src_dir_fd=directory.fileno(), dst_dir_fd=directory.fileno())


def _clear(directory: Directory) -> None:
    for name in FILES:
        directory.remove(name)


@contextlib.contextmanager
def _locked(find: Callable[[Path], Directory], path: Path) -> Iterator[Directory]:
    """Opens a folder; locks it against processes that create, open or remove a store there."""
    while True:
        # The kernel releases the lock when this separate open file description is closed.
        with (
            find(path) as directory,
            closed_on_fork(".", os.O_RDONLY | os.O_DIRECTORY, directory.fileno()) as handle,
        ):
            fcntl.flock(handle.fileno(), fcntl.LOCK_EX)
            # Another process may have removed the folder between opening and locking, and the lock
            # of a removed folder does not exclude other processes.
            if not directory.is_gone:
                yield directory
                return
