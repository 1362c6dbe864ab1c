"""Largest value over all ranks, for variables that are overwritten with their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.cost import Stage, Transfer, Work


@dataclass(frozen=True, kw_only=True)
class Largest(Scheme):
    """Scheme that returns the elementwise maximum over all ranks, by an all-gather.

    Plans use it for variables with `overwrite_with_gradient`, such as float8 scales and histories,
    which are never negative. Keras takes the maximum over accumulated calls; this extends it over
    ranks. No policy chooses it.
    """

    averages: ClassVar[bool] = False

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        gathered = wire.all_gather(gradient[tf.newaxis], wire.topology.world, name)
        return tf.reduce_max(gathered, 0), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        parts_bytes = (float(length * itemsize),) * topology.size
        compared = length * topology.size
        return (
            Transfer(
                name="", operation="all_gather", group=topology.world, parts_bytes=parts_bytes
            ),
            Work(name="largest", kind="sum", elements=compared, operations=compared),
        )
