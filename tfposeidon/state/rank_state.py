"""Moves state that differs from rank to rank onto other ranks, keeping its sums.

A residual is what a rank has not sent yet: what counts is the sum over all ranks, element by element. So
pieces are put together by variable, and cut anew for the ranks and buckets that there are now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one array of a rank's state is.

    Attributes:
      name: Of the quantity; the same on all ranks.
      members: Variables of the bucket it belongs to: path and elements, in order. Empty for what belongs to no
        bucket, such as an accumulated gradient.
      offset: Where in the bucket it begins.
      holders: How many ranks hold a part of each of its elements; 0 for what is equal on all ranks.
      joined: Whether what ranks hold does not add up, but stands one below the other, as the rows of factors. Then
        `holders` is how many ranks share it out, and `offset` which one this is.
      scalar: Whether it is one number for all members, equal on all ranks, such as a count of steps.
    """

    name: str
    members: tuple[tuple[str, int], ...] = ()
    offset: int = 0
    holders: int = 0
    joined: bool = False
    scalar: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Piece:
        """The inverse, of what JSON made of it."""
        members = tuple((path, length) for path, length in content["members"])
        return cls(**content | {"members": members})

    def overlaps(self, length: int) -> Iterator[tuple[tuple[str, str], int, slice, slice]]:
        """For an array of `length` elements: quantity and variable, its elements, where in it, where in the array."""
        start = 0
        for path, elements in () if self.scalar else self.members:
            begin, end = max(start, self.offset), min(start + elements, self.offset + length)
            if begin < end:
                inside = slice(begin - start, end - start)
                yield (
                    (self.name, path),
                    elements,
                    inside,
                    slice(begin - self.offset, end - self.offset),
                )
            start += elements


State = Sequence[tuple[Piece, np.ndarray]]


def redistributed(saved: Sequence[State], wanted: State) -> list[np.ndarray]:
    """Arrays for one rank of a job on other ranks.

    Args:
      saved: The state of each rank that there was.
      wanted: The pieces of one rank that there is now, with arrays of their shapes.

    Returns:
      One array for each piece: its part of the sum over all ranks, divided by its holders; what is equal on
      all ranks stays as it is.

    Raises:
      ValueError: If something was saved that nobody wants, or variables that share a bucket now had different scalars.
    """
    totals: dict[tuple[str, str], np.ndarray] = {}
    scalars: dict[tuple[str, str], np.ndarray] = {}
    whole: dict[str, list[np.ndarray]] = defaultdict(list)
    for state in saved:
        for piece, array in state:
            if not piece.members:
                whole[piece.name].append(array)
            if piece.scalar:
                scalars |= {(piece.name, path): array for path, _ in piece.members}
            for key, elements, inside, place in piece.overlaps(array.size):
                total = totals.setdefault(key, np.zeros(elements, array.dtype))
                total[inside] += array[place]
    unwanted = set(totals) - {
        (piece.name, path) for piece, _ in wanted for path, _ in piece.members
    }
    if unwanted:
        name, path = min(unwanted)
        raise ValueError(f"there is a {name} of {path}, which another scheme sends now")
    return [
        _scalar(piece, shaped, scalars) if piece.scalar else _wanted(piece, shaped, totals, whole)
        for piece, shaped in wanted
    ]


def _scalar(
    piece: Piece, shaped: np.ndarray, scalars: dict[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """The number that all members had; as it is now, where there was none."""
    found = {
        path: scalars[piece.name, path]
        for path, _ in piece.members
        if (piece.name, path) in scalars
    }
    if len({float(number) for number in found.values()}) > 1:
        shown = ", ".join(f"{float(number):g} of {path}" for path, number in found.items())
        raise ValueError(f"variables of one bucket had different {piece.name}: {shown}")
    return next(iter(found.values()), shaped)


def _wanted(
    piece: Piece, shaped: np.ndarray, totals: dict[Any, np.ndarray], whole: dict[str, Any]
) -> np.ndarray:
    if not piece.members:
        arrays = whole.get(piece.name, [np.zeros_like(shaped)])
        if piece.joined:
            return _below_one_another(arrays[piece.offset :: piece.holders], shaped)
        return (
            np.asarray(np.sum(arrays, axis=0) / piece.holders, shaped.dtype)
            if piece.holders
            else arrays[0]
        )
    result = np.zeros_like(shaped)
    for key, _, inside, place in piece.overlaps(shaped.size):
        if key in totals:
            result[place] = totals[key][inside] / piece.holders
    return result


def _below_one_another(arrays: Sequence[np.ndarray], shaped: np.ndarray) -> np.ndarray:
    # Empty arrays may have other widths.
    filled = [array for array in arrays if array.size]
    return np.concatenate(filled) if filled else shaped[:0]
