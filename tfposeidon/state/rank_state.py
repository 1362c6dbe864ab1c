"""Redistribution of per-rank state over other ranks, which preserves sums over ranks.

A residual is the part of a gradient that a rank has not sent yet, so only its elementwise sum over
all ranks matters. The vectors of all ranks are summed by variable, and split again for the current
ranks and buckets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tfposeidon.state.placement import Placement

# Field names in older checkpoints, which predate the attribute names.
_ON_DISK = {"owners": "holders"}

WholeKey = tuple[str, tuple[str, ...]]
"""Name of a quantity, and the paths of its variables."""


@dataclass(frozen=True, kw_only=True)
class StateDescription:
    """Description of one array of a rank's state.

    A partial or sharded array covers a range of its bucket, which is its `members` concatenated.

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
    # Path and number of elements per variable, in order. Empty if `name` identifies the quantity,
    # as for a numbered accumulated gradient.
    members: tuple[tuple[str, int], ...] = ()
    placement: Placement = Placement.REPLICATED
    # Index in the bucket at which the array starts.
    offset: int = 0
    # Number of ranks that own a share of each element, to be summed; 0 for other placements.
    owners: int = 0
    # True for one number per bucket that is equal on all ranks, such as a count of steps.
    scalar: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON that `from_dict` reads."""
        return {_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StateDescription:
        """Creates a description from a result of `to_dict`, also if its tuples are lists."""
        names = {on_disk: name for name, on_disk in _ON_DISK.items()}
        values = {names.get(name, name): value for name, value in content.items()}
        members = tuple((path, length) for path, length in content["members"])
        placement = Placement(content["placement"])
        return cls(**values | {"members": members, "placement": placement})

    @property
    def is_cut(self) -> bool:
        """True if the array is a range of a bucket, and may be split differently on other ranks."""
        return bool(self.members) and self.owners > 0

    @property
    def whole_key(self) -> WholeKey:
        """Key of an array that is never split."""
        return self.name, tuple(path for path, _ in self.members)

    def overlaps(self, length: int) -> Iterator[tuple[tuple[str, str], int, slice, slice]]:
        """Yields the variables in an array of `length` elements; none if it is never split.

        Each item holds the quantity and path, the variable's number of elements, the range in the
        variable and the range in the array.
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
"""Arrays of one rank's state with their descriptions."""


@dataclass(frozen=True)
class _Saved:
    """Combined state of all ranks.

    `whole` holds arrays that are never split, in the order of ranks. `totals` are sums over all
    ranks, as vectors, by quantity and path; `scalars` are equal on all ranks.
    """

    totals: dict[tuple[str, str], np.ndarray]
    scalars: dict[tuple[str, str], np.ndarray]
    whole: dict[WholeKey, list[np.ndarray]]


def redistribute(saved: Sequence[RankState], wanted: RankState) -> list[np.ndarray]:
    """Creates the arrays of one rank in a job from the state of all ranks of an earlier job.

    `wanted` supplies descriptions, shapes, dtypes, and values of scalars that were not saved. State
    that was not saved becomes zeros. It raises a `ValueError` if a saved sum has no place in
    `wanted`, or if variables of one bucket had different scalars.
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
    """Refuses to drop sums: computed gradients that were not sent would be lost silently."""
    unwanted = set(found.totals) - {
        (description.name, path) for description, _ in wanted for path, _ in description.members
    }
    if unwanted:
        name, path = min(unwanted)
        raise ValueError(f"the snapshot holds a {name} of {path}, which another scheme now sends")


def _common_scalar(
    description: StateDescription, like: np.ndarray, scalars: dict[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """Returns the saved number of all members, or the current number if none was saved."""
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
            # Each owner takes an equal share, which preserves the sum over ranks.
            result[in_array] = totals[key][inside] / description.owners
    return result


def _whole(
    description: StateDescription, like: np.ndarray, whole: dict[WholeKey, list[np.ndarray]]
) -> np.ndarray:
    arrays = whole.get(description.whole_key, [np.zeros_like(like)])
    if description.placement == Placement.LOCAL:
        # Local state has no meaning on other ranks.
        return np.zeros_like(like)
    if description.placement == Placement.AVERAGED:
        return np.asarray(np.mean(arrays, axis=0), like.dtype)
    if description.owners:
        return np.asarray(np.sum(arrays, axis=0) / description.owners, like.dtype)
    return arrays[0]


def saved_descriptions(own: dict[str, np.ndarray], names: dict[str, str]) -> list[StateDescription]:
    """Returns the descriptions that a snapshot has of a rank's state, with current paths."""
    saved = with_names(json.loads(own["pieces"].tobytes()), names)
    return [StateDescription.from_dict(content) for content in saved]


def with_names(value: Any, names: dict[str, str]) -> Any:
    """Replaces saved paths of variables in JSON by current paths."""
    if isinstance(value, dict):
        return {_renamed(key, names): with_names(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [with_names(item, names) for item in value]
    return _renamed(value, names) if isinstance(value, str) else value


def _renamed(text: str, names: dict[str, str]) -> str:
    # Equal paths are numbered; see `distinct_paths`.
    path, mark, number = text.partition("#")
    return names.get(path, path) + mark + number
