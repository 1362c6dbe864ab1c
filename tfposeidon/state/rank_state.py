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
      members: Variables of the bucket it is a piece of: path and elements, in order. Empty for what is no piece
        of a bucket, such as an accumulated gradient.
      offset: Where in the bucket it begins.
      holders: How many ranks hold a part of each of its elements; 0 for what is equal on all ranks.
      joined: Whether what ranks hold does not add up, but stands one below the other, as the rows of factors. Then
        `holders` is how many ranks share it out, and `offset` which one this is.
    """

    name: str
    members: tuple[tuple[str, int], ...] = ()
    offset: int = 0
    holders: int = 0
    joined: bool = False

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
        for path, elements in self.members:
            begin, end = max(start, self.offset), min(start + elements, self.offset + length)
            if begin < end:
                inside = slice(begin - start, end - start)
                yield (self.name, path), elements, inside, slice(begin - self.offset, end - self.offset)
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
      ValueError: If something was saved that nobody wants.
    """
    totals: dict[tuple[str, str], np.ndarray] = {}
    whole: dict[str, list[np.ndarray]] = defaultdict(list)
    for state in saved:
        for piece, array in state:
            if not piece.members:
                whole[piece.name].append(array)
            for key, elements, inside, place in piece.overlaps(array.size):
                total = totals.setdefault(key, np.zeros(elements, array.dtype))
                total[inside] += array[place]
    unwanted = set(totals) - {(piece.name, path) for piece, _ in wanted for path, _ in piece.members}
    if unwanted:
        name, path = min(unwanted)
        raise ValueError(f"there is a {name} of {path}, which another scheme sends now")
    return [_wanted(piece, shape, totals, whole) for piece, shape in wanted]


def _wanted(piece: Piece, shaped: np.ndarray, totals: dict[Any, np.ndarray], whole: dict[str, Any]) -> np.ndarray:
    if not piece.members:
        arrays = whole.get(piece.name, [np.zeros_like(shaped)])
        if piece.joined:
            return _below_one_another(arrays[piece.offset :: piece.holders], shaped)
        return np.asarray(np.sum(arrays, axis=0) / piece.holders, shaped.dtype) if piece.holders else arrays[0]
    result = np.zeros_like(shaped)
    for key, _, inside, place in piece.overlaps(shaped.size):
        if key in totals:
            result[place] = totals[key][inside] / piece.holders
    return result


def _below_one_another(arrays: Sequence[np.ndarray], shaped: np.ndarray) -> np.ndarray:
    # Empty arrays may have other widths.
    filled = [array for array in arrays if array.size]
    return np.concatenate(filled) if filled else shaped[:0]
