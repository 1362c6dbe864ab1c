"""Describes how the states of ranks relate, and redistributes them over the ranks of another job.

Think of a placement as the rule for combining the values of all ranks: use any of them, average,
sum or concatenate them, or let each rank retain its own. Checkpoints, broadcasts and comparisons
follow it. A job that resumes on other ranks preserves sums. For example, a residual is the part of
a gradient that a rank has not sent yet, so only its elementwise sum over all ranks matters. The
vectors of all ranks are summed by variable, and split again for the current ranks and buckets.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np


class Placement(enum.StrEnum):
    """Relation between the values of a variable on different ranks.

    Attributes:
      REPLICATED: Identical on all ranks, such as frozen weights and counters.
      AVERAGED: Updated by each rank from its own batches; the mean over ranks is the value, as for
        moving statistics.
      LOCAL: Independent on each rank, such as seeds and the states of recurrent sequences.
      PARTIAL: A summand on each rank; the sum over ranks is the value, as for token counts and
        residuals of sparse schemes.
      SHARDED: A slice on each rank, such as sharded optimizer state. State of layers cannot have
        this placement.
    """

    REPLICATED = "replicated"
    AVERAGED = "averaged"
    LOCAL = "local"
    PARTIAL = "partial"
    SHARDED = "sharded"


# ------------------------------------------------------------------ state of layers


Placed = Iterable[tuple[Any, Placement | str]]
"""Pairs of variable and placement."""
_registered: dict[type, Placement | Callable[[Any], Placed]] = {}


def register(layer: type, placement: Placement | str | Callable[[Any], Placed]) -> None:
    """Registers the placement of a layer class's state, in place of the default.

    By default, a layer's variables that receive no gradient are averaged if they are floating
    point, and replicated otherwise. Frozen weights are replicated. Seeds and the states of Keras's
    recurrent layers are local. A callback declares the placement of its variables with a method
    `state()`, which returns pairs of variable and placement.

    Args:
      layer: Class of layers. The placement also applies to subclasses that are not registered.
      placement: `"replicated"`, `"averaged"`, `"local"` or `"partial"`, for all of a layer's
        variables that receive no gradient. State outside of variables, such as a vocabulary, is
        local with `"local"` and replicated otherwise. Alternatively, a function that takes the
        layer and returns pairs of variable and placement. It may return variables that Keras does
        not list; variables that it omits have the default placement.

    Raises:
      TypeError: If `layer` is not a class.
      ValueError: If the placement is unknown, or is `"sharded"`, which layers cannot have.

    Cost: none at registration. Reading the state iterates over the model's layers.

    >>> import tfposeidon as tp
    >>> class Codebook(keras.layers.Layer):
    ...     pass
    >>> tp.state.register(Codebook, "averaged")
    """
    if not isinstance(layer, type):
        raise TypeError(f"`layer` must be a layer class. Received: layer={layer!r}. Pass a class.")
    if not callable(placement):
        placement = _checked(placement)
    _registered[layer] = placement


def placed(pairs: Placed) -> list[tuple[Any, Placement]]:
    """Returns pairs of variable and placement; raises `ValueError` for an unknown placement."""
    return [(variable, _checked(placement)) for variable, placement in pairs]


def placements_of_layers(model: Any) -> list[tuple[Any, Placement]]:
    """Returns all variables of built layers, each once, in the same order on all ranks."""
    found: dict[int, tuple[Any, Placement | str]] = {}
    for layer in model._flatten_layers():
        for variable, placement in _state_of(layer):
            found.setdefault(id(variable), (variable, placement))
    # Layers may share a variable that only one of them trains.
    for variable in model.trainable_variables:
        found.pop(id(variable), None)
    return placed(found.values())


def seeds_of_layers(model: Any) -> list[Any]:
    """Returns the state variables of the seed generators in a model's layers, each once."""
    return list({id(v): v for v in model.variables if is_seed(v)}.values())


def is_seed(variable: Any) -> bool:
    return getattr(variable, "name", None) == "seed_generator_state"


