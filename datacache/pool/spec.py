"""Describes a store, in the header of its file: layout of samples, shard of the node, sections."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes  # Registers types such as bfloat16 with NumPy.
import numpy as np

from datacache.order import permutation

ALIGNMENT = 64
"""Alignment of sections and columns in bytes: a cache line, which TensorFlow requires to avoid a
copy."""
TEXT = "string"
"""Name of the dtype of texts, which are Python bytes objects in object arrays."""
WORD_BYTES = 8
"""Number of metadata bytes of each sample."""
HEAP_STATE_BYTES = 8
"""Number of bytes of a heap's shared state: the offset of the next sample."""
Arrays = list[np.ndarray]
"""Components of one sample, or of a batch."""


def aligned(size: int) -> int:
    """Returns the smallest multiple of the alignment that is at least `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_array(value: Any) -> np.ndarray:
    """Returns a value as a NumPy array; bytes become an object array."""
    # Refuse NumPy's `S` dtype, because it strips trailing null bytes.
    array = np.array(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)
    if array.dtype.kind == "S":
        raise ValueError(
            f"Arrays of texts must contain Python bytes objects. Received: dtype={array.dtype}. "
            "Create the array with dtype=object."
        )
    # Stores and messages use the byte order of this machine.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Dtype and shape of one array of a sample.

    `dtype` is NumPy's name of the dtype, or "string". Dimensions that differ between samples are
    `None`.
    """

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def varies(self) -> bool:
        """True if samples differ in size."""
        return self.dtype == TEXT or None in self.shape

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """Shape of a component that does not vary."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def nbytes(self) -> int:
        """Number of bytes of a component that does not vary."""
        return math.prod(self.fixed_shape) * self._numpy_dtype.itemsize

    def matches(self, value: Any) -> bool:
        """Returns whether a value is an array of this dtype and shape."""
        if not isinstance(value, np.ndarray) or value.dtype != self._numpy_dtype:
            return False
        return value.shape == self.shape or (
            value.ndim == len(self.shape)
            and all(own in (None, size) for own, size in zip(self.shape, value.shape, strict=True))
        )

    @cached_property
    def _numpy_dtype(self) -> np.dtype[Any]:
        # Cache the dtype, because comparing names takes as long as copying a small sample.
        return np.dtype(object if self.dtype == TEXT else self.dtype)

    def pack(self, array: np.ndarray) -> bytes:
        """Returns an array as bytes; if the component varies, length and dimensions come first."""
        array = as_array(array)
        content = array.tobytes()
        if self.dtype == TEXT:
            texts = [bytes(text) for text in array.reshape(-1)]
            lengths = np.array([len(text) for text in texts], np.int64)
            content = lengths.tobytes() + b"".join(texts)
        if not self.varies:
            return content
        return np.array([len(content), *array.shape], np.int64).tobytes() + content

    def unpack(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the array that `pack` wrote, and the bytes after it."""
        head, size, shape = 0, self.nbytes, list(self.fixed_shape)
        if self.varies:
            head = 8 * (1 + len(self.shape))
            size, *shape = np.frombuffer(content[:head].tobytes(), np.int64).tolist()
        # Copy with `tobytes`, because components may be unaligned.
        own, rest = content[head : head + size].tobytes(), content[head + size :]
        if self.dtype != TEXT:
            return np.frombuffer(own, self.dtype).reshape(shape), rest
        count = math.prod(shape)
        ends = 8 * count + np.cumsum(np.frombuffer(own, np.int64, count))
        texts = np.empty(count, object)
        for i, (begin, end) in enumerate(itertools.pairwise([8 * count, *ends.tolist()])):
            texts[i] = own[begin:end]
        return texts.reshape(shape), rest

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Components of all samples of a store, in the order of a sample.

    If no component varies, each has its own column. Otherwise, whole samples are packed in the
    heap, and the only column contains their offsets and lengths.
    """

    components: tuple[Component, ...]

    @classmethod
    def of(cls, sample: Sequence[Any], varying: Sequence[Sequence[int]] | None = None) -> Layout:
        """Returns the layout of a sample; `varying` lists the axes that vary, by component."""
        arrays = [as_array(array) for array in sample]
        axes = varying or [()] * len(arrays)
        components = []
        for i, (array, free) in enumerate(zip(arrays, axes, strict=True)):
            if array.dtype.kind not in "biufcO" and not hasattr(ml_dtypes, array.dtype.name):
                raise ValueError(
                    f"Samples must be numbers or bytes. Received: {array.dtype} for component {i}. "
                    "Convert it in the source or in `preprocess`."
                )
            shape = tuple(None if axis in free else size for axis, size in enumerate(array.shape))
            dtype = TEXT if array.dtype.kind == "O" else array.dtype.name
            components.append(Component(dtype=dtype, shape=shape))
        return cls(components=tuple(components))

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Layout:
        """Inverts `dataclasses.asdict`, also after a round trip through JSON."""
        parts = [(part["dtype"], tuple(part["shape"])) for part in content["components"]]
        return cls(components=tuple(Component(dtype=dtype, shape=shape) for dtype, shape in parts))

    @cached_property
    def varies(self) -> bool:
        """True if samples differ in size."""
        return any(component.varies for component in self.components)

    @property
    def _columns(self) -> tuple[Component, ...]:
        return (PLACE,) if self.varies else self.components

    @property
    def bytes(self) -> int:
        """Number of bytes of a sample in the columns."""
        return sum(column.nbytes for column in self._columns)

    def offsets(self, samples: int) -> list[int]:
        """Returns the offset of each column, and the end of the last column, in bytes."""
        sizes = [aligned(samples * column.nbytes) for column in self._columns]
        return list(itertools.accumulate(sizes, initial=0))

    def columns(self, buffer: Any, samples: int) -> Arrays:
        """Returns the columns as arrays `[samples, ...]` that share the buffer's memory."""
        return [
            np.ndarray((samples, *column.fixed_shape), column.dtype, buffer, at)
            for column, at in zip(self._columns, self.offsets(samples), strict=False)
        ]

    def matches(self, sample: Sequence[Any]) -> bool:
        """Returns whether a sample has these components."""
        return len(sample) == len(self.components) and all(
            map(Component.matches, self.components, sample)
        )

    def check(self, sample: Sequence[Any], name: Callable[[int], str], number: int) -> Arrays:
        """Returns a sample's components as arrays; raises `ValueError` for another layout."""
        # Do not convert every sample: converting a small sample takes as long as copying it.
        arrays = list(sample if self.matches(sample) else map(as_array, sample))
        if not self.matches(arrays):
            raise ValueError(
                "All samples must have the same shapes and types. Received: "
                f"{Layout.of(arrays)} for {name(number)}, while the first sample has {self}. "
                "Convert them to one type and shape in `preprocess`, or if only shapes differ, "
                "pass variable_shapes=True."
            )
        return arrays

    def __str__(self) -> str:
        return " and ".join(map(str, self.components))

    def pack(self, sample: Arrays) -> builtins.bytes:
        """Returns a sample as bytes, for the heap of a store or a message."""
        return b"".join(map(Component.pack, self.components, sample))

    def unpack(self, content: np.ndarray) -> Arrays:
        """Returns the components of a sample from its bytes, `[bytes]` uint8."""
        arrays = []
        for component in self.components:
            array, content = component.unpack(content)
            arrays.append(array)
        return arrays


