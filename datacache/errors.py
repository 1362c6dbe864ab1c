"""Defines the errors of stores, and the placeholder for the objects of a closed cache."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn


class CacheError(RuntimeError):
    """Raised if a store cannot be created, opened or removed, or a closed cache is used."""


class NoRoomError(CacheError):
    """Raised if there is too little free space for a store."""


class DamagedError(CacheError):
    """Raised for a damaged store, which jobs rebuild; `what` is the message without the remedy."""

    def __init__(self, what: str, folder: Path) -> None:
        super().__init__(f"{what} Remove the store: python -m datacache rm {folder}")
        self.what = what


class Closed:
    """Replaces a released object of a closed cache: every use raises an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CacheError(
            "A cache must be open when it is used. Received: a call after close(). Open the cache "
            "again: datacache.Cache(...). A `with` block closes the cache at its end."
        )

    def __len__(self) -> int:
        return int(self.length)
