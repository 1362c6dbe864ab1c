"""Stores seen from outside: `ls` and the search for idle ones create nothing and block no job."""

from __future__ import annotations

import contextlib
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
    """Report on a store, or on the remains of one, whose `bytes` are its disk usage.

    `spec` is `None` if it cannot be used, and `trouble` the reason; otherwise `ready` samples are
    readable. `is_spare` is true if it is in memory, and its removal needs no confirmation.
    """

    folder: Path
    opened: datetime
    bytes: int = 0
    in_use: bool = False
    is_spare: bool = False
    spec: PoolSpec | None = None
    ready: int = 0
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON, as `ls --json` prints it."""
        opened = self.opened.isoformat(timespec="seconds")
        content = {"folder": str(self.folder), "bytes": self.bytes, "opened": opened}
        content |= {"in_use": self.in_use, "trouble": self.trouble}
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
        return PoolReport(folder=folder, opened=opened, trouble=str(error))


def find_idle_pools(root: Path, except_for: Path | None = None) -> list[PoolReport]:
    """Returns the stores in memory that no process has open, least recently opened first."""
    # They retain their memory, because the next job may find its samples there.
    if not root.is_dir():
        return []
    reports = [inspect_pool(path) for path in find_pools(root) if path != except_for]
    idle = [report for report in reports if report and report.is_spare]
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


def _report(directory: Directory) -> PoolReport | None:
    found = {name: directory.stat(name) for name in directory.names()}
    in_use = _in_use(directory)
    about: dict[str, Any] = {
        "folder": directory.path,
        # Heaps are sparse, so the sizes of files are not informative.
        "bytes": sum(BLOCK_BYTES * status.st_blocks for status in found.values()),
        "opened": _local_time(found.get("users") or os.fstat(directory.fileno())),
        "in_use": in_use,
    }
    # Other folders may have files of these names.
    only_files = found.keys() <= FILES and all(stat.S_ISREG(one.st_mode) for one in found.values())
    is_spare = only_files and not in_use and is_memory(os.fstat(directory.fileno()).st_dev)
    try:
        spec = PoolSpec.from_dict(read_checked_header(directory))
        ready = _count_ready(directory, spec)
        return PoolReport(spec=spec, ready=ready, is_spare=is_spare, **about)
    except (CacheError, OSError) as error:
        # Another process may have removed it since it was opened.
        if directory.is_gone:
            return None
        # The remains of a killed process have lock files, which are created first.
        is_spare = is_spare and found.keys() >= LOCK_FILES
        return PoolReport(trouble=str(error), is_spare=is_spare, **about)


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


def _local_time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime).astimezone()


def _in_use(directory: Directory) -> bool:
    """Returns whether a process has the store open, or creates, opens or removes it."""
    # A process that opens or creates the store holds the folder's lock, and must not mistake the
    # short lock of this process for another user of the store.
    with lock_folder(directory, wait=False) as mine, contextlib.suppress(FileNotFoundError):
        if mine:
            with closed_on_fork(lambda: directory.open("users", os.O_RDONLY)) as handle:
                # The lock is granted if no other process has the store open.
                return not lock_file(handle, wait=False)
    return not mine
