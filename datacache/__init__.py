"""Cache of decoded samples, which are then read at memory speed (CommLib, section 4.1).

Importing the package loads no other module. Names load at their first use, so that commands such as
`python -m datacache ls` start without TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datacache.cache import Cache, RandomAccess
    from datacache.errors import CacheError
    from datacache.loading.crop_and_mirror import CropAndMirror
    from datacache.loading.parallel_loader import LoaderError, ParallelLoader
    from datacache.order import Order, Position
    from datacache.pool.folder import default_memory
    from datacache.sources.image_folder import from_folder
    from datacache.sources.record_files import from_tfrecords
    from datacache.sources.source import SourceError
    from datacache.sources.tf_dataset import from_dataset
    from datacache.sources.tfds_builder import from_tfds
    from datacache.statistics import Statistics

__all__ = [
    "Cache",
    "CacheError",
    "CropAndMirror",
    "LoaderError",
    "Order",
    "ParallelLoader",
    "Position",
    "RandomAccess",
    "SourceError",
    "Statistics",
    "default_memory",
    "from_dataset",
    "from_folder",
    "from_tfds",
    "from_tfrecords",
]

_NAMES_BY_MODULE = {
    "cache": ("Cache", "RandomAccess"),
    "loading.crop_and_mirror": ("CropAndMirror",),
    "errors": ("CacheError",),
    "pool.folder": ("default_memory",),
    "order": ("Order", "Position"),
    "loading.parallel_loader": ("LoaderError", "ParallelLoader"),
    "sources.image_folder": ("from_folder",),
    "sources.record_files": ("from_tfrecords",),
    "sources.source": ("SourceError",),
    "sources.tf_dataset": ("from_dataset",),
    "sources.tfds_builder": ("from_tfds",),
    "statistics": ("Statistics",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(importlib.import_module(f"datacache.{module}"), name)
    raise AttributeError(f"module 'datacache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
