"""Inspects stores from outside: `ls` and the search for idle stores never change or block them."""

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
    IN_USE,
    STORE,
    lock_folder,
    open_store,
    read_header,
    remove,
)
from datacache.pool.samples import READY
from datacache.pool.spec import PoolSpec
from datacache.system.access import Directory
from datacache.system.descriptors import is_byte_locked

log = logging.getLogger("datacache")
BLOCK_BYTES = 512
"""Unit of `st_blocks` in bytes, independent of the block size of the file system."""
NOTICEABLE_BYTES = 2**20
"""Smallest size in bytes of a store whose removal shows whether removals free space. Other
processes may allocate less than this in the meantime."""


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Report on a store, or on the remains of one.

    `bytes` is the disk usage. If the store cannot be used, `trouble` is the reason, and the fields
    with default `None` are unknown. Otherwise, `ready` of `samples` samples can be read, and
    `slots` samples fit. `is_spare` is true if the store is in memory and can be removed without
    confirmation.
    """

    folder: Path
    opened: datetime
    bytes: int = 0
    in_use: bool = False
    is_spare: bool = False
    source: str | None = None
    ready: int | None = None
    slots: int | None = None
    samples: int | None = None
    trouble: str = ""


def find_pools(root: Path) -> list[Path]:
    """Returns the folder if it is a store or the remains of one, else the stores in it."""
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
        # The store may belong to another user, for example.
        opened = _local_time(folder.stat(follow_symlinks=False))
        return PoolReport(folder=folder, opened=opened, trouble=str(error))


def find_idle_pools(root: Path, except_for: Path | None = None) -> list[PoolReport]:
    """Returns the stores in memory that no process has open, least recently opened first."""
    # Idle stores retain their memory, because the next job may read their samples.
    if not root.is_dir():
        return []
    reports = [inspect_pool(path) for path in find_pools(root) if path != except_for]
    idle = [report for report in reports if report and report.is_spare]
    return sorted(idle, key=lambda report: report.opened)


def make_room(root: Path, new_pool: Path, room: Callable[[], int], enough: int) -> None:
    """Removes idle stores, least recently opened first, until there is enough free space."""
    left = room()
    for report in find_idle_pools(root, new_pool) if left < enough else ():
        try:
            remove(report.folder)
        except (CacheError, OSError) as error:
            # Another process may have opened the store by now.
            log.info("datacache: a store was not removed. %s", error)
            continue
        log.warning(
            "datacache: removed the unused store %s to free %s: it was last opened at %s",
            report.folder,
            readable_size(report.bytes),
            f"{report.opened:%Y-%m-%d %H:%M}",
        )
        before, left = left, room()
        if left >= enough:
            return
        # If a removal frees no space, another limit applies, such as a quota.
        if left <= before and report.bytes >= NOTICEABLE_BYTES:
            log.warning("datacache: the removal freed no space, so other stores are retained.")
            return


def _report(directory: Directory) -> PoolReport | None:
    found = {name: directory.stat(name) for name in directory.names()}
    status, in_use = os.fstat(directory.fileno()), _in_use(directory)
    is_spare = (
        set() < found.keys() <= FILES
        and all(stat.S_ISREG(one.st_mode) for one in found.values())
        and not in_use
        and is_memory(status.st_dev)
    )
    about: dict[str, Any] = {
        "folder": directory.path,
        # Count blocks, because the size of a file with a sparse heap includes its holes.
        "bytes": sum(BLOCK_BYTES * one.st_blocks for one in found.values()),
        "opened": _local_time(status),
        "in_use": in_use,
        "is_spare": is_spare,
    }
    try:
        spec, words = _read_store(directory)
    except (CacheError, OSError) as error:
        # Another process may have removed the folder in the meantime.
        return None if directory.is_gone else PoolReport(trouble=str(error), **about)
    shard, ready = spec.shard, int((words >= READY).sum())
    slots, samples = shard.kept_samples, shard.samples
    return PoolReport(source=spec.source, ready=ready, slots=slots, samples=samples, **about)


def _read_store(directory: Directory) -> tuple[PoolSpec, np.ndarray]:
    """Returns the description of a store, and the metadata words of its samples."""
    with open_store(directory, os.O_RDONLY) as file:
        spec, header_bytes = read_header(file, directory.path)
        # Read the words and do not map them: truncation would kill a process that maps the file.
        words = os.pread(file.fileno(), 8 * spec.shard.kept_samples, header_bytes)
    return spec, np.frombuffer(words, np.uint64)


def _looks_like_a_pool(path: Path) -> bool:
    names = _names(path)
    return STORE in names or (bool(names) and names <= FILES)


def _names(path: Path) -> set[str]:
    """Returns the names in a folder, or an empty set if the path cannot be listed."""
    try:
        return set(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()


def _local_time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime).astimezone()


def _in_use(directory: Directory) -> bool:
    """Returns whether a process has the store open, or creates, opens or removes it."""
    with lock_folder(directory, wait=False) as mine, contextlib.suppress(FileNotFoundError):
        if mine:
            with directory.open(STORE, os.O_RDONLY) as file:
                return is_byte_locked(file, IN_USE)
    return not mine
