"""Provides a folder of images that ranks share."""

import contextlib
import shutil
from pathlib import Path

from tests import drawn
from tests.helpers.callbacks import shared_folder
from tests.helpers.over_ranks import exchange_objects

SAMPLES, BATCH = 41, 12


@contextlib.contextmanager
def make_folder(wire):
    """Yields a folder of images that ranks share, and removes it after all ranks have used it."""
    path = Path(shared_folder(wire))
    if wire.topology.rank == 0:
        drawn.folder(path / "images", SAMPLES)
    exchange_objects(None, wire, "drawn")
    try:
        yield path
    finally:
        exchange_objects(None, wire, "left")
        if wire.topology.rank == 0:
            shutil.rmtree(path)
