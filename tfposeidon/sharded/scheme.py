"""Scheme of sharded updates: reduce-scatter of gradients, and all-gather of updated variables.

`OwnParts` leaves each mean with its shard owner; the optimizer gathers the updated values later.
Squared norms of parts are summed over ranks, so that all ranks clip and skip steps identically.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients import Description
from tfposeidon.optimizers.layer_wise import Norms, local_norms
from tfposeidon.optimizers.wrapper import innermost
from tfposeidon.policies.base import Choice, Policy
from tfposeidon.schemes import ParameterServer, stages
from tfposeidon.schemes.base import State


@dataclass(frozen=True, kw_only=True)
class OwnParts(ParameterServer):
    """Parameter server that leaves means with their shard owners."""

    name: ClassVar[str] = "ps"

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        return stages.own_mean_by_levels(gradient, wire, name, None), state

    @override
    def unpack(
        self, mean: tf.Tensor, descriptions: Sequence[Description], topology: Topology
    ) -> list[tf.Tensor]:
        return tf.split(mean, [end - begin for begin, end in self.parts(descriptions, topology)])

    def gather(self, own: tf.Tensor, length: int, wire: Wire, name: str) -> tf.Tensor:
        """Returns a whole bucket, `[length]`, from the parts `own` of all ranks."""
        return stages.gather_by_levels(own, length, wire, name, None)

    def parts(
        self, descriptions: Sequence[Description], topology: Topology
    ) -> list[tuple[int, int]]:
        """Returns the range of each variable that `topology.rank` owns; (0, 0) for none."""
        # A bucket is split as one vector, regardless of variables: a part may hold the end of one
        # variable and the start of the next. `starts` has one entry more than there are variables,
        # the end of the last one.
        starts = itertools.accumulate((d.length for d in descriptions), initial=0)
        begin, end = self.own_range(sum(d.length for d in descriptions), topology)
        parts = [
            (max(begin - start, 0), min(end - start, d.length))
            for start, d in zip(starts, descriptions, strict=False)
        ]
        return [(first, last) if first < last else (0, 0) for first, last in parts]


@dataclass(frozen=True)
class Sharded(Policy):
    """Policy that replaces the scheme `ParameterServer` with `OwnParts`."""

    policy: Policy

    def __str__(self) -> str:
        return str(self.policy)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        choice = self.policy.choose(description, topology)
        # Excludes subclasses, which have their own exchange.
        if type(choice.scheme) is not ParameterServer:
            return choice
        return replace(choice, scheme=OwnParts(pair_bytes=choice.scheme.pair_bytes))

    @override
    def notes(self, descriptions: Sequence[Description]) -> list[str]:
        return self.policy.notes(descriptions)

    @property
    @override
    def keeps_state(self) -> bool:
        return self.policy.keeps_state

    @property
    @override
    def corrects_momentum(self) -> bool:
        return self.policy.corrects_momentum


def clip_by_whole_norms(
    gradients: list[Any], served: Sequence[int], optimizer: Any, wire: Wire, name: str
) -> list[Any]:
    """Clips by norms of whole gradients, and propagates non-finite values to all ranks.

    `gradients` holds this rank's parts at the indices in `served`, and whole gradients or `None`
    elsewhere. If the optimizer clips by norm or scales losses, a non-finite part on any rank makes
    all parts NaN on all ranks, so that all skip the step.
    """
    # The optimizer must not clip again afterwards: norms of parts differ between ranks.
    inner = innermost(optimizer)
    by_norm = bool(inner.clipnorm or inner.global_clipnorm)
    if not (by_norm or (served and isinstance(optimizer, keras.optimizers.LossScaleOptimizer))):
        return gradients
    result = list(gradients)
    squares, finite = _reduced([gradients[index] for index in served], wire, name)
    for index in served:
        # One non-finite value affects the whole gradient, as on a single rank.
        result[index] = tf.where(finite, gradients[index], float("nan"))
    if not by_norm:
        return result
    # Clipping precedes the division by the loss scale, so the limit is scaled, too.
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)
    known = dict(zip(served, squares, strict=True))
    squared_norms = {
        m: known[m] if m in known else _square(g) for m, g in enumerate(result) if g is not None
    }
    if inner.global_clipnorm:
        squared_norms = dict.fromkeys(squared_norms, tf.add_n(list(squared_norms.values())))
    limit = (inner.clipnorm or inner.global_clipnorm) * scale
    for index, square in squared_norms.items():
        result[index] = _clipped(result[index], tf.sqrt(square), limit)
    return result


def _reduced(
    parts: Sequence[tf.Tensor], wire: Wire, name: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns squared norms of gradients, and whether all values are finite, over all ranks."""
    if not parts:
        return [], tf.constant(True)
    # Counted separately, since squares may overflow although all values are finite.
    unbounded = tf.add_n(
        [tf.reduce_sum(tf.cast(~tf.math.is_finite(part), tf.float32)) for part in parts]
    )
    total = wire.all_reduce(tf.stack([*map(_square, parts), unbounded]), wire.topology.world, name)
    *squares, unbounded = tf.unstack(total)
    return squares, unbounded == 0.0


def _clipped(gradient: tf.Tensor, norm: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    # As in Keras: a norm that is not finite makes all values NaN (norm - norm is NaN then).
    factor = limit / tf.maximum(norm, limit) + (norm - norm)
    return gradient * tf.cast(factor, gradient.dtype)


def _square(gradient: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))


def sharded_norms(wire: Wire, served: Callable[[Any], bool], name: str) -> Norms:
    """Returns a function for norms of variables, which sums the squares of parts over ranks.

    `served` is True for variables of which each rank holds a part; `name` is for a small
    all-reduce.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        own = local_norms(variables, rows)
        parts = [index for index, variable in enumerate(variables) if served(variable)]
        if not parts:
            return own
        # In float64, since the square of a float32 value may exceed the range of float32.
        squares = tf.square(tf.cast(tf.gather(own, parts), tf.float64))
        total = wire.all_reduce(tf.reshape(squares, [-1]), wire.topology.world, name)
        whole = tf.cast(tf.sqrt(tf.reshape(total, squares.shape)), own.dtype)
        return tf.tensor_scatter_nd_update(own, [[index] for index in parts], whole)

    return norms
