"""Where samples come from: one kind of source per file."""

from datacache.sources.image_folder import from_folder
from datacache.sources.source import RandomSource, Source, SourceError, StreamSource
from datacache.sources.tf_dataset import from_dataset
from datacache.sources.tfds_builder import from_tfds

__all__ = ["RandomSource", "Source", "SourceError", "StreamSource", "from_dataset", "from_folder", "from_tfds"]
