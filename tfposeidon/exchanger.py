"""Carries out a plan: one collective exchange per bucket, each as soon as its gradients exist.

Nothing in one bucket's exchange depends on another's, so TensorFlow starts them in the order in
which backpropagation makes the gradients (wait-free backpropagation, Poseidon section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.agreement import REMEDY, as_json, check_same_variables
from tfposeidon.coordinator import Bucket, Plan
from tfposeidon.embedding_rows import Rows
from tfposeidon.gradient import Description, dense
from tfposeidon.rank_state import Piece
from tfposeidon.schemes.base import FactorScheme, Slot, State, VectorScheme
from tfposeidon.sufficient_factors import Factors
from tfposeidon.wire import Wire, Zeros, exchange_objects, opaque, zeros


class Presence(NamedTuple):
    """Who took part in a step: scalars, the same on every rank."""

    weight: tf.Tensor
    """Float32: this rank's share of all samples, times the number of ranks."""
    absent: tf.Tensor
    """Float32: ranks that had no batch left and contributed nothing."""


class Exchanger:
    """Exchanges the gradients of one list of variables.

    Args:
      plan: What goes how.
      wire: The collectives.
      zeros: Those of another exchanger, to share them.

    Attributes:
      states: What the schemes keep from step to step, variables for each bucket; zeros at first.
      afterwards: What else all ranks do together in a step, from means to means; mostly nothing.
    """

    def __init__(self, plan: Plan, wire: Wire, zeros: Zeros | None = None) -> None:
        self.plan = plan
        self.wire = wire
        self.prefix: str | None = None
        self.active: list[bool] = []
        self.afterwards: Callable[[list[Any]], list[Any]] | None = None
        dtypes = {"float32", "int32", *(bucket.dtype for bucket in plan.buckets)}
        dtypes |= {d.factors.dtype for bucket in plan.buckets for d in bucket.descriptions if d.factors}
        self._zeros = Zeros() if zeros is None else zeros
        for dtype in sorted(dtypes):
            self._zeros[dtype]
        used = Zeros()
        self._used = {bucket.dtype: used[bucket.dtype] for bucket in plan.buckets if bucket.server}
        self.states: list[list[tf.Variable]] = [
            [_variable(slot, index) for slot in bucket.slots(plan.topology)]
            for index, bucket in enumerate(plan.buckets)
        ]

    def take_over(self, other: Exchanger) -> None:
        """Goes on for another exchanger of the same variables, with what it keeps for buckets of the same scheme."""
        self.prefix, self.active = other.prefix, other.active
        kept = {(b.members, b.scheme): state for b, state in zip(other.plan.buckets, other.states, strict=True)}
        self.states = [
            kept.get((bucket.members, bucket.scheme), state)
            for bucket, state in zip(self.plan.buckets, self.states, strict=True)
        ]

    def agree(self, prefix: str, gradients: Sequence[Any], settings: dict[str, Any]) -> None:
        """Makes sure, before the first exchange, that all ranks are about to exchange the same.

        Args:
          prefix: Begins the names of this exchanger's collectives; the same on every rank.
          gradients: `None` where this rank has none; those that no rank has are left alone for good.
          settings: Whatever else has to be the same on all ranks.

        Raises:
          RuntimeError: On all ranks alike, naming the first difference.
        """
        mine = {
            "settings": settings,
            "variables": as_json(self._descriptions()),
            "active": [g is not None for g in gradients],
        }
        with tf.init_scope():
            everybody = exchange_objects(mine, self.wire, f"{prefix}.agree")
        _check_same_settings([other["settings"] for other in everybody])
        check_same_variables([other["variables"] for other in everybody])
        self.active = [any(flags) for flags in zip(*(other["active"] for other in everybody), strict=True)]
        self.prefix = prefix

    def presence(self, sample_count: Any) -> Presence:
        """Counts samples and ranks over the job: one small all-reduce, sent when the step starts."""
        # On the processor: a GPU would have to be waited for before anybody can branch on the weight.
        with tf.device("/CPU:0"):
            # A static batch size is a constant, which must not reach a collective.
            count = tf.cast(sample_count, tf.float32) + self._zeros["float32"].read_value()
            mine = tf.stack([count, tf.sign(count)])
            total = self.wire.all_reduce(mine, self.wire.topology.world, f"{self.prefix}.samples")
            ranks = tf.cast(self.wire.topology.size, tf.float32)
            return Presence(tf.math.divide_no_nan(count * ranks, total[0]), ranks - total[1])

    def exchange(
        self, gradients: Sequence[Any], weight: tf.Tensor | None, rescale: tf.Tensor | None = None
    ) -> tuple[list[Any], list[State]]:
        """Exchanges all buckets.

        Args:
          gradients: One per variable: a tensor, `IndexedSlices` or `None`.
          weight: Factor for this rank's gradients, or `None` for equal weights.
          rescale: Factor for what schemes have kept of earlier gradients, or `None` for 1.

        Returns:
          The mean gradient of each variable (`None` where no rank has any; of what servers update, this rank's part
          as a vector, a zero where it has none), and the new states.

        Raises:
          ValueError: At trace time, if a variable has a gradient that none had at the first step.
        """
        means: list[Any] = [None] * len(gradients)
        states: list[State] = []
        self._check_active(gradients)
        for index, bucket in enumerate(self.plan.buckets):
            mean, state = self._exchange_bucket(index, bucket, gradients, weight, rescale)
            states.append(state)
            tensors = self._own_parts(mean, bucket) if bucket.server else _split(mean, bucket.descriptions)
            for member, tensor in zip(bucket.members, tensors, strict=True):
                means[member] = tensor if self.active[member] else None
        return means, states

    def _exchange_bucket(
        self, index: int, bucket: Bucket, gradients: Sequence[Any], weight: tf.Tensor | None, rescale: tf.Tensor | None
    ) -> tuple[tf.Tensor, State]:
        name = f"{self.prefix}.bucket_{index}"
        if isinstance(bucket.scheme, FactorScheme):
            return self._exchange_factors(bucket, bucket.scheme, gradients[bucket.members[0]], weight, name), ()
        vector = self._flatten(bucket, gradients)
        if weight is not None:
            vector = _weighted(vector, weight)
        if bucket.server:
            own = bucket.server.push(vector, self.wire, name)
            # TensorFlow leaves out a push whose result nobody uses: that of a rank that serves nothing of it.
            self._used[bucket.dtype].assign(tf.reduce_sum(own[:1]))
            return own, ()
        assert isinstance(bucket.scheme, VectorScheme)
        return bucket.scheme.exchange(vector, self._state(index, rescale), self.wire, name)

    def _own_parts(self, own: tf.Tensor, bucket: Bucket) -> list[tf.Tensor]:
        lengths = [end - begin for begin, end in bucket.served_parts(self.wire.topology)]
        pairs = zip(tf.split(own, lengths), lengths, strict=True)
        return [part if length else zeros([1], self._zeros[bucket.dtype]) for part, length in pairs]

    def pull(self, bucket: Bucket, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Whole variables of a bucket that servers update.

        Args:
          parts: What this rank serves, in the order of members; as `exchange` returns them.
        """
        shown = [
            part
            for part, (begin, end) in zip(parts, bucket.served_parts(self.wire.topology), strict=True)
            if begin < end
        ]
        own = tf.cast(tf.concat(shown, 0), bucket.dtype) if shown else zeros([0], self._zeros[bucket.dtype])
        name = f"{self.prefix}.bucket_{self.plan.buckets.index(bucket)}"
        assert bucket.server is not None
        return _split(bucket.server.pull(own, bucket.length, self.wire, name), bucket.descriptions)

    def _exchange_factors(
        self, bucket: Bucket, scheme: FactorScheme, gradient: Any, weight: tf.Tensor | None, name: str
    ) -> tf.Tensor:
        description = bucket.descriptions[0]
        factors = self._no_rows(description) if gradient is None else gradient
        if weight is not None:
            factors = factors.weighted(weight)
        left, right = (opaque(matrix, self._zeros["int32"]) for matrix in (factors.left, factors.right))
        sent = dataclasses.replace(factors, left=left, right=right)
        mean = scheme.exchange_factors(sent, self.wire, name)
        mean = tf.ensure_shape(tf.cast(mean, description.dtype), [description.length])
        return mean if factors.local is None else mean + tf.reshape(factors.local, [-1])

    def _no_rows(self, description: Description) -> Factors:
        shape = description.factors
        assert shape is not None
        zero = self._zeros[shape.dtype]
        if shape.indexed:
            return Rows(zeros([0], self._zeros["int32"]), zeros([0, shape.right], zero), table=shape.left)
        return Factors(zeros([0, shape.left], zero), zeros([0, shape.right], zero))

    def pieces(self) -> list[Piece]:
        """What each variable of `states` is, in their order."""
        return [piece for index, bucket in enumerate(self.plan.buckets) for piece in self._pieces(index, bucket)]

    def _pieces(self, index: int, bucket: Bucket) -> Iterator[Piece]:
        topology = self.plan.topology
        everybody = [bucket.slots(topology.seen_from(rank)) for rank in range(topology.size)]
        members = tuple((d.path, d.length) for d in bucket.descriptions)
        for place, slot in enumerate(bucket.slots(topology)):
            if slot.shape:
                holders = sum(slots[place].shape[0] for slots in everybody) // bucket.length
                yield Piece(name=slot.name, members=members, offset=slot.offset, holders=holders)
            else:
                yield Piece(name=f"bucket_{index}_{slot.name}")

    @property
    def has_flushed(self) -> bool:
        """Whether all that schemes had kept was sent since `flush`."""
        pairs = zip(self.plan.buckets, self.states, strict=True)
        return all(bucket.scheme.has_flushed(tuple(map(tf.convert_to_tensor, state))) for bucket, state in pairs)

    def flush(self) -> None:
        """Makes all exchanges from now on send everything, what schemes have kept included."""
        for bucket, variables in zip(self.plan.buckets, self.states, strict=True):
            state = bucket.scheme.flushing(tuple(tf.convert_to_tensor(variable) for variable in variables))
            for variable, value in zip(variables, state, strict=True):
                variable.assign(value)

    def _state(self, index: int, rescale: tf.Tensor | None) -> State:
        state = tuple(tf.convert_to_tensor(variable) for variable in self.states[index])
        if not state or rescale is None:
            return state
        # Rarely another factor than 1, which would be one more pass over memory.
        scheme = self.plan.buckets[index].scheme
        return tf.cond(rescale == 1.0, lambda: state, lambda: scheme.rescaled(state, rescale))

    @tf.function
    def contribute_nothing(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Takes part in one exchange with zeros.

        Returns:
          How many ranks are absent like this one, and what has to be fetched with it: TensorFlow leaves
          out a collective whose result nobody uses, even as a control dependency.
        """
        absent = self.presence(zeros([], self._zeros["float32"])).absent
        means, _ = self.exchange([None] * len(self.active), None)
        if self.afterwards is not None:
            means = self.afterwards(means)
        return absent, [tf.reduce_sum(mean) for mean in means if mean is not None]

    def _flatten(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor:
        zero = self._zeros[bucket.dtype]
        pairs = zip(bucket.members, bucket.descriptions, strict=True)
        parts = [tf.reshape(dense(gradients[member], d, zero), [-1]) for member, d in pairs]
        vector = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        # Gradients of linear losses are constants, on some ranks or on all.
        return opaque(vector, self._zeros["int32"])

    def _check_active(self, gradients: Sequence[Any]) -> None:
        for description, gradient, active in zip(self._descriptions(), gradients, self.active, strict=True):
            if gradient is not None and not active:
                raise ValueError(
                    "Which variables have gradients is agreed on at the first step. Received: a gradient for "
                    f"{description.path!r}, which had none on any rank then. Use a new DistributedOptimizer."
                )

    def _descriptions(self) -> list[Description]:
        pairs = [(m, d) for b in self.plan.buckets for m, d in zip(b.members, b.descriptions, strict=True)]
        return [description for _, description in sorted(pairs, key=lambda pair: pair[0])]


def _variable(slot: Slot, bucket: int) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(tf.zeros(slot.shape), trainable=False, name=f"bucket_{bucket}_{slot.name}")


def _weighted(vector: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    # With equal batches the weight is exactly 1, and the vector need not pass through memory again.
    # No samples, no say: a mean over an empty batch is not a number.
    return tf.cond(
        weight == 1.0,
        lambda: vector,
        lambda: tf.where(weight > 0.0, vector * tf.cast(weight, vector.dtype), tf.zeros_like(vector)),
    )


def _split(vector: tf.Tensor, descriptions: Sequence[Description]) -> list[tf.Tensor]:
    parts = tf.split(vector, [d.length for d in descriptions]) if len(descriptions) > 1 else [vector]
    return [tf.reshape(part, d.shape) for part, d in zip(parts, descriptions, strict=True)]


def _check_same_settings(everybody: Sequence[dict[str, Any]]) -> None:
    for rank, other in enumerate(everybody):
        if other != everybody[0]:
            raise RuntimeError(
                f"All ranks must exchange alike. Received: {everybody[0]} on rank 0, {other} on rank {rank}. {REMEDY}"
            )
