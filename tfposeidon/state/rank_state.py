"""Redistribution of state that differs from rank to rank, which keeps its sums.

A residual is what a rank has not sent yet: what counts is its sum over all ranks, element by
element. So the vectors of all ranks are put together by variable, and cut anew for the ranks and
buckets that there are now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tfposeidon.state.placement import Placement

# Names in checkpoints, which were written before the attributes had theirs.
_ON_DISK = {"owners": "holders", "concatenated": "joined"}

WholeKey = tuple[str, tuple[str, ...]]
"""Name of a quantity, and the paths of the variables that it belongs to."""


@dataclass(frozen=True, kw_only=True)
class StateDescription:
    """Description of one array of a rank's state.

    Attributes:
      name: Name of the quantity, the same on all ranks.
      members: Variables that the quantity belongs to: path and number of elements of each, in
        order. Empty for what needs no variables to be told apart, such as an accumulated gradient,
        whose name has a number.
      offset: Index in the bucket, the members one after the other, at which it begins.
      placement: What it is to other ranks; replicated by default.
      owners: Number of ranks that own a share of each element, to be summed, of what is partial or
        sharded; 0 for all else.
      concatenated: True if the arrays of ranks do not add up, but stand one below the other, as the
        rows of factors do. Then `owners` is the number of ranks that share the arrays out, and
        `offset` is the index of this one.
      scalar: True if it is one number for all members, equal on all ranks, such as a count of
        steps.

    >>> residual = StateDescription(
    ...     name="residual",
    ...     members=(("kernel", 6),),
    ...     placement=Placement.PARTIAL,
    ...     offset=2,
    ...     owners=1,
    ... )
    >>> StateDescription.from_dict(residual.to_dict()) == residual
    True
    """

    name: str
    members: tuple[tuple[str, int], ...] = ()
    placement: Placement = Placement.REPLICATED
    offset: int = 0
    owners: int = 0
    concatenated: bool = False
    scalar: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns what `from_dict` reads, for JSON."""
        return {_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StateDescription:
        """Makes one from what `to_dict` returned.

        Args:
          content: Dictionary from `to_dict`, also after JSON has made lists of its tuples.

        Returns:
          The description, equal to the one that `to_dict` was called on.
        """
        names = {on_disk: name for name, on_disk in _ON_DISK.items()}
        values = {names.get(name, name): value for name, value in content.items()}
        members = tuple((path, length) for path, length in content["members"])
        placement = Placement(content["placement"])
        return cls(**values | {"members": members, "placement": placement})

    @property
    def is_cut(self) -> bool:
        """True if the array is a part of a bucket, which is cut otherwise on other ranks."""
        return bool(self.members) and self.owners > 0

    @property
    def whole_key(self) -> WholeKey:
        """Key of an array that is never cut."""
        return self.name, tuple(path for path, _ in self.members)

    def overlaps(self, length: int) -> Iterator[tuple[tuple[str, str], int, slice, slice]]:
        """Finds the variables of which an array holds a part.

        Args:
          length: Number of elements of the array.

        Yields:
          Quantity and path of the variable, its number of elements, the slice of the variable that
          the array holds, and the slice of the array that holds it. Nothing where the array is
          never cut.
        """
        start = 0
        for path, elements in self.members if self.is_cut else ():
            begin, end = max(start, self.offset), min(start + elements, self.offset + length)
            if begin < end:
                inside = slice(begin - start, end - start)
                in_array = slice(begin - self.offset, end - self.offset)
                yield (self.name, path), elements, inside, in_array
            start += elements


RankState = Sequence[tuple[StateDescription, np.ndarray]]
"""Arrays of one rank's state, each with its description."""


@dataclass(frozen=True)
class _Saved:
    """State that all ranks had saved.

    Attributes:
      totals: Sums over all ranks, as vectors, by quantity and path of a variable.
      scalars: Numbers that were equal on all ranks, by quantity and path of a variable.
      whole: Arrays that are never cut, of each rank that had one, in the order of ranks.
    """

    totals: dict[tuple[str, str], np.ndarray]
    scalars: dict[tuple[str, str], np.ndarray]
    whole: dict[WholeKey, list[np.ndarray]]


def redistribute(saved: Sequence[RankState], wanted: RankState) -> list[np.ndarray]:
    """Makes the arrays of one rank of a job from those of a job on other ranks.

    Args:
      saved: State of each rank that there was.
      wanted: State of one rank that there is now: only descriptions, shapes and dtypes are read,
        and the values of scalars that nobody has saved.

    Returns:
      One array for each description: this rank's part of the sum over all ranks, divided by its
      owners; what is equal on all ranks stays as it is, and what nobody has saved is zeros.

    Raises:
      ValueError: If something was saved that nobody wants, or variables that share a bucket now had
        different scalars.
    """
    found = _put_together(saved)
    _check_all_wanted(found, wanted)
    arrays = []
    for description, like in wanted:
        if description.scalar:
            arrays.append(_common_scalar(description, like, found.scalars))
        elif description.is_cut:
            arrays.append(_cut(description, like, found.totals))
        else:
            arrays.append(_whole(description, like, found.whole))
    return arrays


def _put_together(saved: Sequence[RankState]) -> _Saved:
    found = _Saved({}, {}, defaultdict(list))
    for state in saved:
        for description, array in state:
            if description.scalar:
                found.scalars.update(
                    {(description.name, path): array for path, _ in description.members}
                )
            elif not description.is_cut:
                found.whole[description.whole_key].append(array)
            for key, elements, inside, in_array in description.overlaps(array.size):
                total = found.totals.setdefault(key, np.zeros(elements, array.dtype))
                total[inside] += array[in_array]
    return found


def _check_all_wanted(found: _Saved, wanted: RankState) -> None:
    """Refuses to drop sums: gradients that were computed and not sent would be lost in silence."""
    unwanted = set(found.totals) - {
        (description.name, path) for description, _ in wanted for path, _ in description.members
    }
    if unwanted:
        name, path = min(unwanted)
        raise ValueError(f"there is a {name} of {path}, which another scheme sends now")


def _common_scalar(
    description: StateDescription, like: np.ndarray, scalars: dict[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """Returns the number that all members had, or the present one if nobody has saved any."""
    found = {
        path: scalars[description.name, path]
        for path, _ in description.members
        if (description.name, path) in scalars
    }
    if len({float(number) for number in found.values()}) > 1:
        shown = ", ".join(f"{float(number):g} of {path}" for path, number in found.items())
        raise ValueError(f"variables of one bucket had different {description.name}: {shown}")
    return next(iter(found.values()), like)


def _cut(
    description: StateDescription, like: np.ndarray, totals: dict[tuple[str, str], np.ndarray]
) -> np.ndarray:
    result = np.zeros_like(like)
    for key, _, inside, in_array in description.overlaps(like.size):
        if key in totals:
            # Each owner takes an equal share, so that the sum over ranks stays.
            result[in_array] = totals[key][inside] / description.owners
    return result


def _whole(
    description: StateDescription, like: np.ndarray, whole: dict[WholeKey, list[np.ndarray]]
) -> np.ndarray:
    arrays = whole.get(description.whole_key, [np.zeros_like(like)])
    if description.placement == Placement.LOCAL:
        # It says nothing to other ranks.
        return np.zeros_like(like)
    if description.placement == Placement.AVERAGED:
        return np.asarray(np.mean(arrays, axis=0), like.dtype)
    if description.concatenated:
        # In turn, so that no rank gets two arrays more than another.
        return _below_one_another(arrays[description.offset :: description.owners], like)
    if description.owners:
        return np.asarray(np.sum(arrays, axis=0) / description.owners, like.dtype)
    return arrays[0]


def _below_one_another(arrays: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    # Empty arrays may have other widths.
    filled = [array for array in arrays if array.size]
    return np.concatenate(filled) if filled else like[:0]
