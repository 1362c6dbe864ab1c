"""What a sample consists of, and how many lie in memory: a column for each component, so that batches are one copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes at multiples of which columns begin: whole cache lines, and what TensorFlow takes without a copy."""
TEXT = "string"
Arrays = list[np.ndarray]
"""The components of one sample, or of a batch."""


def as_array(value: Any) -> np.ndarray:
    """As NumPy does it, but that bytes stay as they are: its own type for them drops zeros at the end.

    Raises:
      ValueError: If it has that type already.
    """
    array = np.array(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)
    if array.dtype.kind == "S":
        raise ValueError(
            f"Texts must be Python's bytes. Received: an array of {array.dtype}. Use dtype=object."
        )
    return array


@dataclass(frozen=True, kw_only=True)
class Component:
    """One array of a sample.

    Attributes:
      dtype: NumPy's name of numbers or booleans, or "string" for bytes.
      shape: The same for all samples, but where it says `None`.
    """

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def varies(self) -> bool:
        """Whether samples differ in size."""
        return self.dtype == TEXT or None in self.shape

    @property
    def column(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape of what its column holds: itself, or where its bytes are, how many, and its dimensions."""
        if self.varies:
            return "int64", (2 + len(self.shape),)
        return self.dtype, tuple(size for size in self.shape if size is not None)

    @property
    def column_bytes(self) -> int:
        """Of one sample in its column."""
        dtype, shape = self.column
        return int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize

    def is_surely(self, value: Any) -> bool:
        """Whether it is an array that agrees, as most are; `False` if that takes a closer look."""
        return (
            isinstance(value, np.ndarray)
            and value.dtype == self._wanted
            and value.shape == self.shape
        )

    @cached_property
    def _wanted(self) -> np.dtype[Any]:
        # Comparing names takes as long as copying a small sample.
        return np.dtype(object if self.dtype == TEXT else self.dtype)

    def agrees(self, array: np.ndarray) -> bool:
        """Whether an array is such a component."""
        dtype = TEXT if array.dtype.kind == "O" else array.dtype.name
        same = len(array.shape) == len(self.shape) and all(
            wanted in (None, size) for size, wanted in zip(array.shape, self.shape, strict=True)
        )
        return same and dtype == self.dtype

    def encoded(self, array: np.ndarray) -> bytes:
        """The contents of one that varies."""
        if self.dtype != TEXT:
            return array.tobytes()
        texts = [bytes(text) for text in array.reshape(-1)]
        return np.array([len(text) for text in texts], np.int64).tobytes() + b"".join(texts)

    def decoded(self, content: Any, shape: Sequence[int]) -> np.ndarray:
        """The inverse; numbers are a view of the content."""
        if self.dtype != TEXT:
            return np.frombuffer(content, self.dtype).reshape(shape)
        count = int(np.prod(shape, dtype=int))
        ends = 8 * count + np.cumsum(np.frombuffer(content, np.int64, count))
        texts = np.empty(count, object)
        for place, (begin, end) in enumerate(itertools.pairwise([8 * count, *ends.tolist()])):
            texts[place] = bytes(content[begin:end])
        return texts.reshape(shape)

    def __str__(self) -> str:
        return (
            f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The components of all samples of a pool.

    Attributes:
      components: In the order in which samples have them.
    """

    components: tuple[Component, ...]

    @classmethod
    def of(cls, sample: Sequence[Any], varying: Sequence[Sequence[int]] | None = None) -> Layout:
        """That of a sample's arrays.

        Args:
          sample: Arrays, or what NumPy makes arrays of.
          varying: For each array the dimensions in which other samples may differ; none by default.

        Raises:
          ValueError: If one of them holds neither numbers nor bytes.
        """
        arrays = [as_array(array) for array in sample]
        components = []
        for place, (array, free) in enumerate(
            zip(arrays, varying or [()] * len(arrays), strict=True)
        ):
            if array.dtype.kind not in "biufcO":
                raise ValueError(
                    f"Samples are numbers or bytes. Received: {array.dtype} for component {place}."
                )
            shape = tuple(None if axis in free else size for axis, size in enumerate(array.shape))
            dtype = TEXT if array.dtype.kind == "O" else array.dtype.name
            components.append(Component(dtype=dtype, shape=shape))
        return cls(components=tuple(components))

    @property
    def varies(self) -> bool:
        """Whether samples differ in size."""
        return any(component.varies for component in self.components)

    @property
    def bytes(self) -> int:
        """Of one sample in its columns."""
        return sum(component.column_bytes for component in self.components)

    def offsets(self, samples: int) -> list[int]:
        """Where the column of each component begins, and where the last one ends, with room for so many samples."""
        sizes = [
            -(-samples * component.column_bytes // ALIGNMENT) * ALIGNMENT
            for component in self.components
        ]
        return list(itertools.accumulate(sizes, initial=0))

    def columns(self, buffer: Any, samples: int) -> list[np.ndarray]:
        """The column of each component: arrays `[samples, ...]` into the buffer."""
        arrays = []
        for component, offset in zip(self.components, self.offsets(samples), strict=False):
            dtype, shape = component.column
            arrays.append(np.ndarray((samples, *shape), dtype, buffer, offset))
        return arrays

    def check(
        self, sample: Sequence[Any], name: Callable[[int], str], number: int
    ) -> list[np.ndarray]:
        """The sample's arrays, if they are of this layout.

        Args:
          sample: Arrays, or what NumPy makes arrays of.
          name: From numbers to what a user would call samples.
          number: The sample's.

        Raises:
          ValueError: If they are not; it names the sample and the first difference.
        """
        if len(sample) == len(self.components) and all(
            map(Component.is_surely, self.components, sample)
        ):
            return list(sample)
        arrays = [as_array(array) for array in sample]
        if len(arrays) != len(self.components):
            raise ValueError(
                f"All samples must have as many components. Received: {len(arrays)} for {name(number)}, where the "
                f"first sample has {len(self.components)}."
            )
        for place, (array, wanted) in enumerate(zip(arrays, self.components, strict=True)):
            if not wanted.agrees(array):
                received = Layout.of([array]).components[0]
                raise ValueError(
                    f"All samples must have the same shapes and types. Received: {received} for component {place} of "
                    f"{name(number)}, where the first sample has {wanted}. Make `preprocess` resize or pad to one "
                    "shape, or say variable_shapes=True."
                )
        return arrays

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Layout:
        """The inverse, of what JSON made of it."""
        parts = [
            Component(dtype=part["dtype"], shape=tuple(part["shape"]))
            for part in content["components"]
        ]
        return cls(components=tuple(parts))


def batch(samples: Sequence[Sequence[Any]], layout: Layout) -> list[np.ndarray]:
    """Samples in one array per component, `[n, ...]`; what varies is padded at its end, with zeros or empty texts."""
    return [
        _padded(list(arrays), of)
        for arrays, of in zip(zip(*samples, strict=True), layout.components, strict=True)
    ]


def _padded(arrays: list[Any], component: Component) -> np.ndarray:
    if not component.varies:
        return np.stack(arrays)
    arrays = [as_array(array) for array in arrays]
    largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    fill = b"" if component.dtype == TEXT else 0
    joined = np.full((len(arrays), *largest), fill, arrays[0].dtype)
    for place, array in enumerate(arrays):
        inside: tuple[Any, ...] = (place, *(slice(size) for size in array.shape))
        # A text by itself would go in as an array that holds it.
        joined[inside] = array[()]
    return joined
