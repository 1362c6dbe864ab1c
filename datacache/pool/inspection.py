"""Inspection of stores from outside: it creates and maps nothing, and blocks no job."""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from datacache.errors import CacheError
from datacache.pool.folder import FILES, lock_folder
from datacache.pool.header import HEADER, open_pool_folder, read_checked_header
from datacache.pool.heap import USED_BYTES
from datacache.pool.spec import WORD, PoolSpec
from datacache.pool.words import READY
from datacache.system.access import Directory
from datacache.system.forks import closed_on_fork

BLOCK_BYTES = 512
"""Unit of `stat` in bytes, independent of the blocks of the file system."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a store: `slots` samples fit, and `ready` are readable.

    `heap_used` and `heap_capacity` are the bytes of components that differ in size and their limit,
    or `None` if none does.
    """

    spec: PoolSpec
    slots: int
    ready: int
    heap_used: int | None
    heap_capacity: int | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents as values for JSON, as `ls --json` prints them."""
        spec = self.spec.to_dict()
        content = asdict(self) | {"source": spec["source"], "layout": spec["layout"]} | spec["part"]
        del content["spec"]
        # The shard has the number of slots that fit, which may exceed its number of samples.
        return content | {"slots": self.slots}


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Report on a store, or on the remains of one.

    `bytes` is its disk usage, `opened` the last time at which a process opened it, and `in_use` is
    true if a process has it open. `contents` is `None` if it cannot be used, and `trouble` the
    reason.
    """

    folder: Path
    bytes: int
    made: datetime
    opened: datetime
    in_use: bool
    contents: Contents | None = None
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON, as `ls --json` prints it."""
        content = asdict(self) | {"folder": str(self.folder)}
        del content["contents"]
        times = {name: content[name].isoformat(timespec="seconds") for name in ("made", "opened")}
        return content | times | (self.contents.to_dict() if self.contents else {})


def find_pools(root: Path) -> list[Path]:
    """Returns the folder if it is a store or the remains of one, otherwise the stores in it."""
    if not root.is_dir():
        raise CacheError(
            f"A store must be a folder. Received: {root}, which is not a folder. Check the path."
        )
    if _looks_like_a_pool(root):
        return [root]
    return [root / name for name in sorted(_names(root)) if _looks_like_a_pool(root / name)]


def inspect_pool(folder: Path) -> PoolReport | None:
    """Returns a report on a store, or `None` if it no longer exists."""
    try:
        with Directory(folder) as directory:
            return _report(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CacheError as error:
        return _report_refused(folder, error)


def read_contents(folder: Path) -> Contents:
    """Returns the contents of a store."""
    with open_pool_folder(folder) as directory:
        if not _looks_like_a_pool(folder):
            # Raises an error that names the missing file.
            read_checked_header(directory)
        return _contents(directory)


def _report(directory: Directory) -> PoolReport | None:
    about: dict[str, Any] = {
        "folder": directory.path,
        "bytes": _allocated_bytes(directory),
        "made": _changed(directory, HEADER),
        "opened": _changed(directory, "users"),
        "in_use": _in_use(directory),
    }
    try:
        return PoolReport(contents=_contents(directory), **about)
    except (CacheError, OSError) as error:
        # Another process may have removed it since it was opened.
        return None if directory.is_gone else PoolReport(trouble=str(error), **about)


def _report_refused(folder: Path, error: CacheError) -> PoolReport:
    """Returns the report on a folder that must not be opened, such as another user's."""
    status = folder.stat(follow_symlinks=False)
    changed = datetime.fromtimestamp(status.st_mtime).astimezone()
    return PoolReport(
        folder=folder, bytes=0, made=changed, opened=changed, in_use=False, trouble=str(error)
    )


def _contents(directory: Directory) -> Contents:
    if HEADER not in directory.names():
        raise CacheError(
            f"A store must be complete. Received: {directory.path}, which is being created, or "
            "is left of a killed process. Wait, or remove it with `python -m datacache rm`."
        )
    header = read_checked_header(directory)
    spec = PoolSpec.from_dict(header)
    slots = spec.shard.kept_samples
    ready = int((_read(directory, "words", WORD)[:slots] >= READY).sum())
    used = capacity = None
    if spec.layout.varies:
        used = int(_read(directory, "end", np.dtype(np.int64))[USED_BYTES])
        capacity = header["files"]["heap"]
    return Contents(spec=spec, slots=slots, ready=ready, heap_used=used, heap_capacity=capacity)


def _read(directory: Directory, name: str, dtype: np.dtype[Any]) -> np.ndarray:
    # Read, not mapped: if the store were rebuilt in the meantime, a mapping could kill this
    # process.
    with open(directory.open(name, os.O_RDONLY), "rb") as stream:
        return np.fromfile(stream, dtype)


def _looks_like_a_pool(path: Path) -> bool:
    names = _names(path)
    return HEADER in names or (bool(names) and names <= FILES)


def _names(path: Path) -> set[str]:
    """Returns the names in a folder; empty if it is not one, is another user's, or was removed."""
    try:
        return set(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()


def _allocated_bytes(directory: Directory) -> int:
    """Returns the disk usage of files; heaps are sparse, so their sizes are not informative."""
    return sum(BLOCK_BYTES * directory.stat(name).st_blocks for name in directory.names())


def _changed(directory: Directory, name: str) -> datetime:
    status = directory.stat(name) if name in directory.names() else os.fstat(directory.descriptor)
    return datetime.fromtimestamp(status.st_mtime).astimezone()


def _in_use(directory: Directory) -> bool:
    """Returns whether a process has the store open.

    It requests the lock of `remove` and releases it at once: it is granted if no other process has
    the store open.
    """
    # A process that opens or creates the store holds the folder's lock, and must not mistake the
    # short lock of this process for another user of the store.
    with lock_folder(directory, wait=False) as mine:
        return not mine or _has_users(directory)


def _has_users(directory: Directory) -> bool:
    try:
        with closed_on_fork(lambda: directory.open("users", os.O_RDONLY)) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
