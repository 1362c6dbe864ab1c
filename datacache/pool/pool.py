"""A pool of samples that all processes of a node map: written once, read by everybody."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datacache.native import gather, in_memory, mark
from datacache.pool.folder import Blueprint, Folder
from datacache.pool.header import check, opened
from datacache.pool.heap import STATE_BYTES, Heap
from datacache.pool.kept_samples import KeptSamples
from datacache.pool.layout import Component, Layout, batch
from datacache.system.access import PRIVATE, Access
from datacache.system.ahead import AT_ONCE, Ahead, mapped
from datacache.system.boot import boot_number
from datacache.windows import windows

WORD = np.dtype(np.uint64)
READY = 1 << 32
"""Set in a sample's word beside the checksum in the lower half: what is 0 was never finished."""
UNFINISHED = np.uint64(0)
CHECKSUM = READY - 1
WRITTEN = np.uint64(READY | CHECKSUM)
LOOKED_AT = np.uint64(33)
"""The first of the bits that say in which boot a process has looked at the checksum of what another one wrote: memory
stays as it is, but what a disk had not yet written when the machine went down is torn."""

PAUSE_S = 0.05
"""For so long a look ahead waits while somebody reads."""


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
    part: KeptSamples
    heap_bytes: int = 0
    source: str = ""

    def blueprint(self) -> Blueprint:
        """What a pool of it is made of."""
        files = {
            "samples": self.layout.offsets(self.part.kept)[-1],
            "words": WORD.itemsize * self.part.kept,
        }
        growing = {}
        if self.layout.varies:
            files["end"], growing["heap"] = STATE_BYTES, self.heap_bytes
        return Blueprint(about=self.to_dict(), files=files, growing=growing)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"layout": self.layout.to_dict(), "part": asdict(self.part), "source": self.source}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Plan:
        """The inverse, of what JSON made of it."""
        return cls(
            layout=Layout.from_dict(content["layout"]),
            part=KeptSamples(**content["part"]),
            source=content.get("source", ""),
        )


