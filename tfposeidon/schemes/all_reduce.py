"""Horovod's own all-reduce: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import cost
from tfposeidon.schemes.base import State, VectorScheme
from tfposeidon.schemes.cost import Cost
from tfposeidon.schemes.wire_format import check_wire_dtype, decode, encode, wire_itemsize


@dataclass(frozen=True, kw_only=True)
class AllReduce(VectorScheme):
    """Averages gradients by Horovod's all-reduce (a ring over Gloo, NCCL's choice on GPUs).

    Args:
      wire_dtype: `None` for the gradient's own dtype or `"float16"`, in which Horovod also sums.

    Raises:
      ValueError: If `wire_dtype` is anything else.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P elements sent per rank.
    """

    name: ClassVar[str] = "allreduce"
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        remedy = 'Use AllToAll(wire_dtype="bfloat16"): Horovod cannot sum bfloat16.'
        check_wire_dtype(self.wire_dtype, ("float16",), remedy)

    @property
    def exact(self) -> bool:
        return self.wire_dtype is None

    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        world = wire.topology.world
        if self.wire_dtype is None:
            return wire.all_reduce(gradient, world, name, scale=1.0 / world.size), state
        # Scaled before the cast: the sum of P ranks must not overflow float16.
        scaled = gradient / tf.cast(world.size, gradient.dtype)
        summed = wire.all_reduce(encode(scaled, self.wire_dtype), world, name)
        return decode(summed, self.wire_dtype, gradient.dtype), state

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        size_bytes = length * wire_itemsize(self.wire_dtype, itemsize)
        return cost.ring_all_reduce(topology, topology.world, size_bytes)