def another_seed(state: Any, number: int) -> np.ndarray:
    """Returns a seed generator's state with another seed for each `number`; 0 retains the seed."""
    seed, count = np.asarray(state)
    # The factor, 2**32 divided by the golden ratio, is odd, so all multiples below 2**32 differ.
    other = (int(seed) + number * 0x9E3779B9) % 2**32
    return np.asarray([other, count]).astype(state.dtype.as_numpy_dtype)


def placement_outside_variables(layer: Any) -> Placement:
    """Returns the placement of a layer's state outside of variables, such as tables and files."""
    rule = next((_registered[cls] for cls in type(layer).__mro__ if cls in _registered), None)
    return Placement.LOCAL if rule == Placement.LOCAL else Placement.REPLICATED


def _checked(placement: Any) -> Placement:
    # Reject sharded state, because readers of layer and callback state could not join the shards.
    known = [str(one) for one in Placement if one != Placement.SHARDED]
    if placement not in known:
        raise ValueError(
            f"`placement` must be one of {', '.join(known)}, or a function of the layer. "
            f'Received: placement={placement!r}. Use for example "averaged".'
        )
    return Placement(placement)


def _state_of(layer: Any) -> list[tuple[Any, Placement | str]]:
    """Returns a layer's variables with placements, without variables of inner layers."""
    statistics, seeds = _untrained(layer)
    found: dict[int, tuple[Any, Placement | str]]
    found = {id(v): (v, Placement.REPLICATED) for v in layer._trainable_variables}
    found |= {id(v): (v, by_dtype(v)) for v in statistics}
    for known in reversed(type(layer).__mro__):
        rule = _registered.get(known)
        if callable(rule):
            found |= {id(v): (v, placement) for v, placement in rule(layer)}
        elif rule is not None:
            found |= {id(v): (v, rule) for v in statistics}
    return [*found.values(), *((v, Placement.LOCAL) for v in seeds)]


def _untrained(layer: Any) -> tuple[list[Any], list[Any]]:
    """Returns a layer's own variables that were built as non-trainable, and its seeds."""
    inner = layer._flatten_layers(include_self=False, recursive=False)
    others = {id(variable) for one in inner for variable in one.variables}
    # A layer may share its variables with inner layers.
    others -= {id(value) for value in vars(layer).values()}
    # Leave out frozen weights as well, which Keras's public lists count as not trainable.
    others |= {id(variable) for variable in layer._trainable_variables}
    own = [variable for variable in layer.variables if id(variable) not in others]
    return [v for v in own if not is_seed(v)], [v for v in own if is_seed(v)]


def by_dtype(variable: Any) -> Placement:
    """Returns the default placement of state that each rank updates independently."""
    is_float = keras.backend.is_float_dtype(variable.dtype)
    return Placement.AVERAGED if is_float else Placement.REPLICATED


def _place_statistics(layer: Any) -> Placed:
    # Statistics of a frozen layer are constant, and averaging could round them.
    placement = Placement.AVERAGED if layer.trainable else Placement.REPLICATED
    return [(variable, placement) for variable in _untrained(layer)[0]]


register(keras.layers.BatchNormalization, _place_statistics)
# The statistics of this layer are adapted before training, and constant in training.
register(keras.layers.Normalization, Placement.REPLICATED)
# Keras does not list recurrent states among a layer's variables.
register(
    keras.layers.RNN,
    lambda layer: [(v, Placement.LOCAL) for v in keras.tree.flatten(layer.states or [])],
)


# ------------------------------------------------------------------ state of ranks