class Pool:
    """Samples in a folder, of `/dev/shm` or of a disk.

    A sample is written, then its word: a checksum and a mark that it is ready. A process that is killed in between
    leaves a sample that is not ready, and locks that the kernel has released. The word also says in which boot somebody
    looked at the checksum: once in each, whatever processes there are.

    Args:
      folder: Made if it does not exist; otherwise it is taken as it is.
      plan: Says what to make, if there is none; called by one process of the node.
      access: Who may get at it.

    Raises:
      CacheError: If the folder holds something else or is somebody else's, or there is no room.
    """

    def __init__(self, folder: Path, plan: Callable[[], Plan], access: Access = PRIVATE) -> None:
        self._folder = Folder(folder, lambda: plan().blueprint(), access)
        self.plan = Plan.from_dict(self._folder.about)
        self.layout = self.plan.layout
        self._places = self.plan.part.places()
        self.slots = self.plan.part.kept
        self._pages = self._mapping("samples")
        self._columns = self.layout.columns(self._pages, self.slots)
        self._words = np.ndarray((self.slots,), np.uint64, self._mapping("words"))
        self._heap = Heap(self._folder) if self.layout.varies else None
        if self._heap is not None and self._folder.first:
            self._heap.begin(self._extents())
        self._boot = boot_number()
        self._looked_at = self._boot << LOOKED_AT
        # Written here, or looked at where words cannot be marked.
        self._known = np.zeros(self.slots, bool)
        self._ahead: Ahead | None = None
        self._reads = 0

    def get_ready(self, look: bool = True) -> None:
        """Makes the page tables of a warm pool in memory on a thread, while the job has other things to do.

        Args:
          look: Whether to look at checksums then, too, unless somebody has in this boot.
        """
        if self._ahead is None and self.filled == self.slots and in_memory(self.folder):
            looks = self._looks() if look and self._heap is None else iter(())
            self._ahead = Ahead(itertools.chain(mapped([self._pages]), looks))

    def _looks(self) -> Iterator[None]:
        """Looks at a few samples in each step; those that are torn are left to whoever reads them.

        Gives way to readers, which look on the way: two passes side by side take longer than one.
        """
        parts = windows(np.arange(self.slots), max(1, AT_ONCE // self.layout.bytes))
        # Each process of the node begins elsewhere, and passes over what others have looked at.
        first = np.random.default_rng(os.getpid()).integers(len(parts))
        reads = self._reads
        for places in parts[first:] + parts[:first]:
            while reads != self._reads:
                reads = self._reads
                time.sleep(PAUSE_S)
                yield
            places = places[self._unknown(places, self._words[places])]
            if places.size:
                words = self._words[places]
                agrees = agree(words, self._checksums(places)[0])
                mark(
                    self._words,
                    places[agrees],
                    words[agrees],
                    agrees[agrees],
                    WRITTEN,
                    self._looked_at,
                )
            yield

    @property
    def folder(self) -> Path:
        return self._folder.path

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples the pool keeps, `[n]` bool."""
        return self._places[samples] >= 0

    def copies(self, samples: np.ndarray) -> bool:
        """Whether these samples are a copy of columns once they are ready: all have room, and are of one size."""
        return self._heap is None and bool(self.has_room(samples).all())

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples can be read, `[n]` bool."""
        places = self._places[samples]
        return (places >= 0) & (self._words[np.maximum(places, 0)] >= READY)

    def put(self, sample: int, arrays: Sequence[Any]) -> bool:
        """Writes a sample that has room, and then that it is ready; `False` if it was too large for what is left.

        Raises:
          ValueError: If it has other shapes or types than the layout.
        """
        found = self.layout.check(arrays, "sample {}".format, sample)
        place = self._places[sample]
        if self._heap is None:
            self._write(place, found)
            return True
        with self._heap.adding():
            if self._words[place]:
                # Its old bytes are a gap from now on.
                self._words[place] = 0
                self._heap.freed()
            extents = self._add(self._heap, found)
            if extents is not None:
                self._write(place, extents)
        return extents is not None

    def _write(self, place: int, found: Sequence[np.ndarray]) -> None:
        self._words[place] = 0
        for column, array in zip(self._columns, found, strict=True):
            column[place] = array
        (checksum,), _ = self._checksums(np.array([place]))
        self._words[place] = READY | int(checksum)
        self._known[place] = True

    def _add(self, heap: Heap, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Puts what varies into the heap, all or nothing; what the columns hold then."""
        pairs = list(zip(self.layout.components, arrays, strict=True))
        contents = [
            component.encoded(array) if component.varies else b"" for component, array in pairs
        ]
        begin = heap.add(b"".join(contents), self._extents)
        if begin is None:
            return None
        offsets = itertools.accumulate(map(len, contents), initial=begin)
        return [
            np.array([offset, len(content), *array.shape]) if component.varies else array
            for (component, array), content, offset in zip(pairs, contents, offsets, strict=False)
        ]

    def _extents(self) -> np.ndarray:
        """Where the bytes of samples that are ready lie in the heap."""
        ready = self._words >= READY
        pairs = zip(self._columns, self.layout.components, strict=True)
        return np.concatenate(
            [column[ready, :2] for column, component in pairs if component.varies]
        )

    def gather(
        self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray] | None:
        """Copies samples that are ready: one array `[n, *shape]` for each component, padded where samples differ.

        Args:
          samples: Their numbers, `[n]`.
          into: Arrays to copy to, in place of new ones, if no component varies.

        Returns:
          The arrays; `None` if another process has cleared one of the samples in the meantime.
        """
        if self._heap is not None:
            found = [self.sample(sample) for sample in samples.tolist()]
            return (
                None
                if None in found
                else batch([arrays for arrays in found if arrays is not None], self.layout)
            )
        return self._gathered(self._places[samples], into)

    def _gathered(
        self,
        places: np.ndarray,
        into: Sequence[np.ndarray] | None,
        checksums: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        targets = self._targets(len(places), into)
        for column, target in zip(self._columns, targets, strict=True):
            gather(column, places, target, checksums)
        return targets

    def gather_whole(
        self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None, again: bool = False
    ) -> tuple[list[np.ndarray] | None, np.ndarray]:
        """As `gather`, of samples that have room and do not vary, with a look at their checksums on the way.

        Args:
          samples: Their numbers, `[n]`.
          into: Arrays to copy to, in place of new ones.
          again: Whether to look at those, too, that somebody has looked at in this boot.

        Returns:
          The arrays, or `None` if some samples are torn, or another process has cleared or rewritten one of them in the
          meantime; and the numbers of those that are torn, and not ready any more.
        """
        self._reads += 1
        places, torn = self._places[samples], samples[:0]
        words, checksums = self._words[places], None
        if again or self._unknown(places, words).any():
            checksums = self._of_numbers[places]
        targets = self._gathered(places, into, checksums)
        if checksums is not None:
            torn = samples[self._judge(places, words, agree(words, checksums))]
        return targets if not torn.size and self._still(places, words).all() else None, torn

    def _targets(self, count: int, into: Sequence[np.ndarray] | None) -> list[np.ndarray]:
        if into is not None:
            return list(into)
        return [np.empty((count, *column.shape[1:]), column.dtype) for column in self._columns]

    def sample(self, sample: int) -> list[np.ndarray] | None:
        """One sample that is ready; `None` if another process has cleared it in the meantime.

        Where samples differ in size it is a copy, for others may take its place; else its arrays are views of the pool.
        """
        place = self._places[sample]
        if self._heap is None:
            return [column[place] for column in self._columns]
        word = self._words[place]
        rows = [np.array(column[place]) for column in self._columns]
        contents = [
            self._content(row, of) for row, of in zip(rows, self.layout.components, strict=True)
        ]
        if word < READY or (word ^ self._words[place]) & WRITTEN:
            return None
        if None in contents:
            # Torn, where nobody looks at checksums.
            self._words[place] = 0
            return None
        found = zip(self.layout.components, contents, rows, strict=True)
        return [
            of.decoded(content, row[2:].tolist()) if of.varies else row
            for of, content, row in found
        ]

    def _content(self, row: np.ndarray, component: Component) -> bytes | None:
        """A copy of what a sample has in the heap, if anything."""
        if not component.varies or self._heap is None:
            return b""
        content = self._heap.content(*row[:2].tolist())
        return None if content is None else bytes(content)

    def torn(self, samples: np.ndarray, again: bool = False) -> np.ndarray:
        """Those of these ready samples whose bytes are not those that were written.

        They are not ready any more. Each sample is looked at once in each boot, or at every call with `again`.
        """
        places = self._places[samples]
        if not again:
            unknown = self._unknown(places, self._words[places])
            samples, places = samples[unknown], places[unknown]
        if not samples.size:
            return samples
        words = self._words[places]
        checksums, inside = self._checksums(places)
        return samples[self._judge(places, words, inside & agree(words, checksums))]

    def _unknown(self, places: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Those that nobody has looked at in this boot, `[n]` bool."""
        return ~self._known[places] & (words >> LOOKED_AT != self._boot)

    def _still(self, places: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Which of the samples with these words were ready, and nobody has cleared or rewritten since, `[n]` bool."""
        return (words >= READY) & ((self._words[places] ^ words) & WRITTEN == 0)

    def _judge(self, places: np.ndarray, words: np.ndarray, agrees: np.ndarray) -> np.ndarray:
        """Marks samples whose words were these before their bytes were looked at.

        What another process has cleared or rewritten in the meantime is neither whole nor torn.

        Returns:
          Which of them are torn, and not ready any more, `[n]` bool.
        """
        still = mark(self._words, places, words, agrees, WRITTEN, self._looked_at)
        if still is None:
            # Of words that others may write at the same time, none but 0 can be written.
            still = self._still(places, words)
            self._words[places[still & ~agrees]] = UNFINISHED
            self._known[places[still & agrees]] = True
        torn = still & ~agrees & (words >= READY)
        # Only now that they are not ready: another thread takes what is known as it is.
        if torn.any():
            self._known[places[torn]] = False
            if self._heap is not None:
                self._heap.freed()
        return torn

    @contextlib.contextmanager
    def claim(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Those of these samples that are not ready, and that nobody else fills within it; the kernel ends claims."""
        with self._folder.claim(self._places[samples].tolist()) as mine:
            # Whoever had claimed one before may have just finished.
            yield samples[np.array(mine, bool) & ~self.ready(samples)]

    def clear(self) -> None:
        """No sample is ready any more, and there is room for as many as in a new pool."""
        with self._heap.adding() if self._heap else contextlib.nullcontext():
            self._words[:] = 0
            if self._heap:
                self._heap.freed()
        self._known[:] = False

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
    def is_whole(self) -> bool:
        """Whether any batch is a copy: all samples are ready, and of one size."""
        return self._heap is None and self.slots == len(self._places) and self.filled == self.slots

    @property
    def bytes(self) -> int:
        """Of the samples that have room."""
        return sum(self.plan.blueprint().files.values()) + (self._heap.used if self._heap else 0)

    def close(self) -> None:
        """Ends the mappings; arrays of `gather` remain."""
        if self._ahead is not None:
            self._ahead.close()
            # Its steps refer to this pool.
            self._ahead = None
        self._columns.clear()
        self._words = np.zeros(0, np.uint64)
        if self._heap is not None:
            self._heap.close()
        self._folder.close()

    def _checksums(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of samples' numbers and bytes, `[n]` uint32, and which of them point inside the heap, `[n]` bool."""
        checksums, inside = self._of_numbers[places], np.ones(len(places), bool)
        for column, component in zip(self._columns, self.layout.components, strict=True):
            gather(column, places, None, checksums)
            for i, place in enumerate(places if component.varies else ()):
                assert self._heap is not None
                content = self._heap.content(*map(int, column[place, :2]))
                inside[i] &= content is not None
                checksums[i] = zlib.crc32(content or b"", int(checksums[i]))
        return checksums, inside

    @functools.cached_property
    def _of_numbers(self) -> np.ndarray:
        """Checksums of the samples' numbers, `[slots]` uint32, which go on with their bytes."""
        checksums = np.zeros(self.slots, np.uint32)
        gather(np.flatnonzero(self._places >= 0), np.arange(self.slots), None, checksums)
        return checksums

    def _mapping(self, name: str) -> mmap.mmap:
        handle = self._folder.directory.open(name)
        try:
            return mmap.mmap(handle, 0)
        finally:
            os.close(handle)


def agree(words: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Which of samples with these words are ready, and have the checksums that they were written with, `[n]` bool."""
    return (words & CHECKSUM == checksums) & (words >= READY)


def existing(folder: Path) -> Pool:
    """A pool that was made before.

    Raises:
      CacheError: If there is none, or it is damaged.
    """
    with opened(folder) as directory:
        plan = Plan.from_dict(check(directory))
        return Pool(folder, lambda: plan, directory.access)
