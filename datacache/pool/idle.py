"""Idle pools, which no process has open: of sources that have changed since, or of jobs that ended.

They keep their memory, because the next job may find its samples there; where room is needed, they
are removed.
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
"""Smaller pools are no test of whether a removal makes room: others may take as much meanwhile."""


def find_idle_pools(root: Path, except_for: Path | None = None) -> list[PoolReport]:
    """Returns the pools in memory that no process has open, the least recently opened first."""
    if not root.is_dir():
        return []
    paths = [path for path in find_pools(root) if path != except_for and _lies_in_memory(path)]
    reports = [report for path in paths if (report := inspect_pool(path))]
    idle = [report for report in reports if not report.in_use and _is_certainly_a_pool(report)]
    return sorted(idle, key=lambda report: report.opened)


def make_room(root: Path, new_pool: Path, room: Callable[[], int], enough: int) -> None:
    """Removes idle pools, the least recently opened first, until there is enough room.

    It also ends when a removal makes no more room: then something else is the limit, such as a
    quota, and other pools would go for nothing.
    """
    left = room()
    for report in find_idle_pools(root, new_pool) if left < enough else ():
        if not _try_remove(report):
            continue
        before, left = left, room()
        if left >= enough:
            return
        if left <= before and report.bytes >= NOTICEABLE_BYTES:
            log.warning("datacache: that made no room, so that other pools are kept.")
            return


def _try_remove(report: PoolReport) -> bool:
    try:
        remove(report.folder)
    except (CacheError, OSError) as error:
        # Somebody has opened it by now, or it belongs to another user.
        log.info("datacache: kept. %s", error)
        return False
    log.warning(
        "datacache: removed %s for room: %s, which no process had open since %s",
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
    """Returns whether a folder is a pool, or what is left of one.

    Others may have files of such names, too, and what is removed here is removed unasked.
    """
    try:
        with Directory(report.folder) as directory:
            names = directory.names()
            regular = all(stat.S_ISREG(directory.stat(name).st_mode) for name in names)
    except (CacheError, OSError):
        return False
    # Whatever a kill leaves of a pool has its lock files, which are made first.
    return regular and names <= FILES and (report.contents is not None or names >= LOCK_FILES)
