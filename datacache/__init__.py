"""Samples decoded once, read at memory speed ever after (CommLib, section 4.1).

Importing it loads nothing; names load when they are first used, so that `python -m datacache ls` needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datacache.cache import Cache, RandomAccess, default_memory
    from datacache.folder import CacheError
    from datacache.order import Order, Position
    from datacache.sources import SourceError, from_dataset, from_folder, from_tfds
    from datacache.statistics import Statistics

__all__ = [
    "Cache",
    "CacheError",
    "Order",
    "Position",
    "RandomAccess",
    "SourceError",
    "Statistics",
    "default_memory",
    "from_dataset",
    "from_folder",
    "from_tfds",
]

_HOME = {
    "cache": ("Cache", "RandomAccess", "default_memory"),
    "folder": ("CacheError",),
    "order": ("Order", "Position"),
    "sources": ("SourceError", "from_dataset", "from_folder", "from_tfds"),
    "statistics": ("Statistics",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"datacache.{module}"), name)
    raise AttributeError(f"module 'datacache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
