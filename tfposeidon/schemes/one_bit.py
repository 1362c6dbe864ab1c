"""1-bit SGD: signs and two means in place of values, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfposeidon import ops, ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import cost, stages
from tfposeidon.schemes.base import Slot, State, VectorScheme
from tfposeidon.schemes.cost import Cost

SENDING, FLUSHING, FLUSHED = 0.0, -1.0, -2.0
"""One bit each; everything is to be sent; everything was and is."""


@dataclass(frozen=True, kw_only=True)
class OneBit(VectorScheme):
    """Sums in the node, then sends one bit for each value across nodes; what the bits do not say comes back.

    Every 4096 values of a bucket share two means, of those that are positive and of those that are negative. Zeros (of
    what is frozen, masked, or never met) are in neither, and stay zeros.

    Args:
      min_elements: Variables with fewer are sent densely, by `AllReduce`.

    Raises:
      ValueError: If `min_elements` is negative.

    Cost: m nodes of n ranks, d elements: d (n - 1) / n values for the scatter and as many for the gather in the node;
    across nodes (m - 1) d / n bits and 3 numbers for each 4096 values, and as many bits again where some of 4096 are
    zero and others not, which depends on values and is not in `cost`.
    Source: Seide et al. 2014, as compared in Zhang et al. 2017 (Poseidon), section 5.3. Differs: blocks of 4096 values
    where CNTK has columns; codes are gathered and not added and coded again; zeros are not taken for positive.
    """

    name: ClassVar[str] = "onebit"
    has_gpu_kernels: ClassVar[bool] = False
    min_elements: int = 4096

    def __post_init__(self) -> None:
        ranges.check_number("min_elements", self.min_elements, ranges.NOT_NEGATIVE)

    @property
    def exact(self) -> bool:
        return False

    @property
    def min_length(self) -> int:
        return self.min_elements

    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        node = stages.Shards.even(length, topology.node, owners=topology.positions)
        residual = Slot(
            name="residual", shape=(node.own(topology.rank),), offset=node.offset(topology.rank)
        )
        return Slot(name="mode", shape=()), residual

    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        mode, residual = state
        return mode, residual * factor

    def flushing(self, state: State) -> State:
        mode, residual = state
        return tf.fill(tf.shape(mode), FLUSHING), residual

    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == FLUSHED

    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        topology, (mode, residual) = wire.topology, state
        node = stages.Shards.even(gradient.shape[0], topology.node, owners=topology.positions)
        shard = stages.scatter_sum(gradient, node, wire, f"{name}.node_scatter", None)
        shard = tf.ensure_shape(tf.cast(shard, tf.float32), residual.shape)

        def everything() -> tuple[tf.Tensor, tf.Tensor]:
            return self._dense_sum(residual + shard, wire, name), tf.zeros_like(residual)

        def bits() -> tuple[tf.Tensor, tf.Tensor]:
            code, kept = ops.one_bit_encode(residual, shard)
            assert topology.across is not None
            codes = wire.all_gather(code, topology.across, f"{name}.bits_across")
            return ops.one_bit_sum(codes, residual.shape[0]), kept

        total, kept = (
            tf.cond(mode < SENDING, everything, bits) if self._codes(topology) else everything()
        )
        mean = stages.gather(total / topology.size, node, wire, f"{name}.node_gather")
        return tf.cast(mean, gradient.dtype), (tf.where(mode < SENDING, FLUSHED, mode), kept)

    @staticmethod
    def _codes(topology: Topology) -> bool:
        """Whether this rank has anything to send across nodes."""
        return topology.across is not None and topology.across.size > 1

    def _dense_sum(self, shard: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
        if not self._codes(wire.topology):
            return shard
        assert wire.topology.across is not None
        return wire.all_reduce(shard, wire.topology.across, f"{name}.across")

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        node = stages.Shards.even(length, topology.node, owners=topology.positions)
        total = stages.scatter_sum_cost(node, itemsize, topology, None) + stages.gather_cost(
            node, 4, topology, None
        )
        if topology.across is None or not self._codes(topology):
            return total
        own = node.own(topology.rank)
        sent = [4.0 * ops.one_bit_size(own)] * topology.across.size
        return (
            total
            + cost.ring_all_gather(topology, topology.across, sent)
            + Cost(flops=len(sent) * own)
        )
