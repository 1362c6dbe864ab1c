"""Exchanges sharded updates: a reduce-scatter of gradients, and an all-gather of variables.

With `OwnParts`, each shard owner retains its averaged gradients; the optimizer later gathers the
updated variables. Ranks sum the squared norms of their shards, so that all ranks clip and skip
steps identically.
"""

from __future__ import annotations

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
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes import ParameterServer, stages
from tfposeidon.schemes.base import State


@dataclass(frozen=True, kw_only=True)
class OwnParts(ParameterServer):
    """Parameter server whose shard owners do not send their averaged gradients to other ranks."""

    name: ClassVar[str] = "ps"

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        levels = stages.Levels(gradient.shape[0], wire.topology)
        return levels.own_mean(gradient, wire, name, None), state

    @override
    def unpack(
        self, mean: tf.Tensor, descriptions: Sequence[Description], topology: Topology
    ) -> list[tf.Tensor]:
        return tf.split(mean, [end - begin for begin, end in self.parts(descriptions, topology)])

    def parts(
        self, descriptions: Sequence[Description], topology: Topology
    ) -> list[tuple[int, int]]:
        """Returns the range of each variable that `topology.rank` owns; (0, 0) for none."""
        # A bucket is split as one vector, regardless of variables: a part may hold the end of one
        # variable and the start of the next.
        begin, end = self.own_range(sum(d.length for d in descriptions), topology)
        parts, start = [], 0
        for description in descriptions:
            first, last = max(begin - start, 0), min(end - start, description.length)
            parts.append((first, last) if first < last else (0, 0))
            start += description.length
        return parts


@dataclass(frozen=True)
class Sharded(Policy):
    policy: Policy

    def __str__(self) -> str:
        return str(self.policy)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        choice = self.policy.choose(description, topology)
        # Compare the exact class, because subclasses have their own exchange.
        if type(choice.scheme) is not ParameterServer:
            return choice
        return replace(choice, scheme=OwnParts())

    @override
    def notes(self, descriptions: Sequence[Description]) -> list[str]:
        return self.policy.notes(descriptions)

    @property
    @override
    def parts(self) -> tuple[Policy, ...]:
        return (self.policy,)


def clip_by_whole_norms(
    gradients: dict[int, tf.Tensor], sharded: Sequence[int], optimizer: Any, wire: Wire, name: str
) -> dict[int, tf.Tensor]:
    """Clips by norms of whole gradients; `gradients` at the indices in `sharded` are parts."""
    # If the optimizer clips by norm or scales losses, a non-finite part on any rank makes all parts
    # NaN on all ranks, so that all ranks skip the step.
    inner = innermost(optimizer)
    limit = inner.clipnorm or inner.global_clipnorm
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (limit or has_scale):
        return gradients
    squares = {m: tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for m, g in gradients.items()}
    if sharded:
        # Count non-finite values separately, because squares of finite values may overflow.
        are_finite = [tf.math.is_finite(gradients[m]) for m in sharded]
        unbounded = tf.add_n([tf.reduce_sum(tf.cast(~one, tf.float32)) for one in are_finite])
        own = tf.stack([*(squares[m] for m in sharded), unbounded])
        *sums, unbounded = tf.unstack(wire.all_reduce(own, wire.topology.world, name))
        squares |= zip(sharded, sums, strict=True)
        bounded = {m: tf.where(unbounded == 0.0, gradients[m], float("nan")) for m in sharded}
        gradients = gradients | bounded
    if not limit:
        return gradients
    if inner.global_clipnorm:
        squares = dict.fromkeys(squares, tf.add_n(list(squares.values())))
    # Clipping precedes the division by the loss scale, so the limit is scaled, too.
    limit *= tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)
    return {m: gradient * _factor(squares[m], limit, gradient) for m, gradient in gradients.items()}


def _factor(square: tf.Tensor, limit: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    norm = tf.sqrt(square)
    # As in Keras, a non-finite norm makes all values NaN, because norm - norm is NaN then.
    return tf.cast(limit / tf.maximum(norm, limit) + (norm - norm), gradient.dtype)


def sharded_norms(wire: Wire, is_sharded: Callable[[Any], bool], name: str) -> Norms:
    """Returns a function that computes norms of variables; ranks sum the squared norms of parts."""

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        own = local_norms(variables, rows)
        parts = [index for index, variable in enumerate(variables) if is_sharded(variable)]
        if not parts:
            return own
        # Use float64, because the square of a float32 value may exceed the range of float32.
        squares = tf.square(tf.cast(tf.gather(own, parts), tf.float64))
        total = wire.all_reduce(tf.reshape(squares, [-1]), wire.topology.world, name)
        whole = tf.cast(tf.sqrt(tf.reshape(total, squares.shape)), own.dtype)
        return tf.tensor_scatter_nd_update(own, [[index] for index in parts], whole)

    return norms
