"""What the sparse schemes share: a shard per rank, selection with error feedback, pairs on the slow links."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfposeidon import ops
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import cost, pairs, stages
from tfposeidon.schemes.base import Scheme, Slot, State, VectorScheme
from tfposeidon.schemes.cost import Cost
from tfposeidon.schemes.error_feedback import ErrorFeedback, FeedbackState, Selection
from tfposeidon.schemes.wire_format import check_wire_dtype

MAX_LENGTH = 2**31
FLUSHING, FLUSHED = -1.0, -2.0
"""In place of the number of steps so far: everything is to be sent, and everything was and is."""


@dataclass(frozen=True)
class _Layout:
    """Who selects from what, for a bucket on one topology."""

    node: stages.Shards
    across: Group | None
    nodes: int
    rank: int

    @property
    def length(self) -> int:
        """Elements of this rank's shard."""
        return self.node.own(self.rank)

    @property
    def offset(self) -> int:
        return self.node.offset(self.rank)


@dataclass(frozen=True, kw_only=True)
class SparseScheme(VectorScheme):
    """Sends the elements of largest magnitude; what is not sent is added to the next gradient.

    Args:
      density: Share of elements that each node sends, in (0, 1].
      select: `"mstopk"`, `"exact"` or `"dgc"`: see `tfposeidon.ops.top_k`.
      wire_dtype: Of values on the wire: `None`, `"float16"` or `"bfloat16"`. Rounding errors join the residual.
        float16 ends at 65504, and what is sent are sums over a node, not means; bfloat16 has no such end.
      error_feedback: Whether there is a residual. Without one, what is not sent is lost.
      momentum: Of momentum correction (Lin et al. 2018, section 3); the optimizer's own must then be 0.
      warmup_steps: Over so many steps the density falls exponentially from 1 to `density`.
      min_elements: Variables with fewer are sent densely, by `AllReduce`; with `momentum`, by this scheme at
        density 1.

    Raises:
      ValueError: If an argument makes no sense.
    """

    density: float = 0.01
    select: str = "mstopk"
    wire_dtype: str | None = None
    error_feedback: bool = True
    momentum: float = 0.0
    warmup_steps: int = 0
    min_elements: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(
                f"`density` must be in (0, 1]. Received: density={self.density}. Use AllReduce() to send everything."
            )
        check_wire_dtype(self.wire_dtype)
        for name in ("warmup_steps", "min_elements"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must not be negative. Received: {name}={getattr(self, name)}"
                )
        _ = self._feedback

    @property
    def exact(self) -> bool:
        return False

    @property
    def corrects_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def min_length(self) -> int:
        return self.min_elements

    @property
    def for_small_variables(self) -> Scheme | None:
        # The optimizer's momentum is 0, so it is kept here, too.
        return replace(self, density=1.0, min_elements=0) if self.corrects_momentum else None

    @abstractmethod
    def _seen(self, topology: Topology) -> Topology:
        """The topology that the stages are laid out on."""

    # ------------------------------------------------------------------ state

    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        layout = self._layout(length, topology)
        names = ["residual"] * self.error_feedback + ["velocity"] * self.corrects_momentum
        shard = [Slot(name=name, shape=(layout.length,), offset=layout.offset) for name in names]
        return (Slot(name="steps", shape=()), *shard)

    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        steps, *memory = state
        return (steps, *(tensor * factor for tensor in memory))

    def flushing(self, state: State) -> State:
        steps, *memory = state
        return (tf.fill(tf.shape(steps), FLUSHING), *memory)

    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == FLUSHED

    # --------------------------------------------------------------- exchange

    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        layout = self._layout(gradient.shape[0], wire.topology)
        steps, memory = self._checked(state, layout)
        shard = stages.scatter_sum(gradient, layout.node, wire, f"{name}.node_scatter", None)
        shard = tf.ensure_shape(tf.cast(shard, tf.float32), [layout.length])

        def dense() -> tuple[tf.Tensor, State]:
            everything, new = self._feedback.all_of(shard, memory)
            return self._dense_mean(everything, layout, wire, name), new.kept

        def sparse() -> tuple[tf.Tensor, State]:
            selection, new = self._feedback.select_from(
                shard, memory, self._count(layout.length, steps), self._seed(steps, layout)
            )
            return self._sparse_mean(selection, layout, steps, wire, name), new.kept

        if self._is_dense(layout):
            mean, kept = dense()
        else:
            mean, kept = tf.cond(self._wants_everything(layout, steps), dense, sparse)
        steps = tf.where(steps < 0.0, FLUSHED, steps + 1.0)
        return tf.cast(mean, gradient.dtype), (steps, *kept)

    def _dense_mean(
        self, everything: tf.Tensor, layout: _Layout, wire: Wire, name: str
    ) -> tf.Tensor:
        mean = everything / wire.topology.size
        if layout.across is not None:
            across = stages.Shards.even(layout.length, layout.across)
            part = stages.scatter_sum(mean, across, wire, f"{name}.across_scatter", None)
            mean = stages.gather(part, across, wire, f"{name}.across_gather")
        return stages.gather(mean, layout.node, wire, f"{name}.node_gather")

    def _sparse_mean(
        self, selection: Selection, layout: _Layout, steps: Any, wire: Wire, name: str
    ) -> tf.Tensor:
        packed = pairs.pack(selection.values, selection.indices, self.wire_dtype)
        if layout.across is not None:
            packed = wire.all_gather(packed, layout.across, f"{name}.pairs_across")
        if not self._gathers_pairs(layout):
            owned = [(layout.nodes, self._count(layout.length, steps))]
            mean = self._accumulate(packed, owned, [0], layout.length, wire)
            return stages.gather(mean, layout.node, wire, f"{name}.sums_in_node")
        packed = wire.all_gather(packed, layout.node.group, f"{name}.pairs_in_node")
        owned = [(layout.nodes, self._count(length, steps)) for length in layout.node.lengths]
        offsets = [layout.node.offset(rank) for rank in layout.node.group.ranks]
        return self._accumulate(packed, owned, offsets, sum(layout.node.lengths), wire)

    def _accumulate(
        self,
        packed: tf.Tensor,
        groups: list[tuple[int, Any]],
        offsets: list[int],
        length: int,
        wire: Wire,
    ) -> tf.Tensor:
        """The mean of all ranks, `[length]`, from pairs in the order of positions and, in these, of nodes."""
        values, indices, counts = pairs.unpack(packed, groups, self.wire_dtype)
        if any(offsets):
            per_group = [
                tf.fill([count * k], offset)
                for (count, k), offset in zip(groups, offsets, strict=True)
            ]
            indices += tf.concat(per_group, 0)
        # Divided before they are spread: k values per rank instead of all.
        mean = ops.scatter_add(values / wire.topology.size, indices, length, counts)
        return tf.ensure_shape(mean, [length])

    # ------------------------------------------------------------------- cost

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        layout = self._layout(length, topology)
        width = pairs.pair_bytes(self.wire_dtype)
        k = self._count(layout.length)
        total = stages.scatter_sum_cost(layout.node, itemsize, topology, None)
        if self._is_dense(layout):
            if layout.across is not None:
                across = stages.Shards.even(layout.length, layout.across)
                total += stages.scatter_sum_cost(across, 4, topology, None)
                total += stages.gather_cost(across, 4, topology, None)
            return total + stages.gather_cost(layout.node, 4, topology, None)
        if layout.across is not None:
            total += cost.ring_all_gather(topology, layout.across, [width * k] * layout.across.size)
        total += Cost(flops=layout.nodes * k)
        if not self._gathers_pairs(layout):
            return total + stages.gather_cost(layout.node, 4, topology, None)
        parts = [width * layout.nodes * self._count(n) for n in layout.node.lengths]
        return total + cost.ring_all_gather(
            topology, layout.node.group, [float(part) for part in parts]
        )

    def note(self, length: int, topology: Topology) -> str:
        if not self._is_dense(self._layout(length, topology)):
            return ""
        return f"density {self.density} on {topology} is more bytes in pairs than all values: sent densely"

    # -------------------------------------------------------------- decisions

    @cached_property
    def _feedback(self) -> ErrorFeedback:
        return ErrorFeedback(
            select=self.select,
            wire_dtype=self.wire_dtype,
            keep=self.error_feedback,
            momentum=self.momentum,
        )

    def _layout(self, length: int, topology: Topology) -> _Layout:
        if length > MAX_LENGTH:
            raise ValueError(
                f"Indices on the wire are int32, for up to 2^31 elements a bucket. Received: {length}. "
                "Give this variable a dense scheme by a rule."
            )
        seen = self._seen(topology)
        node = stages.Shards.even(length, seen.node, owners=seen.positions)
        across = seen.across if seen.across is not None and seen.across.size > 1 else None
        return _Layout(node, across, len(seen.nodes), topology.rank)

    def _checked(self, state: State, layout: _Layout) -> tuple[tf.Tensor, FeedbackState]:
        steps, *kept = state
        expected = [[], *[[layout.length]] * (self.error_feedback + self.corrects_momentum)]
        received = [tensor.shape.as_list() for tensor in state]
        if received != expected:
            raise ValueError(
                f"State must be that of this rank's shard, {expected}. Received: shapes {received}. It was made for "
                "another layout of nodes, or another scheme."
            )
        return steps, FeedbackState(*[*kept, None, None][:2])

    def _count(self, length: int, steps: tf.Tensor | None = None) -> Any:
        """Elements selected of a shard: at least one, if it has any. A tensor during warm-up."""
        if steps is None or not self.warmup_steps:
            return min(length, max(1, round(self.density * length)))
        progress = tf.clip_by_value(steps / self.warmup_steps, 0.0, 1.0)
        # In 64 bits: what follows multiplies by nodes and bytes.
        count = tf.cast(tf.round(self.density**progress * length), tf.int64)
        return tf.clip_by_value(count, min(1, length), length)

    @staticmethod
    def _seed(steps: tf.Tensor, layout: _Layout) -> tf.Tensor:
        """Another window of equals at every step and on every rank."""
        return tf.cast(steps, tf.int64) * 1_000_003 + layout.rank

    def _is_dense(self, layout: _Layout) -> bool:
        """Whether pairs are more bytes than values, at the final density, or nothing is sent at all."""
        alone = layout.nodes == 1 and layout.node.group.size == 1
        return alone or all(
            bool(self._outweigh(layout, self._count(n), n)) for n in layout.node.lengths
        )

    def _outweigh(self, layout: _Layout, k: Any, length: int) -> Any:
        # Across nodes a dense sum moves each value twice; on one node what is saved is a gather.
        moves = 2 if layout.nodes > 1 else 1
        return k * layout.nodes * pairs.pair_bytes(self.wire_dtype) >= moves * 4 * length

    def _wants_everything(self, layout: _Layout, steps: tf.Tensor) -> tf.Tensor:
        """The same on all ranks: while flushing, and in warm-up while pairs would be more bytes."""
        flushing = steps < 0.0
        if not self.warmup_steps:
            return flushing
        longest = max(layout.node.lengths)
        return tf.logical_or(flushing, self._outweigh(layout, self._count(longest, steps), longest))

    def _gathers_pairs(self, layout: _Layout) -> bool:
        """Whether, in the node, pairs are fewer bytes than the sums they make; decided at the final density."""
        width = pairs.pair_bytes(self.wire_dtype)
        sparse = sum(width * layout.nodes * self._count(n) for n in layout.node.lengths)
        return layout.node.group.size > 1 and sparse < 4 * sum(layout.node.lengths)
