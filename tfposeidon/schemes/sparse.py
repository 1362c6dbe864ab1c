"""Sparse schemes: each rank sends the largest elements of its shard, as pairs of index and value.

Each rank owns a shard of the node's sum, selects its largest elements with error feedback, and
sends them over the slow network. In `TopK` (NaiveAG), every rank is a node of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfposeidon import ops
from tfposeidon.checks import BELOW_1, FRACTION, NOT_NEGATIVE, check_number
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import ResidualScheme, Scheme, Slot, State
from tfposeidon.schemes.stages import Levels, Stage, Work
from tfposeidon.schemes.wire_format import (
    check_wire_dtype,
    pack_pairs,
    pair_bytes,
    unpack_pairs,
    wire_itemsize,
)

MAX_LENGTH = 2**31
"""Maximum number of elements of a bucket, whose indices are sent as int32."""


@dataclass(frozen=True, kw_only=True)
class SparseScheme(ResidualScheme):
    """Scheme that sends the largest elements, with error feedback and possibly momentum correction.

    Error feedback adds the elements that are not sent to the next gradient. Momentum correction
    accumulates velocity before the selection, and masks it where elements were sent (Lin et al.
    2018, section 3). Subclasses document the options.
    """

    density: float = 0.01
    select: str = "mstopk"
    wire_dtype: str | None = None
    momentum: float = 0.0
    warmup_steps: int = 0
    min_elements: int = 4096

    def __post_init__(self) -> None:
        check_number("density", self.density, FRACTION, "Use AllReduce() to send everything.")
        check_wire_dtype(self.wire_dtype)
        for name in ("warmup_steps", "min_elements"):
            check_number(name, getattr(self, name), NOT_NEGATIVE, "Use 0 for none.")
        ops.check_method(self.select)
        check_number("momentum", self.momentum, BELOW_1, "Use 0.0 for none.")

    @property
    @override
    def corrects_momentum(self) -> bool:
        return self.momentum > 0

    @property
    @override
    def for_small_variables(self) -> Scheme | None:
        # The optimizer's momentum is 0, so small variables also need momentum from the scheme.
        return replace(self, density=1.0, min_elements=0) if self.corrects_momentum else None

    @override
    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        levels = self._levels(length, topology)
        shape, offset = (levels.shard_length,), levels.node.offset_of(topology.rank)
        names = ["residual", *["velocity"] * self.corrects_momentum]
        shard = [Slot(name=name, shape=shape, offset=offset) for name in names]
        return (Slot(name="steps", shape=()), *shard)

    # --------------------------------------------------------------- exchange

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        levels = self._levels(gradient.shape[0], wire.topology)
        # Elements are selected from the node's sum (Shi et al. 2021, Algorithm 2), so the owner of
        # each shard of the sum stores the shard's residual.
        self._check_state(state, levels)
        steps, *kept_before = state
        shard = stages.scatter_sum(gradient, levels.node, wire, f"{name}.node_scatter", None)
        # Residuals are float32: in 16 bits, additions of small values would be lost.
        shard = tf.ensure_shape(tf.cast(shard, tf.float32), [levels.shard_length])

        def dense() -> tuple[tf.Tensor, State]:
            everything, kept = self._select_all(shard, kept_before)
            own = levels.mean_across(everything, wire, name, None)
            return levels.gather(own, wire, name, None), kept

        def sparse() -> tuple[tf.Tensor, State]:
            k = self._selected_count(levels.shard_length, steps)
            packed, kept = self._select(shard, kept_before, k)
            return self._sparse_mean(packed, levels, steps, wire, name), kept

        if self._is_dense(levels):
            mean, kept = dense()
        else:
            mean, kept = tf.cond(self._sends_everything(levels, steps), dense, sparse)
        # Negative `steps` are a mode and not a count: this step has sent everything.
        steps = tf.where(steps < 0.0, self.FLUSHED, steps + 1.0)
        return tf.cast(mean, gradient.dtype), (steps, *kept)

    def _select(
        self, gradient: tf.Tensor, kept: Sequence[tf.Tensor], k: Any
    ) -> tuple[tf.Tensor, State]:
        """Returns a message with `k` pairs, and the new residual and velocity.

        Values are already rounded to the wire dtype, and the residual includes the rounding errors.
        """
        # scatter(values) + new residual = residual + gradient, where momentum correction replaces
        # the gradient by the accumulated velocity.
        residual, *velocity = kept
        new: list[tf.Tensor]
        method, wire_dtype = self.select, self.wire_dtype
        if velocity:
            values, indices, *new = ops.momentum_correction_top_k(
                residual, gradient, velocity[0], k, self.momentum, method, wire_dtype=wire_dtype
            )
        else:
            values, indices, *new = ops.error_feedback_top_k(
                residual, gradient, k, method, wire_dtype=wire_dtype
            )
        return pack_pairs(values, indices, wire_dtype), tuple(new)

    def _select_all(
        self, gradient: tf.Tensor, kept: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, State]:
        """Selects all elements, like `_select` but without a mask on the velocity."""
        residual, *velocity = kept
        # Do not mask velocity, because masking compensates for delayed elements, and none is
        # delayed here.
        moved = [self.momentum * one + gradient for one in velocity]
        return residual + (moved or [gradient])[0], (tf.zeros_like(gradient), *moved)

    def _sparse_mean(
        self, packed: tf.Tensor, levels: Levels, steps: Any, wire: Wire, name: str
    ) -> tf.Tensor:
        node, lengths = levels.node, self._scattered_lengths(levels)
        packed = wire.all_gather(packed, levels.across.group, f"{name}.pairs_across")
        if gathers := len(lengths) > 1:
            packed = wire.all_gather(packed, node.group, f"{name}.pairs_in_node")
        # `packed` is ordered by position in the node, then by node. For each position, `messages`
        # has the number of messages, of pairs per message, and the shard's start in the result.
        begins = itertools.accumulate(lengths, initial=0)
        messages = [
            (len(levels.topology.nodes), self._selected_count(n, steps), begin)
            for n, begin in zip(lengths, begins, strict=False)
        ]
        values, indices, counts = unpack_pairs(packed, messages, self.wire_dtype)
        # Divide before scattering, because there are fewer values than elements.
        mean = ops.scatter_add(values / wire.topology.size, indices, sum(lengths), counts)
        mean = tf.ensure_shape(mean, [sum(lengths)])
        return mean if gathers else stages.gather(mean, node, wire, f"{name}.sums_in_node")

    # ------------------------------------------------------------------- cost

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        levels = self._levels(length, topology)
        scatter = stages.scatter_sum_stages(levels.node, itemsize, topology, None, "node_scatter")
        # The itemsize is 4: after the scatter, values are float32 for any dtype of the gradient.
        return scatter + (
            levels.stages_across(4, None) if self._is_dense(levels) else self._sparse_stages(levels)
        )

    def _sparse_stages(self, levels: Levels) -> tuple[Stage, ...]:
        width, itemsize = pair_bytes(self.wire_dtype), wire_itemsize(self.wire_dtype, 4)
        k, across = self._selected_count(levels.shard_length), levels.across.group
        lengths, node = self._scattered_lengths(levels), levels.node
        counts = [len(levels.topology.nodes) * self._selected_count(n) for n in lengths]
        scatter = Work(name="scatter", kind="scatter", elements=sum(lengths), pairs=sum(counts))
        last: tuple[Stage, ...] = (scatter, *stages.gather_stages(node, 4, None, "sums_in_node"))
        if len(lengths) > 1:
            sizes = [float(width * count) for count in counts]
            last = (*stages.gathering(node.group, sizes, "pairs_in_node", itemsize), scatter)
        return (
            Work(name="select", kind="select", elements=levels.shard_length, pairs=k),
            *stages.encoding(k, self.wire_dtype, "encode"),
            *stages.gathering(across, [float(width * k)] * across.size, "pairs_across", itemsize),
            *last,
        )

    @override
    def note(self, length: int, topology: Topology) -> str:
        if not self._is_dense(self._levels(length, topology)):
            return ""
        return (
            f"density {self.density} on {topology} requires more bytes for index-value pairs than "
            "for all values: sent densely"
        )

    # -------------------------------------------------------------- decisions

    def _levels(self, length: int, topology: Topology) -> Levels:
        if length > MAX_LENGTH:
            raise ValueError(
                "A sparse scheme supports buckets of at most 2^31 elements, because it sends "
                f"indices as int32. Received: {length}. Select a dense scheme for this variable "
                "by a rule."
            )
        return Levels(length, topology)

    def _check_state(self, state: State, levels: Levels) -> None:
        expected = [[], *[[levels.shard_length]] * (1 + self.corrects_momentum)]
        received = [tensor.shape.as_list() for tensor in state]
        if received != expected:
            raise ValueError(
                f"State must match this rank's shard, {expected}. Received: shapes {received}. "
                "Create the state with `slots` of this scheme, for this layout of nodes."
            )

    def _selected_count(self, length: int, steps: tf.Tensor | None = None) -> Any:
        """Returns how many elements of a shard are sent; `steps=None` means after the warm-up."""
        if steps is None or not self.warmup_steps:
            return min(length, max(1, round(self.density * length)))
        progress = tf.clip_by_value(steps / self.warmup_steps, 0.0, 1.0)
        # Use int64, because callers multiply by the number of nodes and by bytes.
        count = tf.cast(tf.round(self.density**progress * length), tf.int64)
        return tf.clip_by_value(count, min(1, length), length)

    def _is_dense(self, levels: Levels) -> bool:
        """Returns whether all steps are dense: on one rank, or if pairs would have more bytes."""
        return levels.topology.size == 1 or all(
            bool(self._pairs_outweigh_values(levels, self._selected_count(n), n))
            for n in levels.node.lengths
        )

    def _pairs_outweigh_values(self, levels: Levels, k: Any, length: int) -> Any:
        # Across nodes, a dense exchange sends each value twice; on one node, pairs only replace a
        # gather.
        nodes = len(levels.topology.nodes)
        return k * nodes * pair_bytes(self.wire_dtype) >= (2 if nodes > 1 else 1) * 4 * length

    def _sends_everything(self, levels: Levels, steps: tf.Tensor) -> tf.Tensor:
        """Returns whether a step sends all values: while flushing, or early in the warm-up."""
        # All ranks must take the same branch, so this depends only on values that all ranks share:
        # the number of steps, and the longest shard instead of the rank's own.
        if not self.warmup_steps:
            return steps < 0.0
        longest = max(levels.node.lengths)
        k = self._selected_count(longest, steps)
        return tf.logical_or(steps < 0.0, self._pairs_outweigh_values(levels, k, longest))

    def _scattered_lengths(self, levels: Levels) -> tuple[int, ...]:
        """Returns lengths of the shards whose pairs a rank adds: all of the node, or its own."""
        # Ranks gather pairs in the node if they have fewer bytes than sums, at the final density.
        lengths, width = levels.node.lengths, pair_bytes(self.wire_dtype)
        pairs = len(levels.topology.nodes) * sum(map(self._selected_count, lengths))
        return lengths if width * pairs < 4 * sum(lengths) else (levels.shard_length,)


@dataclass(frozen=True, kw_only=True)
class HiTopK(SparseScheme):
    """Sums in the node, exchanges the largest elements across nodes, and gathers in the node.

    The ranks at the same position in all nodes exchange the largest elements of their shard.
    Therefore, all n network interfaces of a node are busy at once, and each element is selected
    once per node, from the sum over the node's ranks. Each rank stores the residual of its shard.
    The last stage gathers pairs or sums in the node, whichever have fewer bytes.

    Args:
      density: Share of elements that each node sends, in (0, 1] (default 0.01).
      select: Method of selection: `"mstopk"` (default), `"exact"` or `"dgc"`; see
        `tfposeidon.ops.top_k`.
      wire_dtype: Dtype in which values are sent: `None` for float32 (default), `"float16"` or
        `"bfloat16"`. Rounding errors are added to the residual. Values are sums over a node, not
        means: with float16 they become infinite beyond 65504; bfloat16 has no such limit.
      momentum: Coefficient of momentum correction (Lin et al. 2018, section 3), in [0, 1) (default
        0: none). The optimizer's own momentum must then be 0.
      warmup_steps: Steps in which the density falls exponentially from 1 to `density` (default 0).
      min_elements: Number of elements below which a variable is sent densely (default 4096): by
        `AllReduce`, or, with `momentum`, by this scheme at density 1.

    Raises:
      ValueError: If an argument is out of its range.

    Cost: For m nodes of n ranks, d elements and k = density d / n, each rank sends (n - 1) d / n
    values in the node for the scatter, (m - 1) k pairs across nodes, and in the node (n - 1) m k
    pairs or (n - 1) d / n values.
    Source: Shi et al. 2021 (CommLib), section 3.2, Algorithm 2. Differs: error feedback on the
    shard; indices and values in one message; the scatter is an all-to-all with a local sum (see
    `stages`); where pairs would have more bytes than the dense exchange, values are sent densely.

    Example:
      >>> from tfposeidon.schemes import HiTopK, Topology
      >>> scheme = HiTopK(density=0.001, momentum=0.9)
      >>> int(scheme.cost(10**6, itemsize=4, topology=Topology.regular(0, 8, 4)).cross_bytes)
      2000
    """


@dataclass(frozen=True, kw_only=True)
class TopK(SparseScheme):
    """Selects elements on every rank, gathers the pairs of all ranks, and sums them locally.

    Args:
      density: Share of elements that each rank sends, in (0, 1] (default 0.01).
      select: Method of selection: `"mstopk"`, `"exact"` (default) or `"dgc"`; see
        `tfposeidon.ops.top_k`.
      wire_dtype, momentum, warmup_steps, min_elements: As in `HiTopK`.

    Raises:
      ValueError: If an argument is out of its range.

    Cost: (P - 1) density d pairs sent per rank, for P ranks and d elements.
    Source: Shi et al. 2021 (CommLib), section 2.2 (NaiveAG); Renggli et al. 2019. Differs: error
    feedback; where pairs would have more bytes than the dense exchange, values are sent densely.

    Example:
      >>> from tfposeidon.schemes import TopK, Topology
      >>> scheme = TopK(density=0.001)
      >>> int(scheme.cost(10**6, itemsize=4, topology=Topology.regular(0, 8, 4)).bytes)
      56000
    """

    select: str = "exact"

    @override
    def _levels(self, length: int, topology: Topology) -> Levels:
        # Every rank is a separate node, so that nothing is summed before the selection.
        nodes = tuple((rank,) for rank in range(topology.size))
        return super()._levels(length, Topology(topology.rank, nodes))
