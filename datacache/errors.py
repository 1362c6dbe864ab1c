"""What can be wrong with the folder of a cache."""

from __future__ import annotations

from pathlib import Path


class CacheError(RuntimeError):
    """A folder that is no cache, or that cannot hold one."""


class NoRoomError(CacheError):
    """Too little room for a pool."""


class DamagedError(CacheError):
    """A pool that is not as it was made: jobs make it anew, once no process has it open.

    Args:
      what: The rule and what was received.
      folder: Of the pool.
    """

    def __init__(self, what: str, folder: Path) -> None:
        super().__init__(f"{what} Remove it: python -m datacache rm {folder}")
        self.what = what
