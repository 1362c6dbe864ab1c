"""Horovod's all-reduce, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.cost import Stage, Transfer
from tfposeidon.schemes.wire_format import WithWireDtype, decode, encode, wire_itemsize


@dataclass(frozen=True, kw_only=True)
class AllReduce(WithWireDtype, Scheme):
    """Averages gradients by Horovod's all-reduce (a ring over Gloo, NCCL's choice on GPUs).

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"`, in which Horovod also sums.

    Raises:
      ValueError: If `wire_dtype` is anything else.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P elements sent per rank.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> int(schemes.AllReduce().cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2)).bytes)
      6000
      >>> schemes.AllReduce(wire_dtype="float16").exact
      False
    """

    allowed_wire_dtypes: ClassVar[tuple[str, ...]] = ("float16",)
    wire_dtype_remedy: ClassVar[str] = (
        'Use AllToAll(wire_dtype="bfloat16"): Horovod cannot sum bfloat16.'
    )

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        world = wire.topology.world
        if self.wire_dtype is None:
            return wire.all_reduce(gradient, world, name, scale=1.0 / world.size), state
        # Scale before the cast: the sum of P ranks must not overflow float16.
        scaled = gradient / tf.cast(world.size, gradient.dtype)
        summed = wire.all_reduce(encode(scaled, self.wire_dtype), world, name)
        return decode(summed, self.wire_dtype, gradient.dtype), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        width = wire_itemsize(self.wire_dtype, itemsize)
        transfer = Transfer(
            name="",
            operation="all_reduce",
            group=topology.world,
            parts_bytes=(float(length * width),),
            itemsize=width,
        )
        return (
            *stages.encoding(length, self.wire_dtype, "encode"),
            transfer,
            *stages.encoding(length, self.wire_dtype, "decode"),
        )