@dataclass(frozen=True, kw_only=True)
class StateDescription:
    """Description of one array of a rank's state.

    A partial or sharded array covers a range of its bucket, the concatenation of `members`.
    """

    name: str
    # Path and number of elements of each variable, in order. The tuple is empty if `name`
    # identifies the quantity, as for a numbered accumulated gradient.
    members: tuple[tuple[str, int], ...] = ()
    placement: Placement = Placement.REPLICATED
    # Index in the bucket at which the array starts.
    offset: int = 0
    # Number of ranks whose shares of an element are summed; 0 for other placements.
    owners: int = 0
    # True for one number per bucket that is equal on all ranks, such as a count of steps.
    scalar: bool = False

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StateDescription:
        """Creates a description from a result of `asdict`, in which JSON has changed types."""
        members = tuple(map(tuple, content["members"]))
        return cls(**content | {"members": members, "placement": Placement(content["placement"])})

    @property
    def is_cut(self) -> bool:
        """True if the array is a range of a bucket, and may be split differently on other ranks."""
        return bool(self.members) and self.owners > 0

    @property
    def whole_key(self) -> tuple[str, tuple[str, ...]]:
        """Key of an array that is never split: its name, and the paths of its variables."""
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


def redistribute(saved: Sequence[RankState], wanted: RankState) -> list[np.ndarray]:
    """Creates the arrays of one rank in a job from the state of all ranks of an earlier job.

    `wanted` supplies descriptions, shapes, dtypes, and values of scalars that were not saved. State
    that was not saved becomes zeros. Raises `ValueError` if a saved sum has no place in `wanted`,
    or if variables of one bucket had different scalars.
    """
    # `totals` holds sums over all ranks, and `whole` holds arrays that are never split.
    totals: dict[tuple[str, str], np.ndarray] = {}
    scalars: dict[tuple[str, str], np.ndarray] = {}
    whole: dict[tuple[str, tuple[str, ...]], list[np.ndarray]] = defaultdict(list)
    for description, array in itertools.chain(*saved):
        if description.scalar:
            scalars |= {(description.name, path): array for path, _ in description.members}
        elif not description.is_cut:
            whole[description.whole_key].append(array)
        for key, elements, inside, in_array in description.overlaps(array.size):
            total = totals.setdefault(key, np.zeros(elements, array.dtype))
            total[inside] += array[in_array]
    _check_all_wanted(totals, wanted)
    arrays = []
    for description, like in wanted:
        if description.scalar:
            arrays.append(_common_scalar(description, like, scalars))
        elif description.is_cut:
            arrays.append(_cut(description, like, totals))
        else:
            arrays.append(_whole(description, like, whole.get(description.whole_key)))
    return arrays


def _check_all_wanted(totals: dict[tuple[str, str], np.ndarray], wanted: RankState) -> None:
    """Raises `ValueError` if a sum has no place in `wanted`: unsent gradients would be lost."""
    unwanted = set(totals) - {(d.name, path) for d, _ in wanted for path, _ in d.members}
    if unwanted:
        name, path = min(unwanted)
        raise ValueError(
            f"the snapshot holds `{name}` of {path}, but the current scheme of this variable has "
            "no such state"
        )


def _common_scalar(
    description: StateDescription, like: np.ndarray, scalars: dict[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """Returns the scalar that was saved for all members, or `like` if none was saved."""
    keys = {path: (description.name, path) for path, _ in description.members}
    found = {path: scalars[key] for path, key in keys.items() if key in scalars}
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
            # Each owner receives an equal share, which preserves the sum over ranks.
            result[in_array] = totals[key][inside] / description.owners
    return result


def _whole(
    description: StateDescription, like: np.ndarray, arrays: list[np.ndarray] | None
) -> np.ndarray:
    # Local state has no meaning on other ranks.
    if arrays is None or description.placement == Placement.LOCAL:
        return np.zeros_like(like)
    if description.placement == Placement.AVERAGED:
        return np.asarray(np.mean(arrays, axis=0), like.dtype)
    if description.owners:
        return np.asarray(np.sum(arrays, axis=0) / description.owners, like.dtype)
    return arrays[0]


def saved_descriptions(pieces: np.ndarray, names: dict[str, str]) -> list[StateDescription]:
    """Returns a snapshot's descriptions of a rank's state, with current paths."""
    return list(map(StateDescription.from_dict, with_names(json.loads(str(pieces)), names)))


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
