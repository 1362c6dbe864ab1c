"""Bytes of a pool's samples, in columns and a heap; whether they are ready, the words say."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from datacache.native import gather
from datacache.pool.folder import Folder
from datacache.pool.heap import Heap
from datacache.pool.layout import Component, Layout


class Columns:
    """The `samples` file of a pool: a column for each component, so that a batch is one copy each.

    Components that differ in size lie in a heap; their columns have offset and length there, and
    the dimensions.

    Attributes:
      arrays: The columns, each `[slots, ...]`.
      heap: Heap of the components that differ in size; `None` if none does.
      pages: Mapping of the file.
    """

    def __init__(self, folder: Folder, layout: Layout, numbers: np.ndarray) -> None:
        self._layout, self._numbers = layout, numbers
        self.pages = folder.map_file("samples")
        self.arrays = layout.columns(self.pages, len(numbers))
        self.heap = Heap(folder) if layout.varies else None

    def write(self, index: int, rows: Sequence[np.ndarray]) -> int:
        """Writes a sample to its slot.

        Returns:
          CRC-32 of the sample's bytes.
        """
        for column, row in zip(self.arrays, rows, strict=True):
            column[index] = row
        # It is computed of what stands in the mapping, which readers will find, not of the arrays.
        (checksum,), _ = self.checksums(np.array([index]))
        return int(checksum)

    def add_to_heap(
        self, arrays: Sequence[np.ndarray], extents: Callable[[], np.ndarray]
    ) -> list[np.ndarray] | None:
        """Puts what varies into the heap, all or nothing; called within `heap.adding`.

        Returns:
          The rows of the columns, or `None` if the heap has no room.
        """
        assert self.heap is not None
        pairs = list(zip(self._layout.components, arrays, strict=True))
        contents = [
            component.encode(array) if component.varies else b"" for component, array in pairs
        ]
        # In one piece, so that a sample that does not fit leaves no half of itself behind.
        begin = self.heap.add(b"".join(contents), extents)
        if begin is None:
            return None
        # One offset more than there are components: where the last one ends.
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
    ) -> list[np.ndarray]:
        """Copies rows into one array per component; no component may vary.

        Returns:
          An array for each component, `[n, *shape]`; those of `into` if it is given.
        """
        if into is None:
            into = [
                np.empty((len(indices), *column.shape[1:]), column.dtype) for column in self.arrays
            ]
        for column, target in zip(self.arrays, into, strict=True):
            gather(column, indices, target, checksums)
        return list(into)

    def views(self, index: int) -> list[np.ndarray]:
        """Returns the row of each column, without a copy."""
        return [column[index] for column in self.arrays]

    def read(self, index: int) -> tuple[list[np.ndarray], list[bytes | None]]:
        """Returns copies of a sample's rows, and of what it has in the heap.

        Nothing of it is believed yet: the sample may be overwritten meanwhile, or be corrupt.
        """
        rows = [np.array(row) for row in self.views(index)]
        return rows, list(map(self._heap_content, rows, self._layout.components))

    def _heap_content(self, row: np.ndarray, component: Component) -> bytes | None:
        if not component.varies or self.heap is None:
            return b""
        content = self.heap.content(*row[:2].tolist())
        return None if content is None else bytes(content)

    def decode(
        self, rows: Sequence[np.ndarray], contents: Sequence[bytes | None]
    ) -> list[np.ndarray]:
        """Returns the components of a sample that `read` has read."""
        return [
            component.decode(content, row[2:].tolist()) if component.varies else row
            for component, content, row in zip(self._layout.components, contents, rows, strict=True)
        ]

    def begin_checksums(self, indices: np.ndarray) -> np.ndarray:
        """Returns checksums of samples' indices, `[n]` uint32, to be updated with their bytes.

        They make a sample corrupt that is whole, but lies in the slot of another.
        """
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

    def close(self) -> None:
        """Drops the columns and closes the heap; arrays that were copied remain valid."""
        self.arrays.clear()
        if self.heap is not None:
            self.heap.close()
