"""Bytes of a store's samples, in columns and a heap; the metadata words show which are ready."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from datacache.native import gather
from datacache.pool.folder import Folder
from datacache.pool.heap import Heap
from datacache.pool.layout import Arrays, Component, Layout


class Columns:
    """The `samples` file of a store: a column per component, so that a batch is one copy each.

    Components that differ in size lie in a heap; their columns contain its offset and length, and
    the dimensions. `arrays` are the columns, each `[slots, ...]`, and `pages` is the mapping of the
    file.
    """

    def __init__(self, folder: Folder, layout: Layout, numbers: np.ndarray) -> None:
        self._layout, self._numbers = layout, numbers
        self.pages = folder.map_file("samples")
        self.arrays = layout.columns(self.pages, len(numbers))
        self.heap = Heap(folder) if layout.varies else None

    def write(self, index: int, rows: Sequence[np.ndarray]) -> int:
        """Writes a sample to its slot; returns the CRC-32 of its bytes."""
        for column, row in zip(self.arrays, rows, strict=True):
            column[index] = row
        # Computed from the mapping, which readers will see, not from the arrays.
        (checksum,), _ = self.checksums(np.array([index]))
        return int(checksum)

    def add_to_heap(self, arrays: Arrays, extents: Callable[[], np.ndarray]) -> Arrays | None:
        """Adds components within `heap.adding`; returns the rows, or `None` without space."""
        assert self.heap is not None
        pairs = list(zip(self._layout.components, arrays, strict=True))
        contents = [
            component.encode(array) if component.varies else b"" for component, array in pairs
        ]
        # In one piece, so that a sample that does not fit is not written partially.
        begin = self.heap.add(b"".join(contents), extents)
        if begin is None:
            return None
        # There is one more offset than components: the end of the last one.
        offsets = itertools.accumulate(map(len, contents), initial=begin)
        return [
            np.array([offset, len(content), *array.shape]) if component.varies else array
            for (component, array), content, offset in zip(pairs, contents, offsets, strict=False)
        ]

    def extents(self, ready: np.ndarray) -> np.ndarray:
        """Returns offset and length in the heap of components of some slots, `[k, 2]` int64."""
        pairs = zip(self.arrays, self._layout.components, strict=True)
        return np.concatenate(
            [column[ready, :2] for column, component in pairs if component.varies]
        )

    def copy(
        self,
        indices: np.ndarray,
        into: Sequence[np.ndarray] | None = None,
        checksums: np.ndarray | None = None,
    ) -> Arrays:
        """Copies rows into one array `[n, *shape]` per component; no component may vary."""
        if into is None:
            into = [
                np.empty((len(indices), *column.shape[1:]), column.dtype) for column in self.arrays
            ]
        for column, target in zip(self.arrays, into, strict=True):
            gather(column, indices, target, checksums)
        return list(into)

    def views(self, index: int) -> Arrays:
        """Returns the row of each column, without a copy."""
        return [column[index] for column in self.arrays]

    def read(self, index: int) -> tuple[Arrays, list[bytes | None]]:
        """Returns copies of a sample's rows, and of its contents in the heap, not verified."""
        rows = [np.array(row) for row in self.views(index)]
        return rows, list(map(self._heap_content, rows, self._layout.components))

    def _heap_content(self, row: np.ndarray, component: Component) -> bytes | None:
        if not component.varies or self.heap is None:
            return b""
        content = self.heap.content(*row[:2].tolist())
        return None if content is None else bytes(content)

    def decode(self, rows: Arrays, contents: Sequence[bytes | None]) -> Arrays:
        """Returns the components of a sample from the result of `read`."""
        return [
            component.decode(content, row[2:].tolist()) if component.varies else row
            for component, content, row in zip(self._layout.components, contents, rows, strict=True)
        ]

    def begin_checksums(self, indices: np.ndarray) -> np.ndarray:
        """Returns checksums of the samples' indices, `[n]` uint32, to update with their bytes."""
        # Including the index makes an intact sample in the slot of another one corrupted.
        return self._number_checksums[indices]

    @functools.cached_property
    def _number_checksums(self) -> np.ndarray:
        checksums = np.zeros(len(self._numbers), np.uint32)
        gather(self._numbers, np.arange(len(self._numbers)), None, checksums)
        return checksums

    def checksums(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns checksums of samples, `[n]` uint32, and which lie inside the heap, `[n]` bool."""
        checksums, inside = self.begin_checksums(indices), np.ones(len(indices), bool)
        for column, component in zip(self.arrays, self._layout.components, strict=True):
            gather(column, indices, None, checksums)
            for i, index in enumerate(indices if component.varies else ()):
                assert self.heap is not None
                content = self.heap.content(*map(int, column[index, :2]))
                inside[i] &= content is not None
                checksums[i] = zlib.crc32(content or b"", int(checksums[i]))
        return checksums, inside
