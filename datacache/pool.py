"""A pool of samples that all processes of a node map: written once, read by everybody."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datacache.folder import Folder, NoRoomError, allocate, read_header
from datacache.heap import Heap
from datacache.layout import Layout, batch
from datacache.native import gather
from datacache.part import Part

READY = 1 << 32
"""Set in a sample's word beside the checksum in the lower half: what is 0 was never finished."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a pool is made with.

    Attributes:
      layout: Of the samples.
      part: The samples that have room.
      heap_bytes: At most so many for components that differ in size.
      source: What a user would call its samples.
    """

    layout: Layout
    part: Part
    heap_bytes: int = 0
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"layout": self.layout.to_dict(), "part": asdict(self.part), "source": self.source}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Plan:
        """The inverse, of what JSON made of it."""
        return cls(
            layout=Layout.from_dict(content["layout"]), part=Part(**content["part"]), source=content.get("source", "")
        )


class Pool:
    """Samples in a folder, of `/dev/shm` or of a disk.

    A sample is written, then its word: a checksum and a mark that it is ready. A process that is killed in between
    leaves a sample that is not ready, and locks that the kernel has released.

    Args:
      folder: Made if it does not exist; otherwise it is taken as it is.
      plan: Says what to make, if there is none; called by one process of the node.

    Raises:
      CacheError: If the folder holds something else, or there is no room.
    """

    def __init__(self, folder: Path, plan: Callable[[], Plan]) -> None:
        self._folder = Folder(folder, lambda path: _make(path, plan()))
        self.plan = Plan.from_dict(self._folder.about)
        self.layout = self.plan.layout
        self._places = self.plan.part.places()
        self.slots = self.plan.part.kept
        self._samples = np.flatnonzero(self._places >= 0)
        self._columns = self.layout.columns(self._mapping("samples"), self.slots)
        self._words = np.ndarray((self.slots,), np.uint64, self._mapping("words"))
        self._heap = Heap(self.folder) if self.layout.varies else None
        self._verified = np.zeros(self.slots, bool)

    @property
    def folder(self) -> Path:
        return self._folder.path

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples the pool keeps, `[n]` bool."""
        return self._places[samples] >= 0

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples can be read, `[n]` bool."""
        places = self._places[samples]
        return (places >= 0) & (self._words[np.maximum(places, 0)] >= READY)

    def put(self, sample: int, arrays: Sequence[Any]) -> bool:
        """Writes a sample that has room, and then that it is ready; `False` if it was too large for what is left.

        Raises:
          ValueError: If it has other shapes or types than the layout.
        """
        place = self._places[sample]
        self._words[place] = 0
        found = self.layout.check(arrays, "sample {}".format, sample)
        if self._heap is not None:
            extents = self._add(self._heap, found)
            if extents is None:
                return False
            found = extents
        for column, array in zip(self._columns, found, strict=True):
            column[place] = array
        self._words[place] = READY | (self._checksum(place) or 0)
        self._verified[place] = True
        return True

    def _add(self, heap: Heap, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Puts what varies into the heap, all or nothing; what the columns hold then."""
        pairs = list(zip(self.layout.components, arrays, strict=True))
        contents = [component.encoded(array) if component.varies else b"" for component, array in pairs]
        begin = heap.add(b"".join(contents))
        if begin is None:
            return None
        offsets = itertools.accumulate(map(len, contents), initial=begin)
        return [
            np.array([offset, len(content), *array.shape]) if component.varies else array
            for (component, array), content, offset in zip(pairs, contents, offsets, strict=False)
        ]

    def gather(self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Copies samples that are ready: one array `[n, *shape]` for each component, padded where samples differ.

        Args:
          samples: Their numbers, `[n]`.
          into: Arrays to copy to, in place of new ones, if no component varies.
        """
        if self._heap is not None:
            return batch([self.sample(sample) for sample in samples], self.layout)
        places = self._places[samples]
        targets = (
            [np.empty((len(samples), *c.shape[1:]), c.dtype) for c in self._columns] if into is None else list(into)
        )
        for column, target in zip(self._columns, targets, strict=True):
            gather(column, places, target)
        return targets

    def sample(self, sample: int) -> list[np.ndarray]:
        """One sample that is ready: views of the pool, one for each component."""
        place = self._places[sample]
        arrays = []
        for column, component in zip(self._columns, self.layout.components, strict=True):
            array = column[place]
            if component.varies:
                assert self._heap is not None
                array = component.decoded(self._heap.content(*map(int, array[:2])), array[2:])
            arrays.append(array)
        return arrays

    def samples(self, samples: np.ndarray, made: dict[int, list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Samples that are ready, but for those that were made just now."""
        return [made[i] if i in made else self.sample(i) for i in samples.tolist()]

    def torn(self, samples: np.ndarray, again: bool = False) -> np.ndarray:
        """Those of these ready samples whose bytes are not those that were written.

        They are not ready any more. Each sample is looked at once by this object, or at every call with `again`.
        """
        places = self._places[samples]
        unseen = np.arange(len(samples)) if again else np.flatnonzero(~self._verified[places])
        torn = [i for i in unseen if not self._whole(places[i])]
        # First that they are not ready: another thread takes what is verified as it is.
        self._words[places[torn]] = 0
        self._verified[np.setdiff1d(places[unseen], places[torn])] = True
        self._verified[places[torn]] = False
        return samples[torn]

    @contextlib.contextmanager
    def claim(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Those of these samples that are not ready, and that nobody else fills within it; the kernel ends claims."""
        with self._folder.claim(self._places[samples].tolist()) as mine:
            # Whoever had claimed one before may have just finished.
            yield samples[np.array(mine, bool) & ~self.ready(samples)]

    def clear(self) -> None:
        """No sample is ready any more; what took room in the heap has gone for good."""
        self._words[:] = 0
        self._verified[:] = False

    @contextlib.contextmanager
    def claim_all(self) -> Iterator[bool]:
        """Within it nobody else fills the whole pool; `False` if somebody does already."""
        with self._folder.claim([self.slots]) as (mine,):
            yield mine

    @property
    def filled(self) -> int:
        """How many samples are ready."""
        return int((self._words >= READY).sum())

    @property
    def bytes(self) -> int:
        """Of the samples that have room."""
        return self.layout.offsets(self.slots)[-1] + (self._heap.used if self._heap else 0)

    def close(self) -> None:
        """Ends the mappings; arrays of `gather` remain."""
        self._columns.clear()
        self._words = np.zeros(0, np.uint64)
        if self._heap is not None:
            self._heap.close()
        self._folder.close()

    def _whole(self, place: int) -> bool:
        word, checksum = int(self._words[place]), self._checksum(place)
        return checksum is not None and word == READY | checksum

    def _checksum(self, place: int) -> int | None:
        """Of a sample's number and bytes; `None` if it points outside."""
        checksum = zlib.crc32(self._samples[place : place + 1].view(np.uint8).data)
        for column, component in zip(self._columns, self.layout.components, strict=True):
            checksum = zlib.crc32(column[place : place + 1].view(np.uint8).data, checksum)
            if component.varies:
                assert self._heap is not None
                content = self._heap.content(*map(int, column[place, :2]))
                if content is None:
                    return None
                checksum = zlib.crc32(content, checksum)
        return checksum

    def _mapping(self, name: str) -> mmap.mmap:
        with (self.folder / name).open("r+b") as stream:
            return mmap.mmap(stream.fileno(), 0)


def existing(folder: Path) -> Pool:
    """A pool that was made before.

    Raises:
      CacheError: If there is none.
    """
    plan = Plan.from_dict(read_header(folder))
    return Pool(folder, lambda: plan)


def _make(path: Path, plan: Plan) -> dict[str, Any]:
    try:
        allocate(path / "samples", plan.layout.offsets(plan.part.kept)[-1])
        allocate(path / "words", 8 * plan.part.kept)
    except NoRoomError:
        (path / "samples").unlink(missing_ok=True)
        raise
    if plan.layout.varies:
        Heap.make(path, plan.heap_bytes)
    return plan.to_dict()
