"""1-bit SGD: signs and two means in place of values, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon import ops, ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Slot, State
from tfposeidon.schemes.cost import Stage, Work
from tfposeidon.schemes.residual import ResidualScheme

SENDING_BITS = 0.0
"""Value of the slot "mode" unless the scheme is being flushed."""
CODED_PER_SELECTED = 8
"""Elements among which the largest are selected in the time in which one is coded; fitted to the
exchanges of docs/results/exchange_grid.json."""


@dataclass(frozen=True, kw_only=True)
class OneBit(ResidualScheme):
    """Sums in the node, then sends one bit for each value across nodes, with error feedback.

    Every 4096 values of a bucket share two means, of those that are positive and of those that are
    negative; what the bits do not say joins the next gradient. Zeros (of what is frozen, masked, or
    never met) are in neither mean, and stay zeros.

    Args:
      min_elements: Variables with fewer elements are sent densely, by `AllReduce` (default 4096).

    Raises:
      ValueError: If `min_elements` is negative.

    Cost: m nodes of n ranks, d elements: d (n - 1) / n values for the scatter and as many for the
    gather in the node; across nodes (m - 1) d / n bits and 3 numbers for each 4096 values, and as
    many bits again where some of 4096 are zero and others not, which depends on values and is not
    in `cost`.
    Source: Seide et al. 2014, as compared in Zhang et al. 2017 (Poseidon), section 5.3. Differs:
    blocks of 4096 values where CNTK has columns; codes are gathered and not added and coded again;
    zeros are not taken for positive.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> topology = Topology.regular(0, size=4, ranks_per_node=1)
      >>> one_bit, dense = (
      ...     scheme.cost(10**6, itemsize=4, topology=topology).cross_bytes
      ...     for scheme in (schemes.OneBit(), schemes.AllReduce())
      ... )
      >>> round(dense / one_bit)
      16
    """

    name: ClassVar[str] = "onebit"
    has_gpu_kernels: ClassVar[bool] = False
    min_elements: int = 4096

    def __post_init__(self) -> None:
        ranges.check_number(
            "min_elements",
            self.min_elements,
            ranges.NOT_NEGATIVE,
            "Use 0 to send every variable as bits.",
        )

    @override
    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        node = stages.Shards.even(length, topology.node, owners=topology.positions)
        rank = topology.rank
        residual = Slot(name="residual", shape=(node.length_of(rank),), offset=node.offset_of(rank))
        return Slot(name="mode", shape=()), residual

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        topology, (mode, residual) = wire.topology, state
        node = stages.Shards.even(gradient.shape[0], topology.node, owners=topology.positions)
        shard = stages.scatter_sum(gradient, node, wire, f"{name}.node_scatter", None)
        # float32 as the residual is: in 16 bits small values would be lost when they are added.
        shard = tf.ensure_shape(tf.cast(shard, tf.float32), residual.shape)

        def everything() -> tuple[tf.Tensor, tf.Tensor]:
            return self._dense_sum(residual + shard, wire, name), tf.zeros_like(residual)

        def bits() -> tuple[tf.Tensor, tf.Tensor]:
            code, kept = ops.one_bit_encode(residual, shard)
            assert topology.across is not None
            codes = wire.all_gather(code, topology.across, f"{name}.bits_across")
            return ops.one_bit_sum(codes, residual.shape[0]), kept

        flushes = mode < SENDING_BITS
        # Bits save bytes between nodes alone: a rank that sends nothing there codes nothing.
        # `mode` is the same on all ranks, so all take the same branch.
        total, kept = (
            tf.cond(flushes, everything, bits) if _sends_across(topology) else everything()
        )
        mean = stages.gather(total / topology.size, node, wire, f"{name}.node_gather")
        return tf.cast(mean, gradient.dtype), (tf.where(flushes, self.FLUSHED, mode), kept)

    def _dense_sum(self, shard: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
        if not _sends_across(wire.topology):
            return shard
        assert wire.topology.across is not None
        return wire.all_reduce(shard, wire.topology.across, f"{name}.across")

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        node = stages.Shards.even(length, topology.node, owners=topology.positions)
        # What is gathered is float32, whatever the gradient is.
        scatter = stages.scatter_sum_stages(node, itemsize, topology, None, "node_scatter")
        back = stages.gather_stages(node, 4, None, "node_gather")
        if topology.across is None or not _sends_across(topology):
            return scatter + back
        own_length, nodes = node.length_of(topology.rank), topology.across.size
        added = nodes * own_length
        # Codes are int32 words.
        code_bytes = [4.0 * ops.one_bit_size(own_length)] * nodes
        return (
            *scatter,
            Work(name="encode", kind="select", elements=CODED_PER_SELECTED * own_length),
            *stages.gathering(topology.across, code_bytes, "bits_across"),
            Work(name="bits_across.sum", kind="sum", elements=added, operations=added),
            *back,
        )


def _sends_across(topology: Topology) -> bool:
    """Returns whether this rank has anything to send to other nodes."""
    return topology.across is not None and topology.across.size > 1
