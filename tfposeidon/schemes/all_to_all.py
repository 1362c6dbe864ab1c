"""Theano-MPI's exchange: all-to-all, local sum and all-gather, optionally in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.cost import Stage
from tfposeidon.schemes.wire_format import WithWireDtype, decode, encode


@dataclass(frozen=True, kw_only=True)
class AllToAll(WithWireDtype, Scheme):
    """Averages gradients by all-to-all, local sum and all-gather (ASA of Theano-MPI).

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"` or `"bfloat16"`: half the bytes of float32, summed in float32. With float16,
        values beyond 65504 become infinite.

    Raises:
      ValueError: If `wire_dtype` is anything else.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P elements sent per rank.
    Source: Ma, Mao and Taylor 2016 (Theano-MPI), section 3.2. Differs: parts differ by at most one
    element where P does not divide n; bfloat16 is supported.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> half = schemes.AllToAll(wire_dtype="bfloat16")
      >>> int(half.cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2)).bytes)
      3000
    """

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        shards = stages.Shards.even(gradient.shape[0], wire.topology.world)
        total = stages.scatter_sum(gradient, shards, wire, f"{name}.scatter", self.wire_dtype)
        # Round the mean to 16 bits, and not the sum: the sum of P ranks might overflow.
        mean = total / tf.cast(wire.topology.size, gradient.dtype)
        gathered = stages.gather(encode(mean, self.wire_dtype), shards, wire, f"{name}.gather")
        return decode(gathered, self.wire_dtype, gradient.dtype), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        shards, own = stages.Shards.even(length, topology.world), self.wire_dtype
        return (
            *stages.scatter_sum_stages(shards, itemsize, topology, own, "scatter"),
            *stages.encoding(shards.length_of(topology.rank), own, "encode"),
            *stages.gather_stages(shards, itemsize, own, "gather"),
            *stages.encoding(length, own, "decode"),
        )
