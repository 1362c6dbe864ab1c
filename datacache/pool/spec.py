"""Description of a store, which its header contains: layout of samples, shard of a node, files.

Components of samples lie in columns, so that batches are one copy.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import ml_dtypes  # Registers types such as bfloat16 with NumPy.
import numpy as np

from datacache.order import permutation

ALIGNMENT = 64
"""Alignment of columns in bytes: cache lines, from which TensorFlow needs no copy."""
TEXT = "string"
"""Dtype of components of Python's bytes, in object arrays."""
WORD_BYTES = 2 * 8
"""Metadata bytes of each sample, in addition to its columns: its word, and the verified one."""
HEAP_STATE_BYTES = 4 * 8
"""Bytes of the state that processes share for a heap: positions, and the bytes last refused."""
Arrays = list[np.ndarray]
"""Components of one sample, or of a batch."""


def as_array(value: Any) -> np.ndarray:
    """Returns a value as a NumPy array; bytes become an object array."""
    # NumPy's own dtype for bytes drops trailing zeros.
    array = np.array(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)
    if array.dtype.kind == "S":
        raise ValueError(
            f"Texts must be Python bytes. Received: an array of {array.dtype}. Use dtype=object."
        )
    # Stores and messages use the byte order of this machine.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Array of a sample: NumPy's name of its dtype, or "string", and its shape.

    Example:
      >>> print(Component(dtype="uint8", shape=(None, 3)))
      uint8[?, 3]
    """

    dtype: str
    # Dimensions that differ between samples are `None`.
    shape: tuple[int | None, ...]

    @property
    def varies(self) -> bool:
        """True if samples differ in size."""
        return self.dtype == TEXT or None in self.shape

    @property
    def column(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a sample's row in the column."""
        if self.varies:
            # Offset and length in the heap, and the dimensions.
            return "int64", (2 + len(self.shape),)
        return self.dtype, tuple(size for size in self.shape if size is not None)

    @property
    def column_bytes(self) -> int:
        """Bytes of a sample's row in the column."""
        dtype, shape = self.column
        return int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize

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
        # Cached, because comparing names of dtypes takes as long as copying a small sample.
        return np.dtype(object if self.dtype == TEXT else self.dtype)

    def encode(self, array: np.ndarray) -> bytes:
        """Returns the bytes of a variable component; the int64 lengths of texts precede them."""
        if self.dtype != TEXT:
            return array.tobytes()
        texts = [bytes(text) for text in array.reshape(-1)]
        return np.array([len(text) for text in texts], np.int64).tobytes() + b"".join(texts)

    def decode(self, content: Any, shape: Sequence[int]) -> np.ndarray:
        """Returns the component from the bytes of `encode`; numbers are a view of the bytes."""
        if self.dtype != TEXT:
            return np.frombuffer(content, self.dtype).reshape(shape)
        count = int(np.prod(shape, dtype=int))
        ends = 8 * count + np.cumsum(np.frombuffer(content, np.int64, count))
        texts = np.empty(count, object)
        for i, (begin, end) in enumerate(itertools.pairwise([8 * count, *ends.tolist()])):
            texts[i] = bytes(content[begin:end])
        return texts.reshape(shape)

    def pack(self, array: np.ndarray) -> bytes:
        """Returns a component as a message; length and dimensions precede one that varies."""
        array = as_array(array)
        if not self.varies:
            return array.tobytes()
        content = self.encode(array)
        return np.array([len(content), *array.shape], np.int64).tobytes() + content

    def unpack(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a component from the bytes of `pack`, and the bytes after it."""
        head, size, shape = 0, self.column_bytes, [one for one in self.shape if one is not None]
        if self.varies:
            head = 8 * (1 + len(self.shape))
            size, *shape = np.frombuffer(content[:head].tobytes(), np.int64).tolist()
        # Copied by `tobytes`, because components may be unaligned within the message.
        return self.decode(content[head : head + size].tobytes(), shape), content[head + size :]

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Components of all samples of a store, in the order of a sample."""

    components: tuple[Component, ...]

    @classmethod
    def of(cls, sample: Sequence[Any], varying: Sequence[Sequence[int]] | None = None) -> Layout:
        """Returns the layout of a sample, of which the axes `varying` of each component vary."""
        arrays = [as_array(array) for array in sample]
        axes = varying or [()] * len(arrays)
        components = []
        for i, (array, free) in enumerate(zip(arrays, axes, strict=True)):
            if array.dtype.kind not in "biufcO" and not hasattr(ml_dtypes, array.dtype.name):
                raise ValueError(
                    f"Samples must be numbers or bytes. Received: {array.dtype} for component {i}."
                )
            shape = tuple(None if axis in free else size for axis, size in enumerate(array.shape))
            dtype = TEXT if array.dtype.kind == "O" else array.dtype.name
            components.append(Component(dtype=dtype, shape=shape))
        return cls(components=tuple(components))

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Layout:
        """Returns a layout from JSON of its `dataclasses.asdict`."""
        return cls(
            components=tuple(
                Component(dtype=component["dtype"], shape=tuple(component["shape"]))
                for component in content["components"]
            )
        )

    @property
    def varies(self) -> bool:
        """True if samples differ in size."""
        return any(component.varies for component in self.components)

    @property
    def bytes(self) -> int:
        """Bytes of a sample in the columns, without those in the heap."""
        return sum(component.column_bytes for component in self.components)

    def offsets(self, samples: int) -> list[int]:
        """Returns the offset of each column, and the end of the last one, in bytes."""
        sizes = [
            -(-samples * component.column_bytes // ALIGNMENT) * ALIGNMENT
            for component in self.components
        ]
        return list(itertools.accumulate(sizes, initial=0))

    def columns(self, buffer: Any, samples: int) -> Arrays:
        """Returns the column of each component: arrays `[samples, ...]` into the buffer."""
        arrays = []
        for component, offset in zip(self.components, self.offsets(samples), strict=False):
            dtype, shape = component.column
            arrays.append(np.ndarray((samples, *shape), dtype, buffer, offset))
        return arrays

    def check(self, sample: Sequence[Any], name: Callable[[int], str], number: int) -> Arrays:
        """Returns a sample's components as arrays; raises `ValueError` for another layout."""
        if len(sample) == len(self.components) and all(
            map(Component.matches, self.components, sample)
        ):
            return list(sample)
        arrays = [as_array(array) for array in sample]
        if len(arrays) != len(self.components):
            raise ValueError(
                "All samples must have the same number of components. Received: "
                f"{len(arrays)} for {name(number)}, while the first sample has "
                f"{len(self.components)}."
            )
        for i, (array, wanted) in enumerate(zip(arrays, self.components, strict=True)):
            if not wanted.matches(array):
                received = Layout.of([array]).components[0]
                raise ValueError(
                    "All samples must have the same shapes and types. Received: "
                    f"{received} for component {i} of {name(number)}, while the first sample has "
                    f"{wanted}. Resize or pad to one shape in `preprocess`, or pass "
                    "variable_shapes=True."
                )
        return arrays

    def pack(self, samples: Sequence[Arrays]) -> tuple[np.ndarray, np.ndarray]:
        """Returns samples concatenated to send, `[bytes]` uint8, and the bytes of each, int64."""
        texts = [b"".join(map(Component.pack, self.components, sample)) for sample in samples]
        lengths = np.array([len(text) for text in texts], np.int64)
        return np.frombuffer(b"".join(texts), np.uint8), lengths

    def unpack(self, content: np.ndarray) -> Arrays:
        """Returns the components of one sample from its bytes."""
        arrays = []
        for component in self.components:
            array, content = component.unpack(content)
            arrays.append(array)
        return arrays


def stack_samples(samples: Sequence[Sequence[Any]], layout: Layout) -> Arrays:
    """Returns an array `[n, ...]` per component; those that vary are padded at the end.

    Example:
      >>> layout = Layout.of([np.zeros(1)], varying=[[0]])
      >>> stack_samples([[np.ones(1)], [np.ones(2)]], layout)
      [array([[1., 0.],
             [1., 1.]])]
    """
    columns = zip(*samples, strict=True)
    return [
        _stack_padded(list(arrays), component)
        for arrays, component in zip(columns, layout.components, strict=True)
    ]


def _stack_padded(arrays: list[Any], component: Component) -> np.ndarray:
    if not component.varies:
        return np.stack(arrays)
    arrays = [as_array(array) for array in arrays]
    largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    fill = b"" if component.dtype == TEXT else 0
    joined = np.full((len(arrays), *largest), fill, arrays[0].dtype)
    for i, array in enumerate(arrays):
        inside: tuple[Any, ...] = (i, *(slice(size) for size in array.shape))
        # `[()]` extracts a single text from its array; NumPy would store the array itself.
        joined[inside] = array[()]
    return joined


def owner_nodes(samples: int, nodes: int) -> np.ndarray:
    """Returns the node that owns each sample, `[samples]` int64: equal numbers, up to one."""
    # At random, so that samples of a class, which are adjacent, are spread over all nodes.
    return _shuffled_positions(samples) % nodes


def _shuffled_positions(samples: int) -> np.ndarray:
    return np.argsort(permutation(samples, 0, samples), kind="stable")


@dataclass(frozen=True, kw_only=True)
class SampleShard:
    """Samples that a store retains: those that its node owns, of which `slots` fit."""

    # If not all fit, the choice never changes. Evicting the least recently used samples would have
    # fewer hits: an epoch uses each sample once, so a sample would be evicted just before its next
    # use.
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
    """Immutable description of a store; `source` is the user's name of the source.

    `heap_bytes` limits the components that differ in size.
    """

    layout: Layout
    shard: SampleShard
    heap_bytes: int = 0
    source: str = ""

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Start and end of each section after the header, in bytes; each begins at a page."""
        slots, varies = self.shard.kept_samples, self.layout.varies
        sizes = {
            "words": WORD_BYTES * slots,
            "heap_state": HEAP_STATE_BYTES if varies else 0,
            "columns": self.layout.offsets(slots)[-1],
            # The last section, because its space is reserved as it fills.
            "heap": self.heap_bytes if varies else 0,
        }
        sections, begin = {}, 0
        for name, size in sizes.items():
            sections[name] = begin, begin + size
            begin += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return sections

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the sections whose space is reserved when the store is created."""
        return self.sections["heap"][0]

    @property
    def content_bytes(self) -> int:
        """Bytes of all sections."""
        return self.sections["heap"][1]

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as values for JSON."""
        # The keys are the format on disk, independent of the names of the attributes.
        content = {"layout": asdict(self.layout), "part": asdict(self.shard)}
        return content | {"source": self.source, "heap_bytes": self.heap_bytes}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PoolSpec:
        """Returns the description that `to_dict` wrote."""
        return cls(
            layout=Layout.from_dict(content["layout"]),
            shard=SampleShard(**content["part"]),
            heap_bytes=content["heap_bytes"],
            source=content["source"],
        )
