"""What state is to other ranks, and the state of a model's layers by it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np


class Placement(enum.StrEnum):
    """What a variable's values are to other ranks.

    Attributes:
      REPLICATED: The same bits on all ranks, such as weights that are frozen, and counters.
      AVERAGED: Each rank moves it by its own batches, and the mean over ranks counts, such as
        moving statistics.
      LOCAL: A rank's own, such as seeds, and states of the sequences that it trains on.
      PARTIAL: Each rank holds a part, and the sum over ranks counts, such as counts of tokens, and
        residuals of sparse schemes.
      SHARDED: Each rank holds a slice, such as optimizer state at servers. No state of layers is.
    """

    REPLICATED = "replicated"
    AVERAGED = "averaged"
    LOCAL = "local"
    PARTIAL = "partial"
    SHARDED = "sharded"


@dataclass(frozen=True)
class StateEntry:
    """One piece of the state of a model.

    Attributes:
      name: Its path.
      value: Variable that holds it, or what a layer keeps outside of variables.
      placement: What it is to other ranks.
    """

    name: str
    value: Any
    placement: Placement


Placed = Iterable[tuple[Any, Placement | str]]
"""Variables, each with its placement."""
_registered: dict[type, Placement | Callable[[Any], Placed]] = {}


def register(layer: type, placement: Placement | str | Callable[[Any], Placed]) -> None:
    """Says what the state of a class of layers is to other ranks, where the default is wrong.

    By default, variables of a layer that no gradient moves are averaged if they are floating-point
    numbers, and replicated otherwise; frozen weights are replicated; seeds, and the states of
    Keras's recurrent layers, are local.

    Args:
      layer: Class of layers; it holds for its subclasses, too, if they are not registered.
      placement: `"replicated"`, `"averaged"`, `"local"` or `"partial"`, for all variables of such a
        layer that no gradient moves (what it keeps outside of variables, such as a vocabulary, is
        local with `"local"`, and replicated otherwise); or a function of the layer that returns
        pairs of variable and placement. The function may name variables that Keras does not list;
        those that it leaves out are placed by default.

    A callback says the same of its variables by a method `state()` that returns such pairs.

    Raises:
      TypeError: If `layer` is not a class.
      ValueError: If there is no such placement, or layers cannot have it (`"sharded"`).

    Cost: none before the state is looked at: a walk over the model's layers.

    >>> import tfposeidon as tp
    >>> class Codebook(keras.layers.Layer):
    ...     pass
    >>> tp.state.register(Codebook, "averaged")
    """
    if not isinstance(layer, type):
        raise TypeError(f"`layer` must be a class of layers. Received: layer={layer!r}")
    if not callable(placement):
        placement = _checked(placement)
    _registered[layer] = placement


def placed(pairs: Placed) -> list[StateEntry]:
    """Returns an entry for each variable and its placement.

    Raises:
      ValueError: If there is no such placement.
    """
    # Those of `tf.Variable` have no path.
    return [
        StateEntry(getattr(variable, "path", None) or variable.name, variable, _checked(placement))
        for variable, placement in pairs
    ]


def entries_of_layers(model: Any) -> list[StateEntry]:
    """Returns the variables of a model's layers, each once; no trained weights.

    Layers that are not built yet are left out. The order is the same on all ranks.
    """
    found: dict[int, tuple[Any, Placement | str]] = {}
    for layer in model._flatten_layers():
        for variable, placement in _state_of(layer):
            found.setdefault(id(variable), (variable, placement))
    # Layers may share a variable, and one of them may train it.
    for variable in model.trainable_variables:
        found.pop(id(variable), None)
    return placed(found.values())


def state_of_layers(model: Any, *placements: Placement) -> list[Any]:
    """Returns the variables of layers with one of these placements; see `entries_of_layers`."""
    return [one.value for one in entries_of_layers(model) if one.placement in placements]


def seeds_of_layers(model: Any) -> list[Any]:
    """Returns the state of each seed generator of a model's layers."""
    generators = [one for layer in model._flatten_layers() for one in layer._seed_generators]
    return list({id(one.state): one.state for one in generators}.values())


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a seed generator."""
    return getattr(variable, "name", None) == "seed_generator_state"


def another_seed(state: Any, number: int) -> np.ndarray:
    """Returns the state of a seed generator as far as this one, of another seed; for 0 this one."""
    seed, count = np.asarray(state)
    # The golden ratio of 2**32, which is odd: no two of its multiples below are equal.
    return np.asarray([(int(seed) + number * 0x9E3779B9) % 2**32, count]).astype(
        state.dtype.as_numpy_dtype
    )


def placement_outside_variables(layer: Any) -> Placement:
    """Returns the placement of what a layer keeps in tables, lists and files."""
    rules = [_registered[known] for known in type(layer).__mro__ if known in _registered]
    is_local = bool(rules) and rules[0] == Placement.LOCAL
    return Placement.LOCAL if is_local else Placement.REPLICATED


def _checked(placement: Any) -> Placement:
    # No state of layers and callbacks is sharded: their readers would not know how to join it.
    known = [str(one) for one in Placement if one != Placement.SHARDED]
    if placement not in known:
        raise ValueError(
            f"`placement` must be one of {', '.join(known)}, or a function of the layer. "
            f"Received: placement={placement!r}"
        )
    return Placement(placement)


def _state_of(layer: Any) -> list[tuple[Any, Placement | str]]:
    """Variables of a layer, but for those of layers inside it."""
    # Keras's public lists have those of inner layers, and frozen weights among all others.
    found: dict[int, tuple[Any, Placement | str]]
    found = {id(v): (v, Placement.REPLICATED) for v in layer._trainable_variables}
    found |= {id(v): (v, by_dtype(v)) for v in layer._non_trainable_variables}
    for known in reversed(type(layer).__mro__):
        rule = _registered.get(known)
        if callable(rule):
            found |= {id(v): (v, placement) for v, placement in rule(layer)}
        elif rule is not None:
            found |= {id(v): (v, rule) for v in layer._non_trainable_variables}
    seeds = [(one.state, Placement.LOCAL) for one in layer._seed_generators]
    return [*found.values(), *seeds]


def by_dtype(variable: Any) -> Placement:
    """Returns the placement of state that each rank moves by itself, of which nothing is known."""
    is_float = keras.backend.is_float_dtype(variable.dtype)
    return Placement.AVERAGED if is_float else Placement.REPLICATED


def _place_statistics(layer: Any) -> Placed:
    # Statistics of a frozen layer do not move; a mean might round them.
    placement = Placement.AVERAGED if layer.trainable else Placement.REPLICATED
    return [(variable, placement) for variable in layer._non_trainable_variables]


def _place_sequences(layer: Any) -> Placed:
    # Keras does not list them among a layer's variables.
    return [(variable, Placement.LOCAL) for variable in keras.tree.flatten(layer.states or [])]


register(keras.layers.BatchNormalization, _place_statistics)
register(keras.layers.RNN, _place_sequences)
