"""Stores samples in a file that all processes of a node map: written once, and read by all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from datacache.from_tfposeidon import is_memory
from datacache.native import gather
from datacache.pool.folder import StoreFile
from datacache.pool.samples import READY, Heap, SampleWords, match_checksums
from datacache.pool.spec import Arrays, PoolSpec
from datacache.system.background import STEP_BYTES, BackgroundSteps, populate_page_tables, windows
from datacache.system.descriptors import Owner

READER_PAUSE_S = 0.05
"""Seconds for which background verification pauses while another thread reads."""


class Pool(Owner):
    """Samples in a folder, in `/dev/shm` or on a disk, shared by all processes of the node.

    A sample is written first, and then its metadata word: a checksum, and a bit that marks the
    sample as ready. A process that is killed in between leaves a sample that is not ready, and
    locks that the kernel releases; nothing has to be repaired. Without `make_spec`, the store must
    exist.
    """

    def __init__(self, folder: Path, make_spec: Callable[[], PoolSpec] | None = None) -> None:
        self.folder, self._reads = Path(folder), 0
        self._background: BackgroundSteps | None = None
        with contextlib.ExitStack() as opened:
            opened.push(self._drop_mappings)
            self._file = opened.enter_context(StoreFile(self.folder, make_spec))
            self.spec, self.is_only_user = self._file.spec, self._file.is_only_user
            self.layout, self.slots = self.spec.layout, self.spec.shard.kept_samples
            self._slot_indices = self.spec.shard.slot_indices()
            # Samples that differ in size are in the heap. The only column then has the offset and
            # the length of each.
            self._columns = self.layout.columns(self._file.sections["columns"], self.slots)
            self._words = SampleWords(self._file.sections["words"])
            self._heap = Heap(self._file) if self.layout.varies else None
            opened.pop_all()

    @property
    def filled(self) -> int:
        """Number of samples that are ready."""
        return int((self._words.array >= READY).sum())

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the metadata, the columns, and the samples in the heap."""
        in_heap = int(self._places()[:, 1].sum()) if self._heap else 0
        return self.spec.reserved_bytes + in_heap

    def prepare(self, verify: bool = True) -> None:
        """Starts a thread that creates page tables of a full store in memory and verifies it."""
        # Skip a store on a disk, because verification would read the whole store from the disk.
        in_memory = is_memory(os.fstat(self._file.file.fileno()).st_dev)
        if self._background is None and self.filled == self.slots and in_memory:
            steps = self.verify_in_steps() if verify and self._heap is None else iter(())
            self._background = BackgroundSteps(
                itertools.chain(populate_page_tables([self._file.sections["columns"]]), steps)
            )

    def verify_in_steps(self) -> Iterator[None]:
        """Verifies a few samples in each step, and marks intact ones; readers report the others."""
        parts = windows(np.arange(self.slots), max(1, STEP_BYTES // self.layout.bytes))
        # Start at a different place in each process of the node, and skip samples that other
        # processes have verified.
        first = np.random.default_rng(os.getpid()).integers(len(parts))
        reads = self._reads
        for indices in parts[first:] + parts[:first]:
            # Yield to readers, which verify the samples that they copy: two concurrent passes over
            # memory take longer than one.
            while reads != self._reads:
                reads = self._reads
                time.sleep(READER_PAUSE_S)
                yield
            indices = indices[self._words.unverified(indices, self._words.array[indices])]
            words = self._words.array[indices]
            intact = match_checksums(words, self._checksums(indices)[0])
            self.settle(indices[intact], words[intact], intact[intact])
            yield

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples have a slot, `[n]` bool."""
        return self._slot_indices[samples] >= 0

    def can_copy(self, samples: np.ndarray) -> bool:
        """Returns whether a batch of these samples, once they are ready, is copied from columns."""
        return self._heap is None and bool(self.has_room(samples).all())

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples can be read, `[n]` bool."""
        indices = self._slot_indices[samples]
        # Slot 0 is a valid index for samples without a slot, which the first condition excludes.
        return (indices >= 0) & (self._words.array[np.maximum(indices, 0)] >= READY)

    def put(self, sample: int, arrays: Sequence[Any]) -> bool:
        """Writes a sample to its slot and marks it ready; returns `False` if the heap is full."""
        arrays = self.layout.check(arrays, "sample {}".format, sample)
        index = self._slot_indices[sample]
        if self._heap is None:
            self._write(index, arrays)
            return True
        content = self.layout.pack(arrays)
        with self._heap.adding():
            if self._words.array[index]:
                # The old bytes of the sample become a gap.
                self._words.withdraw(index)
                self._heap.note_freed()
            offset = self._heap.add(content, self._places)
            if offset is not None:
                self._write(index, [(offset, len(content))])
        return offset is not None

    def _write(self, index: int, rows: Sequence[Any]) -> None:
        # Clear the word first and set it last, because readers compare it before and after a copy.
        self._words.withdraw(index)
        for column, row in zip(self._columns, rows, strict=True):
            column[index] = row
        # Compute the checksum from the mapping, which readers will see, and not from `rows`.
        (checksum,), _ = self._checksums(np.array([index]))
        self._words.publish(index, int(checksum))

    @functools.cached_property
    def _index_checksums(self) -> np.ndarray:
        # Checksums include the sample's index, so that a sample in the wrong slot is detected.
        samples, checksums = (
            np.flatnonzero(self._slot_indices >= 0),
            np.zeros(self.slots, np.uint32),
        )
        gather(samples, np.arange(self.slots), None, checksums)
        return checksums

    def _checksums(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns checksums of samples, `[n]` uint32, and which lie inside the heap, `[n]` bool."""
        checksums, inside = self._index_checksums[indices], np.ones(len(indices), bool)
        for column in self._columns:
            gather(column, indices, None, checksums)
        if self._heap:
            for i, place in enumerate(self._columns[0][indices].tolist()):
                content = self._heap.content(*place)
                inside[i] = content is not None
                checksums[i] = zlib.crc32(content or b"", int(checksums[i]))
        return checksums, inside

    def _places(self) -> np.ndarray:
        """Returns offset and length in the heap of all ready samples, `[n, 2]` int64."""
        return self._columns[0][self._words.array >= READY]

    def gather(
        self,
        samples: np.ndarray,
        into: Sequence[np.ndarray] | None = None,
        checksums: np.ndarray | None = None,
    ) -> Arrays:
        """Copies samples to one array per component without verification; requires `can_copy`."""
        if into is None:
            into = [np.empty((len(samples), *one.shape[1:]), one.dtype) for one in self._columns]
        for column, target in zip(self._columns, into, strict=True):
            gather(column, self._slot_indices[samples], target, checksums)
        return list(into)

    def gather_verified(
        self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None, recheck: bool = False
    ) -> tuple[Arrays | None, np.ndarray]:
        """Gathers samples as `gather` does, and verifies their bytes in the same pass.

        Returns the copies and the indices of corrupted samples, which are then marked as not ready.
        The copies are `None` if a sample is corrupted, or if another process has cleared or
        rewritten one in the meantime.
        """
        # Make background verification yield to this read. Concurrent threads may lose updates of
        # the counter, which is harmless.
        self._reads += 1
        indices, corrupt = self._slot_indices[samples], samples[:0]
        # Read words before bytes, so that a concurrent rewrite is detected as a change.
        words, checksums = self._words.array[indices], None
        if recheck or self._words.unverified(indices, words).any():
            checksums = self._index_checksums[indices]
        targets = self.gather(samples, into, checksums)
        if checksums is not None:
            corrupt = samples[self.settle(indices, words, match_checksums(words, checksums))]
        whole = not corrupt.size and bool(self._words.unchanged(indices, words).all())
        return targets if whole else None, corrupt

    def read_sample(self, sample: int) -> Arrays | None:
        """Returns one ready sample, or `None` if another process has cleared it in the meantime."""
        index = self._slot_indices[sample]
        if self._heap is None:
            return [column[index] for column in self._columns]
        # Copy the sample, because other processes may reuse its bytes in the heap.
        word = self._words.array[index]
        packed = self._heap.content(*self._columns[0][index].tolist())
        content = None if packed is None else bytes(packed)
        # Another sample may have been written to these bytes during the copy, but only after this
        # sample's word had changed.
        if word < READY or word != self._words.array[index]:
            return None
        if content is None:
            # The offset or the length is corrupted. With verify="never", only this detects it.
            self._words.withdraw(index)
            return None
        return self.layout.unpack(np.frombuffer(content, np.uint8))

    def find_corrupt(self, samples: np.ndarray, recheck: bool = False) -> np.ndarray:
        """Returns which of these ready samples are corrupted, and marks them as not ready."""
        indices = self._slot_indices[samples]
        if not recheck:
            unverified = self._words.unverified(indices, self._words.array[indices])
            samples, indices = samples[unverified], indices[unverified]
        if not samples.size:
            return samples
        # Read words before bytes, as in `gather_verified`.
        words = self._words.array[indices]
        checksums, inside = self._checksums(indices)
        return samples[self.settle(indices, words, inside & match_checksums(words, checksums))]

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Records the result of a verification; see `SampleWords.settle`."""
        corrupt = self._words.settle(indices, words, intact)
        if self._heap and corrupt.any():
            self._heap.note_freed()
        return corrupt

    @contextlib.contextmanager
    def claim(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Claims missing samples; yields the samples that the caller must produce, `[k]` int64."""
        # The kernel releases the claims of a process that is killed.
        with self._file.locked_bytes(self._slot_indices[samples].tolist()) as mine:
            # The previous holder of a claim may have just finished the sample.
            yield samples[np.array(mine, bool) & ~self.ready(samples)]

    @contextlib.contextmanager
    def claim_all(self) -> Iterator[bool]:
        """Claims the whole store to fill it from a stream; yields whether no other process did."""
        # Lock the byte after the bytes of the samples, which stay free for `claim`.
        with self._file.locked_bytes([self.slots]) as (mine,):
            yield mine

    def clear(self) -> None:
        """Marks all samples as not ready, and frees the heap."""
        with self._heap.adding() if self._heap else contextlib.nullcontext():
            self._words.clear()
            if self._heap:
                self._heap.note_freed()

    @override
    def close(self) -> None:
        # End the thread first, because it reads the mapping, and its steps refer to this store.
        if self._background is not None:
            self._background.close()
            self._background = None
        self._drop_mappings()
        self._file.close()

    def _drop_mappings(
        self, _: object = None, error: BaseException | None = None, __: object = None
    ) -> None:
        # The mapping is released with the last array that refers to it.
        for name in ("_columns", "_heap", "_words"):
            vars(self).pop(name, None)
        if error is not None:
            # The frames of the exception refer to the arrays, and would keep them alive with it.
            traceback.clear_frames(error.__traceback__)
