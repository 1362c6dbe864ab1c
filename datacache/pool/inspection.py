"""What pools there are, seen from outside: nothing is made or mapped, and no job waits."""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from datacache.errors import CacheError
from datacache.pool.folder import FILES, lock
from datacache.pool.header import HEADER, check, opened
from datacache.pool.heap import USED
from datacache.pool.pool import READY, WORD, Plan
from datacache.system.access import Directory
from datacache.system.forks import unshared

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
        with Directory(folder) as directory:
            return _report(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CacheError as error:
        return _refused(folder, error)


def contents(folder: Path) -> Contents:
    """What is in a pool.

    Raises:
      CacheError: If it is none, or cannot be used.
    """
    with opened(folder) as directory:
        if not _like_a_pool(folder):
            # It says what is missing.
            check(directory)
        return _contents(directory)


def _report(directory: Directory) -> Report | None:
    about: dict[str, Any] = {
        "bytes": _taken(directory),
        "made": _changed(directory, HEADER),
        "opened": _changed(directory, "users"),
        "in_use": _in_use(directory),
    }
    try:
        return Report(folder=directory.path, contents=_contents(directory), **about)
    except (CacheError, OSError) as error:
        return (
            None
            if directory.has_gone
            else Report(folder=directory.path, trouble=str(error), **about)
        )


def _refused(folder: Path, error: CacheError) -> Report:
    """Of a folder that is not to be opened, such as somebody else's."""
    status = folder.stat(follow_symlinks=False)
    changed = datetime.fromtimestamp(status.st_mtime).astimezone()
    return Report(
        folder=folder, bytes=0, made=changed, opened=changed, in_use=False, trouble=str(error)
    )


def _contents(directory: Directory) -> Contents:
    if HEADER not in directory.names():
        raise CacheError(
            f"A pool must be finished. Received: {directory.path}, which is being made, or was left by a kill."
        )
    about = check(directory)
    plan = Plan.from_dict(about)
    slots = plan.part.kept
    ready = int((_read(directory, "words", WORD)[:slots] >= READY).sum())
    used = capacity = None
    if plan.layout.varies:
        used, capacity = (
            int(_read(directory, "end", np.dtype(np.int64))[USED]),
            about["files"]["heap"],
        )
    return Contents(plan=plan, slots=slots, ready=ready, heap_used=used, heap_capacity=capacity)


def _read(directory: Directory, name: str, dtype: np.dtype[Any]) -> np.ndarray:
    with open(directory.open(name, os.O_RDONLY), "rb") as stream:
        return np.fromfile(stream, dtype)


def _like_a_pool(path: Path) -> bool:
    names = _names(path)
    return HEADER in names or (bool(names) and names <= FILES)


def _names(path: Path) -> set[str]:
    """Of what is in a folder; none if it is no folder, another user's, or has gone."""
    try:
        return set(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()


def _taken(directory: Directory) -> int:
    """Heaps have holes, so that sizes of files say little."""
    return sum(BLOCK * directory.stat(name).st_blocks for name in directory.names())


def _changed(directory: Directory, name: str) -> datetime:
    status = directory.stat(name) if name in directory.names() else os.fstat(directory.descriptor)
    return datetime.fromtimestamp(status.st_mtime).astimezone()


def _in_use(directory: Directory) -> bool:
    """Asks for what only `remove` takes, and gives it back at once: that nobody else is in the way tells."""
    # Whoever opens the pool has the lock, and must not find this process to have it open.
    with lock(directory, wait=False) as mine:
        return not mine or _has_users(directory)


def _has_users(directory: Directory) -> bool:
    try:
        with unshared(lambda: directory.open("users", os.O_RDONLY)) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