PLACE = Component(dtype="int64", shape=(2,))
"""Offset and length of a packed sample in the heap."""


def stack_samples(samples: Sequence[Sequence[Any]], layout: Layout) -> Arrays:
    """Returns an array `[n, ...]` per component; components that vary are padded at the end."""
    columns = zip(zip(*samples, strict=True), layout.components, strict=True)
    return [
        _stack_padded(list(map(as_array, arrays)), component)
        if component.varies
        else np.stack(arrays)
        for arrays, component in columns
    ]


def _stack_padded(arrays: Arrays, component: Component) -> np.ndarray:
    largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    fill = b"" if component.dtype == TEXT else 0
    joined = np.full((len(arrays), *largest), fill, arrays[0].dtype)
    for i, array in enumerate(arrays):
        inside: tuple[Any, ...] = (i, *(slice(size) for size in array.shape))
        # `[()]` extracts a single text from its array; NumPy would store the array itself.
        joined[inside] = array[()]
    return joined


def owner_nodes(samples: int, nodes: int) -> np.ndarray:
    """Returns the index of the node that owns each sample, `[samples]` int64.

    The numbers of samples per node differ by at most one.
    """
    # One node should not own all samples of a class, which are often adjacent.
    return _shuffled_positions(samples) % nodes


def _shuffled_positions(samples: int) -> np.ndarray:
    return np.argsort(permutation(samples, 0, samples), kind="stable")


@dataclass(frozen=True, kw_only=True)
class SampleShard:
    """Share of all samples that a node owns, and number of slots of the node's store.

    If the share has more samples than `slots`, the store holds a fixed random part of the share.
    """

    # Do not evict the least recently used samples, because an epoch uses each sample once, so a
    # sample would be evicted just before its next use.
    samples: int
    slots: int
    node: int = 0
    nodes: int = 1

    def slot_indices(self) -> np.ndarray:
        """Returns the slot of each sample, or -1 if it has none, `[samples]` int64."""
        # Slots follow the order of the samples, so that a pass in order reads memory in order.
        positions = _shuffled_positions(self.samples)
        kept = (positions % self.nodes == self.node) & (positions // self.nodes < self.slots)
        return np.where(kept, np.cumsum(kept) - 1, -1)

    @property
    def kept_samples(self) -> int:
        """Number of samples that fit."""
        return min(self.slots, self.assigned_samples)

    @property
    def assigned_samples(self) -> int:
        """Number of samples that the node owns, whether they fit or not."""
        return len(range(self.node, self.samples, self.nodes))


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Immutable description of a store; `source` describes the source to users.

    `heap_bytes` is the capacity for samples that differ in size.
    """

    layout: Layout
    shard: SampleShard
    heap_bytes: int = 0
    source: str = ""

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Start and end of each section after the header, in bytes."""
        slots, varies = self.shard.kept_samples, self.layout.varies
        sizes = {
            "words": WORD_BYTES * slots,
            "heap_state": HEAP_STATE_BYTES if varies else 0,
            "columns": self.layout.offsets(slots)[-1],
            # The heap is the last section, because its space is reserved as it fills.
            "heap": self.heap_bytes if varies else 0,
        }
        sections, begin = {}, 0
        for name, size in sizes.items():
            sections[name] = begin, begin + size
            begin += aligned(size)
        return sections

    @property
    def reserved_bytes(self) -> int:
        """Number of bytes of the sections that are reserved when the store is created."""
        return self.sections["heap"][0]

    @property
    def content_bytes(self) -> int:
        """Number of bytes of all sections."""
        return self.sections["heap"][1]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PoolSpec:
        """Inverts `dataclasses.asdict`, also after a round trip through JSON."""
        layout, shard = Layout.from_dict(content["layout"]), SampleShard(**content["shard"])
        return cls(**content | {"layout": layout, "shard": shard})
