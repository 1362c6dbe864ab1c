"""What a sample consists of, and how many lie in memory: a column for each component, so that batches are one copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes at multiples of which columns begin: whole cache lines, and what DLPack asks for."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One array of a sample.

    Attributes:
      dtype: NumPy's name; numbers and booleans only.
      shape: The same for all samples.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The components of all samples of a pool.

    Attributes:
      components: In the order in which samples have them.
    """

    components: tuple[Component, ...]

    @classmethod
    def of(cls, sample: Sequence[Any]) -> Layout:
        """That of a sample's arrays.

        Raises:
          ValueError: If one of them does not hold numbers.
        """
        arrays = [np.asarray(array) for array in sample]
        for place, array in enumerate(arrays):
            if array.dtype.kind not in "biufc":
                raise ValueError(f"Pools hold numbers. Received: {array.dtype} for component {place}.")
        return cls(components=tuple(Component(dtype=a.dtype.name, shape=a.shape) for a in arrays))

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return sum(component.bytes for component in self.components)

    def offsets(self, samples: int) -> list[int]:
        """Where the column of each component begins, and where the last one ends, with room for so many samples."""
        sizes = [-(-samples * component.bytes // ALIGNMENT) * ALIGNMENT for component in self.components]
        return list(itertools.accumulate(sizes, initial=0))

    def columns(self, buffer: Any, samples: int) -> list[np.ndarray]:
        """The column of each component: arrays `[samples, *shape]` into the buffer."""
        pairs = zip(self.components, self.offsets(samples), strict=False)
        return [np.ndarray((samples, *c.shape), c.dtype, buffer, offset) for c, offset in pairs]

    def check(self, sample: Sequence[Any], name: str) -> list[np.ndarray]:
        """The sample's arrays, if they are of this layout.

        Raises:
          ValueError: If they are not; it names the sample and the first difference.
        """
        arrays = [np.asarray(array) for array in sample]
        found = Layout.of(arrays)
        if found == self:
            return arrays
        pairs = zip(found.components, self.components, strict=False)
        place, (received, wanted) = next(
            ((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]),
            (0, (f"{len(arrays)} components", f"{len(self.components)}")),
        )
        raise ValueError(
            f"All samples must have the same shapes and types. Received: {received} for component {place} of {name}, "
            f"where the first sample has {wanted}. Make `preprocess` resize or pad to one shape."
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Layout:
        """The inverse, of what JSON made of it."""
        parts = [Component(dtype=part["dtype"], shape=tuple(part["shape"])) for part in content["components"]]
        return cls(components=tuple(parts))
