"""Carries out a plan: one exchange per bucket, each as soon as its gradients exist.

Nothing in one bucket's exchange depends on another's, so TensorFlow starts them in the order in
which backpropagation makes the gradients (wait-free backpropagation, Poseidon section 3.1).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication import agreement
from tfposeidon.communication.wire import (
    Wire,
    Zeros,
    exchange_objects,
    numbered_names,
    opaque,
    zeros,
)
from tfposeidon.exchange import factor_exchange
from tfposeidon.exchange.variable_agreement import REMEDY, as_json, check_same_variables
from tfposeidon.gradients.description import Description, dense
from tfposeidon.planning.plan import Bucket, Plan
from tfposeidon.schemes.base import Slot, State, VectorScheme
from tfposeidon.state.rank_state import StateDescription


class Presence(NamedTuple):
    """Who took part in a step; all but the weight is the same on every rank.

    Attributes:
      weight: This rank's share of all samples times the number of ranks, a float32 scalar; `None`
        for equal weights.
      absent: Number of ranks that had no batch left and contributed nothing, a float32 scalar.
      any_gradient: Bool, one for each variable: whether any rank has a gradient.
    """

    weight: tf.Tensor | None
    absent: tf.Tensor
    any_gradient: tf.Tensor


class Exchanger:
    """Exchanges the gradients of one list of variables.

    Args:
      plan: Which variables are exchanged in which bucket, and by which scheme.
      wire: Collectives that join the ranks.
      zeros: Zeros of another exchanger, to share them.
      rows: Rows of another exchanger of the same variables, to share them.

    Attributes:
      plan: As given.
      wire: As given.
      prefix: Begins the names of its collectives; `None` until ranks have agreed.
      states: Variables that the schemes keep from step to step, a list for each bucket; zeros at
        first.
      rows: Rows of factors in the last step that had any, `[variables]` float32: at a bucket's
        index the sum over its variables and all ranks.
      afterwards: What else all ranks do together in a step, a function from means to means; mostly
        `None`.
      calls: Number of exchanges in a traced step, at most.
      had_gradient: `[variables]` float32, 1 for each variable of a scheme that keeps something
        which has had a gradient; `None` where no scheme keeps anything.
    """

    def __init__(
        self, plan: Plan, wire: Wire, zeros: Zeros | None = None, rows: tf.Variable | None = None
    ) -> None:
        self.plan = plan
        self.wire = wire
        self.prefix: str | None = None
        self._present_at_first_step: list[bool] = []
        self.calls = 0
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.afterwards: Callable[[list[Any]], list[Any]] | None = None
        dtypes = {"float32", "int32", *(bucket.dtype for bucket in plan.buckets)}
        dtypes |= {
            d.factors.dtype for bucket in plan.buckets for d in bucket.descriptions if d.factors
        }
        self._zeros = Zeros() if zeros is None else zeros
        for dtype in sorted(dtypes):
            self._zeros[dtype]
        sinks = Zeros()
        self._push_sinks = {
            bucket.dtype: sinks[bucket.dtype] for bucket in plan.buckets if bucket.server
        }
        # For as many buckets as there might be: which there are is known in a trace, and TensorFlow
        # traces a step once more whose first trace makes variables.
        self.rows = _rows(len(self._descriptions())) if rows is None else rows
        self.states: list[list[tf.Variable]] = [
            [_variable(slot, index) for slot in bucket.slots(plan.topology)]
            for index, bucket in enumerate(plan.buckets)
        ]
        kept = {
            member
            for bucket in plan.buckets
            if bucket.slots(plan.topology)
            for member in bucket.members
        }
        self._kept = [float(member in kept) for member, _ in enumerate(self._descriptions())]
        self.had_gradient = _had_gradient(len(self._kept)) if kept else None

    def take_over(self, other: Exchanger) -> None:
        """Takes the place of another exchanger of the same variables, with the state of buckets that stay.

        Args:
          other: Exchanger by another plan, on which ranks have agreed.
        """
        self.prefix, self.had_gradient = other.prefix, other.had_gradient
        self._present_at_first_step = other._present_at_first_step
        self.calls, self._calls = other.calls, other._calls
        kept = {
            (b.members, b.scheme): state
            for b, state in zip(other.plan.buckets, other.states, strict=True)
        }
        self.states = [
            kept.get((bucket.members, bucket.scheme), state)
            for bucket, state in zip(self.plan.buckets, self.states, strict=True)
        ]

    def agree(self, prefix: str, gradients: Sequence[Any], settings: dict[str, Any]) -> None:
        """Makes sure, before the first exchange, that all ranks are about to exchange the same.

        Args:
          prefix: Begins the names of this exchanger's collectives; the same on every rank.
          gradients: Gradients of the first step; `None` where this rank has none. Later steps may
            have others.
          settings: Whatever else has to be the same on all ranks, for JSON.

        Raises:
          RuntimeError: On all ranks alike, naming the first difference.
        """
        mine = {
            "settings": settings,
            "variables": as_json(self._descriptions()),
            "present": [g is not None for g in gradients],
        }
        with tf.init_scope():
            everybody = exchange_objects(mine, self.wire, f"{prefix}.agree")
        agreement.require_equal(
            [other["settings"] for other in everybody],
            "All ranks must exchange alike",
            REMEDY,
            agreement.at_first_entry(),
        )
        check_same_variables([other["variables"] for other in everybody])
        self._present_at_first_step = [
            any(flags) for flags in zip(*(other["present"] for other in everybody), strict=True)
        ]
        self.prefix = prefix

    def group_by_first_step(self, indices: Sequence[int]) -> list[list[int]]:
        """Groups variables by whether any rank had a gradient of theirs at the first step.

        Variables of one group mostly go together: they have a gradient in the same steps.

        Args:
          indices: Indices of variables.

        Returns:
          At most two lists that are not empty, that of variables with a gradient first.
        """
        with_gradient = [i for i in indices if self._present_at_first_step[i]]
        without = [i for i in indices if not self._present_at_first_step[i]]
        return [group for group in (with_gradient, without) if group]

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Counts one use of the exchanger, of which there may be several in the graph of one step.

        Collectives within it get the names of this use: in a graph each name may occur once.
        """
        graph = tf.compat.v1.get_default_graph()
        number = 0 if tf.executing_eagerly() else self._calls.get(graph, 0)
        self._calls[graph] = number + 1
        self.calls = max(self.calls, number + 1)
        with numbered_names(number):
            yield

    def presence(
        self, gradients: Sequence[Any], sample_count: Any = None, has_batch: bool = True
    ) -> Presence:
        """Counts samples, ranks and gradients over the job: one small all-reduce, sent when the step starts.

        Args:
          gradients: Gradients of this rank; `None` where there is none.
          sample_count: Number of samples behind them, a scalar; `None` for equal weights.
          has_batch: Whether this rank has a batch, which may be one in which nothing counts.
        """
        # On the CPU: a GPU would have to be waited for before anybody can branch on the weight.
        with tf.device("/CPU:0"):
            # A static batch size is a constant, which must not reach a collective.
            zero = self._zeros["float32"].read_value()
            count = tf.cast(1.0 if sample_count is None else sample_count, tf.float32) + zero
            flags = [
                float(has_batch),
                *(float(has_batch and gradient is not None) for gradient in gradients),
            ]
            mine = tf.concat([count[tf.newaxis], tf.constant(flags) + zero], 0)
            total = self.wire.all_reduce(mine, self.wire.topology.world, f"{self.prefix}.samples")
            ranks = tf.cast(self.wire.topology.size, tf.float32)
            weight = (
                None if sample_count is None else tf.math.divide_no_nan(count * ranks, total[0])
            )
            self._check_regularised(total[2:], total[1])
            return Presence(weight, ranks - total[1], total[2:] > 0.0)

    def _check_regularised(self, gradients: tf.Tensor, present: tf.Tensor) -> None:
        """Refuses regularised variables that have a gradient on some ranks only.

        Each rank adds a regulariser's part to what came as factors, and can do so only where it has
        a gradient.

        Args:
          gradients: Number of ranks with a gradient, for each variable.
          present: Number of ranks with a batch.
        """
        members = (
            (b, m, d)
            for b in self.plan.buckets
            for m, d in zip(b.members, b.descriptions, strict=True)
        )
        for bucket, member, description in members:
            if (
                bucket.takes_factors
                and description.factors is not None
                and description.factors.has_local
            ):
                rule = (
                    "A variable that is regularised and sent by factors must have a gradient on "
                    f"all ranks or on none. Received: {description.path!r}, with a gradient on "
                    "some. Give it another scheme by a rule."
                )
                count = gradients[member]
                tf.debugging.Assert(tf.logical_or(count == 0.0, count == present), [rule])

    def updated_had_gradient(self, presence: Presence) -> tf.Tensor:
        """Returns what `had_gradient` becomes with a step that counts.

        Args:
          presence: Who took part in that step.
        """
        assert self.had_gradient is not None
        return tf.maximum(
            self.had_gradient, tf.cast(presence.any_gradient, tf.float32) * tf.constant(self._kept)
        )

    def expected(self, presence: Presence) -> tf.Tensor:
        """Finds the variables with a mean to apply.

        They have a gradient on some rank, or had one of which a scheme has kept something that it
        sends late.

        Args:
          presence: Who took part in the step.

        Returns:
          Bool, one for each variable, the same on all ranks.
        """
        if self.had_gradient is None:
            return presence.any_gradient
        return tf.logical_or(presence.any_gradient, self.had_gradient > 0.0)

    def exchange(
        self,
        gradients: Sequence[Any],
        weight: tf.Tensor | None,
        rescale: tf.Tensor | None = None,
    ) -> tuple[list[Any], list[State]]:
        """Exchanges all buckets.

        Args:
          gradients: One per variable: a tensor, `IndexedSlices`, `Factors` or `None`.
          weight: Factor for this rank's gradients, a float32 scalar; `None` for equal weights.
          rescale: Factor for what schemes have kept of earlier gradients, a float32 scalar; `None`
            for 1.

        Returns:
          The mean gradient of each variable (zeros where no rank has any; of what servers update,
          this rank's part as a vector, a zero where it has none), and the new state of each
          bucket's scheme.
        """
        means: list[Any] = [None] * len(gradients)
        states: list[State] = []
        rows: dict[int, tf.Tensor] = {}
        for index, bucket in enumerate(self.plan.buckets):
            if bucket.takes_factors:
                mean, rows[index] = self._exchange_factors(index, bucket, gradients, weight)
                state: State = ()
            else:
                mean, state = self._exchange_bucket(index, bucket, gradients, weight, rescale)
            states.append(state)
            tensors = (
                self._own_parts(mean, bucket)
                if bucket.server
                else _split(mean, bucket.descriptions)
            )
            for member, tensor in zip(bucket.members, tensors, strict=True):
                means[member] = tensor
        self._keep_rows(rows)
        return means, states

    def _keep_rows(self, rows: dict[int, tf.Tensor]) -> None:
        if rows:
            with tf.device("/CPU:0"):
                new = tf.stack(
                    [rows.get(index, tf.zeros([])) for index in range(self.rows.shape[0])]
                )
                # What nobody has anything for, as at the end of an epoch, is no step.
                self.rows.assign(tf.where(new > 0.0, new, self.rows))

    def _exchange_factors(
        self, index: int, bucket: Bucket, gradients: Sequence[Any], weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        factors = [gradients[member] for member in bucket.members]
        name = f"{self.prefix}.bucket_{index}"
        return factor_exchange.exchange(bucket, factors, weight, self.wire, name, self._zeros)

    def _exchange_bucket(
        self,
        index: int,
        bucket: Bucket,
        gradients: Sequence[Any],
        weight: tf.Tensor | None,
        rescale: tf.Tensor | None,
    ) -> tuple[tf.Tensor, State]:
        name = f"{self.prefix}.bucket_{index}"
        vector = self._flatten(bucket, gradients)
        if weight is not None:
            vector = _weighted(vector, weight)
        if bucket.server:
            own = bucket.server.push(vector, self.wire, name)
            # TensorFlow leaves out a push whose result nobody uses: that of a rank that serves
            # nothing of it.
            self._push_sinks[bucket.dtype].assign(tf.reduce_sum(own[:1]))
            return own, ()
        assert isinstance(bucket.scheme, VectorScheme)
        return bucket.scheme.exchange(vector, self._state(index, rescale), self.wire, name)

    def _own_parts(self, own: tf.Tensor, bucket: Bucket) -> list[tf.Tensor]:
        lengths = [end - begin for begin, end in bucket.served_parts(self.wire.topology)]
        pairs = zip(tf.split(own, lengths), lengths, strict=True)
        return [part if length else zeros([1], self._zeros[bucket.dtype]) for part, length in pairs]

    def pull(self, bucket: Bucket, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the whole variables of a bucket that servers update.

        Args:
          bucket: One of the plan's buckets.
          parts: Vectors that this rank serves, in the order of members; as `exchange` returns them.

        Returns:
          Each member in its shape, the same bits on every rank.
        """
        shown = [
            part
            for part, (begin, end) in zip(
                parts, bucket.served_parts(self.wire.topology), strict=True
            )
            if begin < end
        ]
        own = (
            tf.cast(tf.concat(shown, 0), bucket.dtype)
            if shown
            else zeros([0], self._zeros[bucket.dtype])
        )
        name = f"{self.prefix}.bucket_{self.plan.buckets.index(bucket)}"
        assert bucket.server is not None
        return _split(bucket.server.pull(own, bucket.length, self.wire, name), bucket.descriptions)

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Path and number of elements of each variable, in their order."""
        return tuple((d.path, d.length) for d in self._descriptions())

    def describe_states(self) -> list[StateDescription]:
        """Returns what each variable of `states` is, in their order."""
        return [
            description
            for bucket in self.plan.buckets
            for description in self._describe_bucket(bucket)
        ]

    def _describe_bucket(self, bucket: Bucket) -> Iterator[StateDescription]:
        topology = self.plan.topology
        everybody = [bucket.slots(topology.seen_from(rank)) for rank in range(topology.size)]
        members = tuple((d.path, d.length) for d in bucket.descriptions)
        for index, slot in enumerate(bucket.slots(topology)):
            if slot.shape:
                owners = sum(slots[index].shape[0] for slots in everybody) // bucket.length
                yield StateDescription(
                    name=slot.name, members=members, offset=slot.offset, owners=owners
                )
            else:
                yield StateDescription(name=slot.name, members=members, scalar=True)

    @property
    def has_flushed(self) -> bool:
        """Whether all that schemes had kept has been sent since `flush`."""
        pairs = zip(self.plan.buckets, self.states, strict=True)
        return all(
            bucket.scheme.has_flushed(tuple(map(tf.convert_to_tensor, state)))
            for bucket, state in pairs
        )

    def flush(self) -> None:
        """Makes all exchanges from now on send everything, what schemes have kept included."""
        for bucket, variables in zip(self.plan.buckets, self.states, strict=True):
            state = bucket.scheme.flushing(
                tuple(tf.convert_to_tensor(variable) for variable in variables)
            )
            for variable, value in zip(variables, state, strict=True):
                variable.assign(value)

    def _state(self, index: int, rescale: tf.Tensor | None) -> State:
        state = tuple(tf.convert_to_tensor(variable) for variable in self.states[index])
        if not state or rescale is None:
            return state
        # Rarely another factor than 1, which would be one more pass over memory.
        scheme = self.plan.buckets[index].scheme
        return tf.cond(rescale == 1.0, lambda: state, lambda: scheme.rescaled(state, rescale))

    @tf.function(autograph=False)
    def contribute_nothing(self, number: int = 0) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Takes part in one exchange with zeros, for a rank that is out of data.

        Args:
          number: Index of the exchange among the `calls` of a step.

        Returns:
          How many ranks are absent like this one, and what has to be fetched with it: TensorFlow
          leaves out a collective whose result nobody uses, even as a control dependency.
        """
        return self.contribute_nothing_eagerly(number)

    def contribute_nothing_eagerly(self, number: int = 0) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Does as `contribute_nothing` for steps that run eagerly, whose collectives match only eager ones.

        Args:
          number: Index of the exchange among the `calls` of a step.

        Returns:
          The same as `contribute_nothing`.
        """
        nothing = [None] * len(self._descriptions())
        with numbered_names(number):
            absent = self.presence(nothing, 0.0, has_batch=False).absent
            means, _ = self.exchange(nothing, None)
            if self.afterwards is not None:
                means = self.afterwards(means)
        return absent, [tf.reduce_sum(mean) for mean in means]

    def _flatten(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor:
        zero = self._zeros[bucket.dtype]
        pairs = zip(bucket.members, bucket.descriptions, strict=True)
        parts = [tf.reshape(dense(gradients[member], d, zero), [-1]) for member, d in pairs]
        vector = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        # Gradients of linear losses are constants, on some ranks or on all.
        return opaque(vector, self._zeros["int32"])

    def _descriptions(self) -> list[Description]:
        pairs = [
            (m, d)
            for b in self.plan.buckets
            for m, d in zip(b.members, b.descriptions, strict=True)
        ]
        return [description for _, description in sorted(pairs, key=lambda pair: pair[0])]


def _had_gradient(count: int) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(tf.zeros([count]), trainable=False, name="seen")


def _variable(slot: Slot, bucket: int) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(
            tf.zeros(slot.shape), trainable=False, name=f"bucket_{bucket}_{slot.name}"
        )


def _rows(buckets: int) -> tf.Variable:
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(tf.zeros([buckets]), trainable=False, name="rows")


def _weighted(vector: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    # With equal batches the weight is exactly 1, and the vector need not pass through memory again.
    # No samples, no say: a mean over an empty batch is not a number.
    return tf.cond(
        weight == 1.0,
        lambda: vector,
        lambda: tf.where(
            weight > 0.0, vector * tf.cast(weight, vector.dtype), tf.zeros_like(vector)
        ),
    )


def _split(vector: tf.Tensor, descriptions: Sequence[Description]) -> list[tf.Tensor]:
    parts = (
        tf.split(vector, [d.length for d in descriptions]) if len(descriptions) > 1 else [vector]
    )
    return [tf.reshape(part, d.shape) for part, d in zip(parts, descriptions, strict=True)]
