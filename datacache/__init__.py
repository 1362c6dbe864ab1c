"""Caches decoded samples, so that later epochs read them at memory speed (CommLib, section 4.1).

Importing the package loads no other module. Each public name is imported at its first use, so that
commands such as `python -m datacache ls` start without TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datacache.batches import RandomAccess as RandomAccess
    from datacache.cache import Cache as Cache
    from datacache.errors import CacheError as CacheError
    from datacache.loading.parallel_loader import CropAndMirror as CropAndMirror
    from datacache.loading.parallel_loader import LoaderError as LoaderError
    from datacache.loading.parallel_loader import ParallelLoader as ParallelLoader
    from datacache.order import Order as Order
    from datacache.order import Position as Position
    from datacache.pool.folder import default_memory as default_memory
    from datacache.sources.image_folder import from_folder as from_folder
    from datacache.sources.record_files import from_tfrecords as from_tfrecords
    from datacache.sources.source import SourceError as SourceError
    from datacache.sources.tf_dataset import from_dataset as from_dataset
    from datacache.sources.tfds_builder import from_tfds as from_tfds
    from datacache.statistics import Statistics as Statistics

_NAMES_BY_MODULE = {
    "batches": ("RandomAccess",),
    "cache": ("Cache",),
    "errors": ("CacheError",),
    "loading.parallel_loader": ("CropAndMirror", "LoaderError", "ParallelLoader"),
    "order": ("Order", "Position"),
    "pool.folder": ("default_memory",),
    "sources.image_folder": ("from_folder",),
    "sources.record_files": ("from_tfrecords",),
    "sources.source": ("SourceError",),
    "sources.tf_dataset": ("from_dataset",),
    "sources.tfds_builder": ("from_tfds",),
    "statistics": ("Statistics",),
}
__all__ = sorted(name for names in _NAMES_BY_MODULE.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(importlib.import_module(f"datacache.{module}"), name)
    raise AttributeError(f"module 'datacache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
