"""Placement of state on ranks, and the state of a model's layers with its placement.

Think of a placement as the rule for combining the values of all ranks: take any, average, sum,
concatenate, or leave each rank its own. Checkpoints, broadcasts and comparisons follow it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True)
class StateEntry:
    """One piece of a model's state: a variable, or a layer with state outside of variables."""

    name: str
    value: Any
    placement: Placement


Placed = Iterable[tuple[Any, Placement | str]]
"""Pairs of variable and placement."""
_registered: dict[type, Placement | Callable[[Any], Placed]] = {}


def register(layer: type, placement: Placement | str | Callable[[Any], Placed]) -> None:
    """Registers the placement of a layer class's state, where the default is wrong.

    By default, variables of a layer that receive no gradient are averaged if they are floating
    point, and replicated otherwise. Frozen weights are replicated. Seeds and the states of Keras's
    recurrent layers are local. A callback declares the placement of its variables with a method
    `state()`, which returns pairs of variable and placement.

    Args:
      layer: Class of layers. The placement also applies to subclasses that are not registered.
      placement: `"replicated"`, `"averaged"`, `"local"` or `"partial"`, for all variables of such a
        layer that receive no gradient. State outside of variables, such as a vocabulary, is local
        with `"local"` and replicated otherwise. Or a function that takes the layer and returns
        pairs of variable and placement. It may return variables that Keras does not list; variables
        that it omits have the default placement.

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
        raise TypeError(f"`layer` must be a layer class. Received: layer={layer!r}")
    if not callable(placement):
        placement = _checked(placement)
    _registered[layer] = placement


def placed(pairs: Placed) -> list[StateEntry]:
    """Returns an entry for each pair of variable and placement."""
    # A `tf.Variable` has no `path`.
    return [
        StateEntry(getattr(variable, "path", None) or variable.name, variable, _checked(placement))
        for variable, placement in pairs
    ]


def entries_of_layers(model: Any) -> list[StateEntry]:
    """Returns the state of all built layers, each variable once, in the same order on all ranks."""
    found: dict[int, tuple[Any, Placement | str]] = {}
    for layer in model._flatten_layers():
        for variable, placement in _state_of(layer):
            found.setdefault(id(variable), (variable, placement))
    # Layers may share a variable that only one of them trains.
    for variable in model.trainable_variables:
        found.pop(id(variable), None)
    return placed(found.values())


def state_of_layers(model: Any, *placements: Placement) -> list[Any]:
    """Returns the variables of `entries_of_layers` with one of these placements."""
    return [one.value for one in entries_of_layers(model) if one.placement in placements]


def seeds_of_layers(model: Any) -> list[Any]:
    """Returns the state variables of the seed generators in a model's layers, each once."""
    return list({id(v): v for v in model.variables if is_seed(v)}.values())


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a seed generator."""
    return getattr(variable, "name", None) == "seed_generator_state"


def another_seed(state: Any, number: int) -> np.ndarray:
    """Returns a generator's state with the same count and another seed; for 0, with its own."""
    seed, count = np.asarray(state)
    # The golden ratio of 2**32 is odd, so its multiples differ for all `number` below 2**32.
    return np.asarray([(int(seed) + number * 0x9E3779B9) % 2**32, count]).astype(
        state.dtype.as_numpy_dtype
    )


def placement_outside_variables(layer: Any) -> Placement:
    """Returns the placement of a layer's tables, lists and files."""
    rules = [_registered[known] for known in type(layer).__mro__ if known in _registered]
    is_local = bool(rules) and rules[0] == Placement.LOCAL
    return Placement.LOCAL if is_local else Placement.REPLICATED


def _checked(placement: Any) -> Placement:
    # Not sharded: readers of layer and callback state could not join the shards.
    known = [str(one) for one in Placement if one != Placement.SHARDED]
    if placement not in known:
        raise ValueError(
            f"`placement` must be one of {', '.join(known)}, or a function of the layer. "
            f"Received: placement={placement!r}"
        )
    return Placement(placement)


def _state_of(layer: Any) -> list[tuple[Any, Placement | str]]:
    """Returns a layer's variables with placements, without those of inner layers."""
    found: dict[int, tuple[Any, Placement | str]]
    found = {id(v): (v, Placement.REPLICATED) for v in layer._trainable_variables}
    found |= {id(v): (v, by_dtype(v)) for v in _statistics_of(layer)}
    for known in reversed(type(layer).__mro__):
        rule = _registered.get(known)
        if callable(rule):
            found |= {id(v): (v, placement) for v, placement in rule(layer)}
        elif rule is not None:
            found |= {id(v): (v, rule) for v in _statistics_of(layer)}
    seeds = [(v, Placement.LOCAL) for v in _variables_of(layer) if is_seed(v)]
    return [*found.values(), *seeds]


def _variables_of(layer: Any) -> list[Any]:
    inner = layer._flatten_layers(include_self=False, recursive=False)
    theirs = {id(variable) for one in inner for variable in one.variables}
    return [variable for variable in layer.variables if id(variable) not in theirs]


def _statistics_of(layer: Any) -> list[Any]:
    """Returns the variables that a layer was built with as not trainable."""
    # Keras's public lists count frozen weights, too.
    weights = {id(variable) for variable in layer._trainable_variables}
    return [v for v in _variables_of(layer) if id(v) not in weights and not is_seed(v)]


def by_dtype(variable: Any) -> Placement:
    """Returns the default placement of state that each rank updates independently."""
    is_float = keras.backend.is_float_dtype(variable.dtype)
    return Placement.AVERAGED if is_float else Placement.REPLICATED


def _place_statistics(layer: Any) -> Placed:
    # Statistics of a frozen layer are constant; averaging could round them.
    placement = Placement.AVERAGED if layer.trainable else Placement.REPLICATED
    return [(variable, placement) for variable in _statistics_of(layer)]


def _place_sequences(layer: Any) -> Placed:
    # Keras does not list these states among a layer's variables.
    return [(variable, Placement.LOCAL) for variable in keras.tree.flatten(layer.states or [])]


register(keras.layers.BatchNormalization, _place_statistics)
# Adapted before training, and constant then.
register(keras.layers.Normalization, Placement.REPLICATED)
register(keras.layers.RNN, _place_sequences)
