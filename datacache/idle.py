"""Pools that no process has open: of sources and functions that have changed since, or of jobs that have ended.

They keep their memory, for the next job may find its samples there. Where room is needed, it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from datacache.errors import CacheError
from datacache.folder import remove
from datacache.inspection import Report, look, pools
from tfposeidon.text import readable

log = logging.getLogger("tfposeidon")


def idle(root: Path, but: Path) -> list[Report]:
    """The pools in a folder that no process has open, but for one; first those that were opened longest ago."""
    found = [look(path) for path in pools(root) if path != but] if root.is_dir() else []
    return sorted((one for one in found if one and not one.in_use), key=lambda one: one.opened)


def make_room(root: Path, but: Path, enough: Callable[[], bool]) -> None:
    """Removes pools that no process has open, those first that were opened longest ago, until there is enough.

    Args:
      root: Folder of pools.
      but: The pool that is to be made there.
      enough: Says whether there is.
    """
    if enough():
        return
    for report in idle(root, but):
        try:
            remove(report.folder)
        except CacheError as error:
            # Somebody has opened it by now, or it is somebody else's.
            log.info("datacache: kept. %s", error)
            continue
        log.warning(
            "datacache: removed %s for room: %s, which no process had open since %s",
            report.folder,
            readable(report.bytes),
            f"{report.opened:%Y-%m-%d %H:%M}",
        )
        if enough():
            return
