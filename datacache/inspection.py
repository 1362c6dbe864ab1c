"""What pools there are, seen from outside: nothing is made or mapped, and no job waits."""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from datacache.folder import FILES, HEADER, CacheError, read_header
from datacache.pool import READY, Plan

WORD = np.dtype(np.uint64)
BLOCK = 512
"""Bytes that `stat` counts in, whatever the file system's own blocks are."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a pool.

    Attributes:
      plan: What it was made with.
      slots: Samples that have room.
      ready: Samples that can be read.
      heap_used: Bytes of components that differ in size; `None` if none does.
      heap_capacity: At most so many.
    """

    plan: Plan
    slots: int
    ready: int
    heap_used: int | None
    heap_capacity: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = self.plan.to_dict()
        about = asdict(self) | {"source": plan["source"], "layout": plan["layout"]} | plan["part"]
        del about["plan"]
        # Fewer than it was made for, if its part has no more.
        return about | {"slots": self.slots}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A pool, or what is left of one.

    Attributes:
      folder: Where it is.
      bytes: That it takes of the file system.
      made: When it was made.
      opened: When a process last opened it.
      in_use: Whether a process has it open.
      contents: `None` if it cannot be used.
      trouble: Why not.
    """

    folder: Path
    bytes: int
    made: datetime
    opened: datetime
    in_use: bool
    contents: Contents | None = None
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        about = asdict(self) | {"folder": str(self.folder)}
        del about["contents"]
        times = {name: about[name].isoformat(timespec="seconds") for name in ("made", "opened")}
        return about | times | (self.contents.to_dict() if self.contents else {})


def pools(root: Path) -> list[Path]:
    """The folder itself if it is a pool or what is left of one, else those directly in it.

    Raises:
      CacheError: If there is no such folder.
    """
    if not root.is_dir():
        raise CacheError(f"Pools are in folders. Received: {root}, which is none. Check the path.")
    if _like_a_pool(root):
        return [root]
    return [root / name for name in sorted(_names(root)) if _like_a_pool(root / name)]


def look(folder: Path) -> Report | None:
    """What there is to say of a pool; `None` if it has gone."""
    try:
        about: dict[str, Any] = {
            "bytes": _taken(folder),
            "made": _changed(folder, HEADER),
            "opened": _changed(folder, "users"),
            "in_use": _in_use(folder),
        }
    except FileNotFoundError:
        return None
    try:
        return Report(folder=folder, contents=_contents(folder), **about)
    except (CacheError, OSError) as error:
        return Report(folder=folder, trouble=str(error), **about) if folder.exists() else None


def contents(folder: Path) -> Contents:
    """What is in a pool.

    Raises:
      CacheError: If it is none, or cannot be used.
    """
    if not _like_a_pool(folder):
        # It says what is missing.
        read_header(folder)
    return _contents(folder)


def _contents(folder: Path) -> Contents:
    if HEADER not in _names(folder):
        raise CacheError(f"A pool must be finished. Received: {folder}, which is being made, or was left by a kill.")
    header = read_header(folder)
    try:
        plan = Plan.from_dict(header)
    except (AttributeError, KeyError, TypeError) as error:
        raise CacheError(
            f"A pool's {HEADER} must say what it holds. Received: {folder}, without {error}. Remove it."
        ) from error
    slots = plan.part.kept
    _at_least(folder / "samples", plan.layout.offsets(slots)[-1])
    _at_least(folder / "words", slots * WORD.itemsize)
    ready = int((np.fromfile(folder / "words", WORD, slots) >= READY).sum())
    used = capacity = None
    if plan.layout.varies:
        _at_least(folder / "end", 16)
        used = int(np.fromfile(folder / "end", np.int64, 1)[0])
        capacity = _at_least(folder / "heap", used)
    return Contents(plan=plan, slots=slots, ready=ready, heap_used=used, heap_capacity=capacity)


def _at_least(path: Path, size: int) -> int:
    """The bytes of a file: reading beyond its end would kill the process that maps it."""
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise CacheError(
            f"A pool's files must be whole. Received: {path} of {found} bytes, not {size}. Remove {path.parent}."
        )
    return found


def _like_a_pool(path: Path) -> bool:
    names = _names(path)
    return HEADER in names or (bool(names) and names <= FILES)


def _names(path: Path) -> set[str]:
    """Of what is in a folder; none if it is no folder, another user's, or has gone."""
    try:
        return set(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()


def _taken(folder: Path) -> int:
    """Heaps have holes, so that sizes of files say little."""
    return sum(BLOCK * (folder / name).stat().st_blocks for name in _names(folder))


def _changed(folder: Path, name: str) -> datetime:
    path = folder / name
    return datetime.fromtimestamp((path if path.exists() else folder).stat().st_mtime).astimezone()


def _in_use(folder: Path) -> bool:
    """Asks for what only `remove` takes, and gives it back at once: that nobody else is in the way tells."""
    try:
        handle = os.open(folder / "users", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
