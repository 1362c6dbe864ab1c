"""Errors about the folder of a cache."""

from __future__ import annotations

from pathlib import Path


class CacheError(RuntimeError):
    """Error of a folder that is no cache, or cannot hold one."""


class NoRoomError(CacheError):
    """Error of a pool for which there is too little room."""


class DamagedError(CacheError):
    """Error of a pool that is not as it was made; jobs make it anew once no process has it open.

    Args:
      what: The rule and what was received.
      folder: The pool's folder, for the remedy.

    Attributes:
      what: The message without the remedy.
    """

    def __init__(self, what: str, folder: Path) -> None:
        super().__init__(f"{what} Remove it: python -m datacache rm {folder}")
        self.what = what
