"""Stores seen from outside: `ls` and the search for idle ones create nothing and block no job."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from datacache.errors import CacheError
from datacache.from_tfposeidon import is_memory, readable_size
from datacache.pool.folder import (
    FILES,
    HEADER,
    LOCK_FILES,
    lock_folder,
    read_checked_header,
    remove,
)
from datacache.pool.samples import READY
from datacache.pool.spec import WORD, PoolSpec
from datacache.system.access import Directory
from datacache.system.descriptors import closed_on_fork, lock_file

log = logging.getLogger("datacache")
BLOCK_BYTES = 512
"""Unit of `stat` in bytes, independent of the blocks of the file system."""
NOTICEABLE_BYTES = 2**20
"""The removal of a smaller store is not a test of whether removals free space: others may allocate
as much in the meantime."""


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Report on a store, or on the remains of one.

    `bytes` is its disk usage, `opened` the last time at which a process opened it, and `in_use` is
    true if a process has it open. `spec` is `None` if it cannot be used, and `trouble` the reason;
    otherwise `ready` samples are readable.
    """

    folder: Path
    bytes: int
    opened: datetime
    in_use: bool
    spec: PoolSpec | None = None
    ready: int = 0
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON, as `ls --json` prints it."""
        content = {
            "folder": str(self.folder),
            "bytes": self.bytes,
            "opened": self.opened.isoformat(timespec="seconds"),
            "in_use": self.in_use,
            "trouble": self.trouble,
        }
        if self.spec is None:
            return content
        spec = self.spec.to_dict()
        # The shard has the number of slots that fit, which may exceed its number of samples.
        content |= spec.pop("part") | spec | {"slots": self.spec.shard.kept_samples}
        return content | {"ready": self.ready}


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
        # Such as another user's.
        opened = _local_time(folder.stat(follow_symlinks=False))
        return PoolReport(folder=folder, bytes=0, opened=opened, in_use=False, trouble=str(error))


def find_idle_pools(root: Path, except_for: Path | None = None) -> list[PoolReport]:
    """Returns the stores in memory that no process has open, least recently opened first."""
    # They retain their memory, because the next job may find its samples there.
    if not root.is_dir():
        return []
    paths = [path for path in find_pools(root) if path != except_for and _lies_in_memory(path)]
    reports = [report for path in paths if (report := inspect_pool(path))]
    idle = [report for report in reports if not report.in_use and _is_certainly_a_pool(report)]
    return sorted(idle, key=lambda report: report.opened)


def make_room(root: Path, new_pool: Path, room: Callable[[], int], enough: int) -> None:
    """Removes idle stores, least recently opened first, until there is enough free space."""
    left = room()
    for report in find_idle_pools(root, new_pool) if left < enough else ():
        if not _try_remove(report):
            continue
        before, left = left, room()
        if left >= enough:
            return
        # Something else is the limit, such as a quota, and further removals would be useless.
        if left <= before and report.bytes >= NOTICEABLE_BYTES:
            log.warning("datacache: the removal freed no space, so other stores are retained.")
            return


def _try_remove(report: PoolReport) -> bool:
    try:
        remove(report.folder)
    except (CacheError, OSError) as error:
        # Another process has opened it by now, or it belongs to another user.
        log.info("datacache: a store was not removed. %s", error)
        return False
    log.warning(
        "datacache: removed the unused store %s to free %s: it was last opened at %s",
        report.folder,
        readable_size(report.bytes),
        f"{report.opened:%Y-%m-%d %H:%M}",
    )
    return True


def _lies_in_memory(path: Path) -> bool:
    try:
        return is_memory(path.stat().st_dev)
    except OSError:
        return False


def _is_certainly_a_pool(report: PoolReport) -> bool:
    """Returns whether a folder is a store, or the remains of one, whose removal needs no user."""
    try:
        with Directory(report.folder) as directory:
            names = directory.names()
            # Other folders may have files of these names.
            regular = all(stat.S_ISREG(directory.stat(name).st_mode) for name in names)
    except (CacheError, OSError):
        return False
    # The remains of a killed process have lock files, which are created first.
    return regular and names <= FILES and (report.spec is not None or names >= LOCK_FILES)


def _report(directory: Directory) -> PoolReport | None:
    about: dict[str, Any] = {
        "folder": directory.path,
        "bytes": _allocated_bytes(directory),
        "opened": _opened(directory),
        "in_use": _in_use(directory),
    }
    try:
        spec = PoolSpec.from_dict(read_checked_header(directory))
        return PoolReport(spec=spec, ready=_count_ready(directory, spec), **about)
    except (CacheError, OSError) as error:
        # Another process may have removed it since it was opened.
        return None if directory.is_gone else PoolReport(trouble=str(error), **about)


def _count_ready(directory: Directory, spec: PoolSpec) -> int:
    # Read, not mapped: if the store were rebuilt in the meantime, a mapping could kill this
    # process.
    words = np.frombuffer(directory.read("words"), WORD)
    return int((words[: spec.shard.kept_samples] >= READY).sum())


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


def _opened(directory: Directory) -> datetime:
    named = "users" in directory.names()
    return _local_time(directory.stat("users") if named else os.fstat(directory.fileno()))


def _local_time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime).astimezone()


def _in_use(directory: Directory) -> bool:
    """Returns whether a process has the store open, or creates, opens or removes it."""
    # A process that opens or creates the store holds the folder's lock, and must not mistake the
    # short lock of this process for another user of the store.
    with lock_folder(directory, wait=False) as mine:
        return not mine or _has_users(directory)


def _has_users(directory: Directory) -> bool:
    try:
        with closed_on_fork(lambda: directory.open("users", os.O_RDONLY)) as handle:
            # The lock is granted if no other process has the store open.
            return not lock_file(handle, wait=False)
    except FileNotFoundError:
        return False
