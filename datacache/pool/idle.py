"""Idle stores, which no process has open: of outdated sources, or of jobs that have ended.

They retain their memory, because the next job may find its samples there, and are removed if space
is needed.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from pathlib import Path

from datacache.errors import CacheError
from datacache.from_tfposeidon import is_memory, readable_size
from datacache.pool.folder import FILES, LOCK_FILES, remove
from datacache.pool.inspection import PoolReport, find_pools, inspect_pool
from datacache.system.access import Directory

log = logging.getLogger("datacache")

NOTICEABLE_BYTES = 2**20
"""The removal of a smaller store is not a test of whether removals free space: others may allocate
as much in the meantime."""


def find_idle_pools(root: Path, except_for: Path | None = None) -> list[PoolReport]:
    """Returns the stores in memory that no process has open, least recently opened first."""
    if not root.is_dir():
        return []
    paths = [path for path in find_pools(root) if path != except_for and _lies_in_memory(path)]
    reports = [report for path in paths if (report := inspect_pool(path))]
    idle = [report for report in reports if not report.in_use and _is_certainly_a_pool(report)]
    return sorted(idle, key=lambda report: report.opened)


def make_room(root: Path, new_pool: Path, room: Callable[[], int], enough: int) -> None:
    """Removes idle stores, least recently opened first, until there is enough free space.

    It also stops if a removal frees no space: then something else is the limit, such as a quota,
    and further removals would be useless.
    """
    left = room()
    for report in find_idle_pools(root, new_pool) if left < enough else ():
        if not _try_remove(report):
            continue
        before, left = left, room()
        if left >= enough:
            return
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
    """Returns whether a folder is a store, or the remains of one.

    Other folders may have files of these names, and removal here is not confirmed by the user.
    """
    try:
        with Directory(report.folder) as directory:
            names = directory.names()
            regular = all(stat.S_ISREG(directory.stat(name).st_mode) for name in names)
    except (CacheError, OSError):
        return False
    # The remains of a killed process have lock files, which are created first.
    return regular and names <= FILES and (report.contents is not None or names >= LOCK_FILES)
