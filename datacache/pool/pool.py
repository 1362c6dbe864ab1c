"""Writes each sample once, to a file that all processes of a node memory-map and read."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from datacache.from_tfposeidon import is_memory
from datacache.native import gather, populate_pages
from datacache.pool.folder import StoreFile
from datacache.pool.heap import Heap
from datacache.pool.spec import Arrays, PoolSpec
from datacache.system.descriptors import Owner

READY = 1 << 32
"""Bit that is set once a sample is complete; the bits below contain the CRC-32 of its bytes."""
CHECKSUM = READY - 1
STEP_BYTES = 2**24
"""Number of bytes whose page tables are created at a time. A step takes a few milliseconds, during
which no other thread can map or unmap memory."""


class Pool(Owner):
    """Samples in a folder, in `/dev/shm` or on a disk, shared by all processes of the node.

    A sample is written first, and then its metadata word: a checksum, and a bit that marks the
    sample as ready. Only these words determine which bytes are in use. If a process is killed in
    between, the sample is not ready, and the kernel releases the locks of the process, so nothing
    has to be repaired. Without `make_spec`, the store must exist.
    """

    def __init__(self, folder: Path, make_spec: Callable[[], PoolSpec] | None = None) -> None:
        self.folder, self._closing = Path(folder), threading.Event()
        self._background: threading.Thread | None = None
        with contextlib.ExitStack() as opened:
            self._file = StoreFile(self.folder, make_spec)
            opened.push(self)
            self.spec, self.is_only_user = self._file.spec, self._file.is_only_user
            self.layout, self.slots = self.spec.layout, self.spec.shard.kept_samples
            self._slot_indices = self.spec.shard.slot_indices()
            # If samples differ in size, the only column contains their offsets and lengths.
            self._columns = self.layout.columns(self._file.sections["columns"], self.slots)
            # Other processes may write the metadata words at any time. `_verified` holds the words
            # of samples that this process has written or verified.
            self._words = self._file.sections["words"].view(np.uint64)
            self._verified = np.zeros(self.slots, np.uint64)
            self._heap = Heap(self._file) if self.layout.varies else None
            opened.pop_all()

    @property
    def filled(self) -> int:
        """Number of samples that are ready."""
        return int((self._words >= READY).sum())

    def prepare(self) -> None:
        """Starts a thread that creates the page tables of a full store in memory."""
        # Page faults at the first access to each page of a full store would nearly double the time
        # of the first epoch.
        if self.filled == self.slots and is_memory(os.fstat(self._file.file.fileno()).st_dev):
            # Leave out the heap, which may have holes.
            pages = self._file.content[: self._file.heap_begin]
            self._background = threading.Thread(
                target=_create_page_tables, args=(pages, self._closing), daemon=True
            )
            self._background.start()

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples have a slot, `[n]` bool."""
        return self._slot_indices[samples] >= 0

    def can_copy(self, samples: np.ndarray) -> bool:
        """Returns whether these samples can be copied from columns once they are ready."""
        return self._heap is None and bool(self.has_room(samples).all())

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Returns which of these samples can be read, `[n]` bool."""
        indices = self._slot_indices[samples]
        # Slot 0 is a valid index for samples without a slot, which the first condition excludes.
        return (indices >= 0) & (self._words[np.maximum(indices, 0)] >= READY)

    def put(self, sample: int, arrays: Sequence[Any]) -> bool:
        """Writes a sample to its slot and marks it ready; returns `False` if the heap is full."""
        arrays = self.layout.check(arrays, "sample {}".format, sample)
        index = self._slot_indices[sample]
        if self._heap is None:
            self._write(index, arrays)
            return True
        content = self.layout.pack(arrays)
        with self._heap.adding():
            self._words[index] = 0
            offset = self._heap.add(content, self._places)
            if offset is not None:
                self._write(index, [(offset, len(content))])
        return offset is not None

    def _write(self, index: int, rows: Sequence[Any]) -> None:
        # Clear the word first and set it last, because readers compare it before and after a copy.
        # If this process is killed in between, the slot is not ready and needs no cleanup.
        self._words[index] = 0
        for column, row in zip(self._columns, rows, strict=True):
            column[index] = row
        # Compute the checksum from the mapping, which readers will see, and not from `rows`.
        (checksum,), _ = self._checksums(np.array([index]))
        self._words[index] = self._verified[index] = READY | int(checksum)

    @functools.cached_property
    def _index_checksums(self) -> np.ndarray:
        # Checksums include the sample's index, so that a sample in the wrong slot is detected.
        samples = np.flatnonzero(self._slot_indices >= 0)
        checksums = np.zeros(self.slots, np.uint32)
        gather(samples, np.arange(self.slots), None, checksums)
        return checksums

    def _checksums(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns samples' checksums, `[n]` uint32, and which samples are in bounds, `[n]` bool."""
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
        return self._columns[0][self._words >= READY]

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
        indices, corrupt = self._slot_indices[samples], samples[:0]
        # Read words before bytes, so that a concurrent rewrite is detected as a change.
        words, checksums = self._words[indices], None
        if recheck or (self._verified[indices] != words).any():
            checksums = self._index_checksums[indices]
        targets = self.gather(samples, into, checksums)
        if checksums is not None:
            corrupt = samples[self.settle(indices, words, (words & CHECKSUM) == checksums)]
        whole = not corrupt.size and bool(self._unchanged(indices, words).all())
        return targets if whole else None, corrupt

    def read_sample(self, sample: int) -> Arrays | None:
        """Returns one ready sample, or `None` if another process has cleared it in the meantime."""
        index = self._slot_indices[sample]
        if self._heap is None:
            return [column[index] for column in self._columns]
        # Copy the sample, because other processes may reuse its bytes in the heap.
        word = self._words[index]
        packed = self._heap.content(*self._columns[0][index].tolist())
        content = None if packed is None else bytes(packed)
        # Before another sample is written to these bytes, this sample's word changes.
        if word < READY or word != self._words[index]:
            return None
        if content is None:
            # The offset or the length is corrupted, which is also detected with verify="never".
            self._words[index] = 0
            return None
        return self.layout.unpack(np.frombuffer(content, np.uint8))

    def find_corrupt(self, samples: np.ndarray, recheck: bool = False) -> np.ndarray:
        """Returns which of these ready samples are corrupted, and marks them as not ready."""
        indices = self._slot_indices[samples]
        if not recheck:
            unverified = self._verified[indices] != self._words[indices]
            samples, indices = samples[unverified], indices[unverified]
        if not samples.size:
            return samples
        # Read words before bytes, as in `gather_verified`.
        words = self._words[indices]
        checksums, inside = self._checksums(indices)
        return samples[self.settle(indices, words, inside & ((words & CHECKSUM) == checksums))]

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Marks corrupted samples as not ready; returns which are corrupted, `[n]` bool.

        A sample that another process has cleared or rewritten since is skipped: the bytes may be a
        mixture of both versions, and do not show whether either is intact.
        """
        # If a word has changed since, this mark does not match it and has no effect.
        self._verified[indices[intact]] = words[intact]
        corrupt = self._unchanged(indices, words) & ~intact
        # NumPy has no compare-and-swap, so a concurrent write of a word could be lost. Only 0 is
        # safe to write: at worst, a sample is produced again.
        self._words[indices[corrupt]] = 0
        return corrupt

    def _unchanged(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which samples were ready, and neither cleared nor rewritten since, `[n]` bool."""
        return (words >= READY) & (self._words[indices] == words)

    @contextlib.contextmanager
    def claim(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Claims missing samples; yields the samples that the caller must produce, `[k]` int64."""
        # The kernel releases the claims of a process that is killed.
        with self._file.locked_bytes(self._slot_indices[samples].tolist()) as mine:
            # The previous holder of a claim may have just finished the sample.
            yield samples[np.array(mine, bool) & ~self.ready(samples)]

    @contextlib.contextmanager
    def claim_all(self) -> Iterator[bool]:
        """Claims the whole store to fill it from a stream; yields whether the claim succeeded."""
        # Lock the byte after the bytes of the samples, which stay free for `claim`.
        with self._file.locked_bytes([self.slots]) as (mine,):
            yield mine

    def clear(self) -> None:
        """Marks all samples as not ready, and frees the heap."""
        with self._heap.adding() if self._heap else contextlib.nullcontext():
            self._words[:] = 0
            if self._heap:
                self._heap.forget_end()

    @override
    def close(self) -> None:
        # End the thread first, because it reads the mapping.
        self._closing.set()
        if self._background is not None:
            self._background.join()
        for name in ("_columns", "_heap", "_words"):
            vars(self).pop(name, None)
        self._file.close()


def _create_page_tables(pages: np.ndarray, closing: threading.Event) -> None:
    for begin in range(0, len(pages), STEP_BYTES):
        if closing.is_set() or not populate_pages(pages[begin : begin + STEP_BYTES]):
            return
