"""Pools that no process has open: of sources and functions that have changed since, or of jobs that have ended.

They keep their memory, for the next job may find its samples there. Where room is needed, it goes.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from pathlib import Path

from datacache.errors import CacheError
from datacache.from_tfposeidon import readable_size
from datacache.pool.folder import FILES, STAYS, remove
from datacache.pool.inspection import Report, look, pools
from datacache.system.access import Directory
from datacache.system.memory import is_memory

log = logging.getLogger("datacache")


FEW = 2**20
"""Bytes that others may take while so many are given back: whether there is more room does not tell then."""


def idle(root: Path, but: Path | None = None) -> list[Report]:
    """The pools in memory that no process has open, first those that were opened longest ago.

    Args:
      root: Folder of pools. What lies on a disk, or may be anything but a pool, is left out.
      but: A pool to leave out.
    """
    found = (
        [look(path) for path in pools(root) if path != but and _in_memory(path)]
        if root.is_dir()
        else []
    )
    return sorted(
        (one for one in found if one and not one.in_use and _is_surely(one)),
        key=lambda one: one.opened,
    )


def make_room(root: Path, but: Path, room: Callable[[], int], enough: int) -> None:
    """Removes pools that no process has open, those first that were opened longest ago, until there is enough room.

    It ends, too, when there is no more room after a removal than before: then something else is the limit.

    Args:
      root: Folder of pools.
      but: The pool that is to be made there.
      room: Says how many bytes there are.
      enough: How many there should be.
    """
    left = room()
    for report in idle(root, but) if left < enough else ():
        if not _removed(report):
            continue
        before, left = left, room()
        if left >= enough:
            return
        if left <= before and report.bytes >= FEW:
            log.warning("datacache: that made no room, so that other pools are kept.")
            return


def _removed(report: Report) -> bool:
    try:
        remove(report.folder)
    except (CacheError, OSError) as error:
        # Somebody has opened it by now, or it is somebody else's.
        log.info("datacache: kept. %s", error)
        return False
    log.warning(
        "datacache: removed %s for room: %s, which no process had open since %s",
        report.folder,
        readable_size(report.bytes),
        f"{report.opened:%Y-%m-%d %H:%M}",
    )
    return True


def _in_memory(path: Path) -> bool:
    try:
        return is_memory(path.stat().st_dev)
    except OSError:
        return False


def _is_surely(report: Report) -> bool:
    """Whether it is a pool, or what is left of one: others may have files of such names, too."""
    try:
        with Directory(report.folder) as directory:
            names = directory.names()
            regular = all(stat.S_ISREG(directory.stat(name).st_mode) for name in names)
    except (CacheError, OSError):
        return False
    # All that is made begins with these two.
    return regular and names <= FILES and (report.contents is not None or names >= STAYS)
