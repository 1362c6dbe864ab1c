"""A folder of images that ranks share."""

import contextlib
import shutil
from pathlib import Path

from tests import drawn
from tests.helpers.callbacks import shared_folder
from tests.helpers.over_ranks import exchange_objects

SAMPLES, BATCH = 41, 12


@contextlib.contextmanager
def make_folder(wire):
    """A folder that all ranks see, with images; removed when all have left."""
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
