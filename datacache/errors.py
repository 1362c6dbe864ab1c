"""Errors about the folder of a cache."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn


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


class Closed:
    """Takes the place of what a cache has let go of: each use of it is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CacheError(
            "A cache is read before it is closed. Received: a call after close(). Open it again, "
            "datacache.Cache(...); a `with` block closes it at its end."
        )

    def __len__(self) -> int:
        return int(self.length)
