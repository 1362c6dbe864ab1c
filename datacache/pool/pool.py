"""A pool of samples that all processes of a node map: written once, read by everybody."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datacache.native import is_in_memory
from datacache.pool.columns import Columns
from datacache.pool.folder import Folder
from datacache.pool.header import open_pool_folder, read_checked_header
from datacache.pool.layout import stack_samples
from datacache.pool.spec import PoolSpec
from datacache.pool.words import CONTENT, READY, SampleWords, match_checksums
from datacache.system.access import PRIVATE, Access
from datacache.system.background import STEP_BYTES, BackgroundSteps, populate_page_tables
from datacache.windows import windows

READER_PAUSE_S = 0.05
"""Seconds that verification in the background waits while somebody reads."""


class Pool:
    """Samples in a folder, of `/dev/shm` or of a disk, shared by all processes of the node.

    A sample is written first, then its word: a checksum and a mark that the sample is ready. A
    process that is killed in between leaves a sample that is not ready, and locks that the kernel
    releases; nothing has to be repaired. See `SampleWords` for when checksums are verified.

    Samples of one size lie in columns, one for each component, so that a batch is one copy per
    component. Components that differ in size lie in a heap, and their columns say where.

    Attributes:
      spec: Description with which the pool was made.
      layout: Components of its samples.
      slots: Number of samples that have room.

    Raises:
      CacheError: If the folder holds something else or belongs to another user.
      NoRoomError: If there is no room for the pool.

    Example:
      >>> import tempfile
      >>> from datacache.pool.layout import Layout
      >>> from datacache.pool.shard import SampleShard
      >>> spec = PoolSpec(
      ...     layout=Layout.of([np.zeros(2, "uint8")]), shard=SampleShard(samples=3, slots=3)
      ... )
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     pool = Pool(Path(folder) / "pool", lambda: spec)
      ...     pool.put(1, [np.array([5, 7], "uint8")])
      ...     pool.ready(np.arange(3)), pool.gather(np.array([1]))
      ...     pool.close()
      True
      (array([False,  True, False]), [array([[5, 7]], dtype=uint8)])
    """

    def __init__(
        self, folder: Path, make_spec: Callable[[], PoolSpec], access: Access = PRIVATE
    ) -> None:
        self._folder = Folder(folder, lambda: make_spec().blueprint(), access)
        self.spec = PoolSpec.from_dict(self._folder.header)
        self.layout = self.spec.layout
        self._slot_indices = self.spec.shard.slot_indices()
        self.slots = self.spec.shard.kept_samples
        numbers = np.flatnonzero(self._slot_indices >= 0)
        self._columns = Columns(self._folder, self.layout, numbers)
        self._heap = self._columns.heap
        self._words = SampleWords(self._folder.map_file("words"), self.slots)
        if self._heap is not None and self._folder.is_only_user:
            self._heap.reset(self._extents())
        self._background: BackgroundSteps | None = None
        self._reads = 0

    @property
    def folder(self) -> Path:
        """Path of the pool's folder."""
        return self._folder.path

    @property
    def is_only_user(self) -> bool:
        """True if no other process had the pool open when this one opened it."""
        return self._folder.is_only_user

    @property
    def filled(self) -> int:
        """Number of samples that are ready."""
        return self._words.count_ready()

    @property
    def is_whole(self) -> bool:
        """True if any batch is a copy of columns: all samples are ready, and of one size."""
        return (
            self._heap is None
            and self.slots == len(self._slot_indices)
            and self.filled == self.slots
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of columns and words, and of what the heap holds."""
        in_files = sum(self.spec.blueprint().files.values())
        return in_files + (self._heap.used_bytes if self._heap else 0)

    def prepare(self, verify: bool = True) -> None:
        """Makes the page tables of a full pool in memory on a thread, while the job gets ready."""
        # For a pool on a disk, making page tables would read all of it.
        if self._background is None and self.filled == self.slots and is_in_memory(self.folder):
            steps = self.verify_in_steps() if verify and self._heap is None else iter(())
            self._background = BackgroundSteps(
                itertools.chain(populate_page_tables([self._columns.pages]), steps)
            )

    def verify_in_steps(self) -> Iterator[None]:
        """Verifies a few samples in each step; those that are corrupt are left to their reader.

        Gives way to readers, which verify what they copy: two passes over memory side by side
        take longer than one.
        """
        parts = windows(np.arange(self.slots), max(1, STEP_BYTES // self.layout.bytes))
        # Each process of the node begins elsewhere and skips what others have verified.
        first = np.random.default_rng(os.getpid()).integers(len(parts))
        reads = self._reads
        for indices in parts[first:] + parts[:first]:
            while reads != self._reads:
                reads = self._reads
                time.sleep(READER_PAUSE_S)
                yield
            indices = indices[self._words.unverified(indices, self._words.array[indices])]
            if indices.size:
                words = self._words.array[indices]
                intact = match_checksums(words, self._columns.checksums(indices)[0])
                self._words.mark_verified(indices[intact], words[intact])
            yield

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples the pool keeps, `[n]` bool."""
        return self._slot_indices[samples] >= 0

    def can_copy(self, samples: np.ndarray) -> bool:
        """Returns whether a batch of these samples is a copy of columns, once they are ready."""
        return self._heap is None and bool(self.has_room(samples).all())

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples can be read, `[n]` bool."""
        indices = self._slot_indices[samples]
        # Words of slot 0 stand in for samples without room, which have none.
        return (indices >= 0) & self._words.ready(np.maximum(indices, 0))

    def put(self, sample: int, arrays: Sequence[Any]) -> bool:
        """Writes a sample that has room, and then says that it is ready.

        Returns:
          `False` if the sample is too large for what is left of the heap.
        """
        components = self.layout.check(arrays, "sample {}".format, sample)
        index = self._slot_indices[sample]
        if self._heap is None:
            self._write(index, components)
            return True
        with self._heap.adding():
            if self._words.array[index]:
                # Its old bytes are a gap from now on.
                self._words.withdraw(index)
                self._heap.note_freed()
            rows = self._columns.add_to_heap(components, self._extents)
            if rows is not None:
                self._write(index, rows)
        return rows is not None

    def _write(self, index: int, rows: Sequence[np.ndarray]) -> None:
        # Readers compare the word before and after they copy, so it goes first and comes back last.
        self._words.withdraw(index)
        self._words.publish(index, self._columns.write(index, rows))

    def _extents(self) -> np.ndarray:
        """Returns offset and length in the heap of all that is ready, `[n, 2]` int64."""
        return self._columns.extents(self._words.array >= READY)

    def gather(
        self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray] | None:
        """Copies samples that are ready into one array per component, without verifying them.

        Returns:
          An array `[n, *shape]` for each component, padded where samples differ in size; `None` if
          another process has cleared one of the samples in the meantime.
        """
        if self._heap is None:
            return self._columns.copy(self._slot_indices[samples], into)
        found = [self.read_sample(sample) for sample in samples.tolist()]
        whole = [arrays for arrays in found if arrays is not None]
        return stack_samples(whole, self.layout) if len(whole) == len(found) else None

    def gather_verified(
        self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None, recheck: bool = False
    ) -> tuple[list[np.ndarray] | None, np.ndarray]:
        """Copies samples for which `can_copy` holds, and verifies their checksums on the way.

        Checksums are taken of the copy's bytes as they pass, so that memory is read only once.

        Returns:
          A tuple of two. First an array `[n, *shape]` for each component, or `None` if a sample is
          corrupt or another process has cleared or rewritten one in the meantime; then the indices
          of corrupt samples, which are not ready any more.
        """
        # Makes verification in the background give way. That threads may lose a count does no harm.
        self._reads += 1
        indices, corrupt = self._slot_indices[samples], samples[:0]
        # Words before bytes: what is rewritten in between is then seen as changed.
        words, checksums = self._words.array[indices], None
        if recheck or self._words.unverified(indices, words).any():
            checksums = self._columns.begin_checksums(indices)
        targets = self._columns.copy(indices, into, checksums)
        if checksums is not None:
            corrupt = samples[self.settle(indices, words, match_checksums(words, checksums))]
        whole = not corrupt.size and bool(self._words.unchanged(indices, words).all())
        return targets if whole else None, corrupt

    def read_sample(self, sample: int) -> list[np.ndarray] | None:
        """Returns one sample that is ready, or `None` if another process has cleared it since.

        Where samples differ in size it is a copy, because others may reuse the bytes in the heap;
        otherwise its arrays are views of the pool.
        """
        index = self._slot_indices[sample]
        if self._heap is None:
            return self._columns.views(index)
        word = self._words.array[index]
        rows, contents = self._columns.read(index)
        # The writer of another sample may have reused these bytes while they were copied: it does
        # so only after the word was withdrawn.
        if word < READY or (word ^ self._words.array[index]) & CONTENT:
            return None
        if None in contents:
            # The row is corrupt, and points outside of the heap; seen here with verify="never".
            self._words.withdraw(index)
            return None
        return self._columns.decode(rows, contents)

    def find_corrupt(self, samples: np.ndarray, recheck: bool = False) -> np.ndarray:
        """Returns which of these ready samples are corrupt, and makes them not ready."""
        indices = self._slot_indices[samples]
        if not recheck:
            unverified = self._words.unverified(indices, self._words.array[indices])
            samples, indices = samples[unverified], indices[unverified]
        if not samples.size:
            return samples
        # Words before bytes, as in `gather_verified`.
        words = self._words.array[indices]
        checksums, inside = self._columns.checksums(indices)
        intact = inside & match_checksums(words, checksums)
        return samples[self.settle(indices, words, intact)]

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """See `SampleWords.settle`."""
        corrupt = self._words.settle(indices, words, intact)
        if corrupt.any() and self._heap is not None:
            self._heap.note_freed()
        return corrupt

    @contextlib.contextmanager
    def claim(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Claims samples for filling; the kernel ends the claims of a process that is killed.

        Yields:
          Indices of those that are not ready and that nobody else had claimed, `[k]` int64. Within
          the context no other thread or process fills them.
        """
        with self._folder.claim(self._slot_indices[samples].tolist()) as mine:
            # Whoever had claimed one before may have just finished it.
            yield samples[np.array(mine, bool) & ~self.ready(samples)]

    @contextlib.contextmanager
    def claim_all(self) -> Iterator[bool]:
        """Claims the pool as a whole, for who fills it from a stream.

        Yields:
          `False` if another thread or process has claimed the whole pool already.
        """
        # One byte behind those of the samples, which stay free for `claim`.
        with self._folder.claim([self.slots]) as (mine,):
            yield mine

    def clear(self) -> None:
        """Makes all samples not ready, and gives the heap all its room again."""
        with self._heap.adding() if self._heap else contextlib.nullcontext():
            self._words.clear()
            if self._heap:
                self._heap.note_freed()

    def close(self) -> None:
        """Ends the mappings and threads of this object; arrays from `gather` remain valid."""
        # First, as the thread reads what is closed below.
        if self._background is not None:
            self._background.close()
            # Its steps refer to this pool.
            self._background = None
        self._columns.close()
        self._words.close()
        self._folder.close()


def open_existing(folder: Path) -> Pool:
    """Returns a pool that was made before."""
    with open_pool_folder(folder) as directory:
        spec = PoolSpec.from_dict(read_checked_header(directory))
        return Pool(folder, lambda: spec, directory.access)
