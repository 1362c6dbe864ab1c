"""Holds a rank's shards of variables, with optimizer state, and gathers updated variables.

The inner optimizer is built on shards instead of variables, and needs no special support: a shard
has the name of its variable, norms and finiteness are computed over whole gradients, and the state
is saved and loaded as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.wire import Wire, Zeros, exchange_objects, pack, summed_dtype, zeros
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.means import Means
from tfposeidon.gradients import describe, distinct_paths, is_overwritten, of_tensorflow
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer
from tfposeidon.optimizers.wrapper import innermost
from tfposeidon.schemes import Scheme
from tfposeidon.schemes.stages import Levels
from tfposeidon.sharded.scheme import OwnParts, clip_by_whole_norms, sharded_norms
from tfposeidon.state.placement import Placement, StateDescription


class _ShardState(NamedTuple):
    """State of a shard, with a name such as "momentum"; `member` is the variable's index."""

    name: str
    variable: keras.Variable
    member: int

    def index_in(self, optimizer: Any) -> int:
        """Returns the index in the optimizer's variables, which is the key in Keras's files."""
        return next(i for i, v in enumerate(optimizer.variables) if v is self.variable)


class Shard(keras.Variable):
    """A part of a variable, with the variable's name."""

    def __init__(self, whole: Any, length: int) -> None:
        # Layer-wise optimizers exclude variables by the shape of the whole variable.
        self.whole = whole
        # Optimizers derive names of state from the path. Keras replaces colons in names of
        # TensorFlow variables in the same way.
        self._whole_path = describe(whole).path.replace(":", "_")
        dtype = keras.backend.standardize_dtype(whole.dtype)
        super().__init__(
            tf.zeros([length], dtype),
            dtype=dtype,
            trainable=True,
            # Keras refuses slashes in names, but TensorFlow has names such as "scope/kernel:0".
            name=whole.name.partition(":")[0].rpartition("/")[2],
        )

    @property
    @override
    def path(self) -> str:
        return self._whole_path


class Shards:
    """Shards of variables that this rank updates; the inner optimizer is built on `targets`."""

    def __init__(self, exchanger: Exchanger, variables: Sequence[Any]) -> None:
        self._exchanger, self._variables = exchanger, variables
        self._buckets = [
            (index, bucket, bucket.scheme)
            for index, bucket in enumerate(exchanger.plan.buckets)
            if isinstance(bucket.scheme, OwnParts)
        ]
        self._zeros, self._sinks = Zeros(), Zeros()
        for _, bucket, _ in self._buckets:
            self._zeros[bucket.dtype], self._sinks[bucket.dtype]
        self._afterwards: Afterwards = self._contribute_nothing
        # Ranges of sharded variables that this rank owns, by index.
        self.parts = self._parts_of(exchanger.wire.topology.rank)
        # A rank without a part of a variable has a single zero instead. The optimizer can clip and
        # decay the zero like any value, and NaN can replace it if another rank has found NaN.
        with tf.init_scope():
            shards = {
                m: Shard(variables[m], max(1, end - begin))
                for m, (begin, end) in self.parts.items()
            }
        # Variables whose scheme is not `OwnParts` are whole.
        self.targets = [shards.get(member, variable) for member, variable in enumerate(variables)]
        self.states: list[_ShardState] = []
        # The whole state of one step, by index in the optimizer's variables, if it was gathered or
        # loaded on this rank.
        self._whole: tuple[int, dict[int, np.ndarray]] = (0, {})

    def build(self, inner_optimizer: Any) -> None:
        self._updater, self._inner = inner_optimizer, innermost(inner_optimizer)
        self._exclude_from_weight_decay()
        members = {id(self.targets[member]): member for member in self.parts}
        make = self._inner.add_variable_from_reference

        # Record the shard of each state variable, because the variable has no reference to it.
        def record(reference_variable: Any, name: str | None = None, **options: Any) -> Any:
            variable = make(reference_variable, name=name, **options)
            if id(reference_variable) in members:
                member = members[id(reference_variable)]
                self.states.append(_ShardState(name or "state", variable, member))
            return variable

        self._inner.add_variable_from_reference = record
        try:
            inner_optimizer.build(self.targets)
        finally:
            self._inner.add_variable_from_reference = make
        # Override the methods on the instance: Keras saves and loads nested optimizers separately,
        # and calls the unwrapped optimizer's methods directly.
        self._load_whole = self._inner.load_own_variables
        self._inner.save_own_variables = self._save
        self._inner.load_own_variables = self._load

    def use(self, updater: Any) -> Afterwards:
        """Sets the optimizer that applies gradients; returns how a rank without data joins."""
        if updater is not self._updater:
            self._updater = updater
            # Return another function, so that the rank without data traces its part again.
            self._afterwards = functools.partial(self._contribute_nothing)
        return self._afterwards

    @property
    def rank_state(self) -> Iterator[tuple[Any, StateDescription]]:
        descriptions = [describe(variable) for variable in self._variables]
        paths = distinct_paths(descriptions)
        for state in self.states:
            begin, end = self.parts[state.member]
            length = descriptions[state.member].length
            description = StateDescription(
                name=state.name,
                members=((paths[state.member], length),),
                placement=Placement.SHARDED,
                # The single zero of a rank without a part covers no element of the variable.
                offset=begin if begin < end else length,
                owners=1,
            )
            yield state.variable, description

    def received(self, means: Sequence[Any]) -> list[Any]:
        """Converts averaged gradients to dense, clipped gradients for the inner optimizer.

        Each result is a vector for a shard, a `[1]` zero if the rank owns no part, or `None` if
        there is no gradient.
        """
        found: list[Any] = [None if mean is None else tf.convert_to_tensor(mean) for mean in means]
        sharded = [member for member in self.parts if found[member] is not None]
        for member in sharded:
            mean = found[member]
            if self.parts[member] != (0, 0):
                found[member] = tf.reshape(mean, [-1])
            else:
                dtype = mean.dtype.name
                # Use the result, because TensorFlow would prune the collective on a rank that owns
                # no part of a bucket, and the other ranks would wait for it.
                self._sinks[dtype].assign(tf.reduce_sum(mean))
                found[member] = zeros([1], self._zeros[dtype])
        gradients = {
            member: mean
            for member, (mean, variable) in enumerate(zip(found, self._variables, strict=True))
            if mean is not None and not is_overwritten(variable)
        }
        wire, name = self._exchanger.wire, f"{self._exchanger.prefix}.norms"
        clipped = clip_by_whole_norms(gradients, sharded, self._updater, wire, name)
        return [clipped.get(member, mean) for member, mean in enumerate(found)]

    def apply(self, means: Means) -> None:
        # Release the whole state, because the step makes it invalid.
        self._whole = (0, {})
        self.refresh()
        inner = self._inner
        limits = inner.clipnorm, inner.global_clipnorm
        # Gradients are clipped by whole norms, and must not be clipped again by norms of parts.
        inner.clipnorm = inner.global_clipnorm = None
        try:
            means.update(lambda found: self._updater.apply(found, self.targets))
        finally:
            inner.clipnorm, inner.global_clipnorm = limits
        # Gather after dropped updates, too, because ranks with exhausted input join this
        # all-gather.
        updated = {member for member, mean in enumerate(means.values) if mean is not None}
        self._gather_variables(updated, means.everybody)

    def choose_norms(
        self, optimizer: Any, variables: Sequence[Any], wire: Wire, prefix: str
    ) -> parallel_operator.NormMethod:
        """Returns the method for layer norms of sharded variables; see `parallel_operator`."""
        if not self.parts or wire.topology.size == 1:
            return parallel_operator.choose_norms(optimizer, variables, wire, prefix)
        if not isinstance(self._inner, LayerWiseOptimizer):
            return parallel_operator.NormMethod()
        shards = {id(of_tensorflow(self.targets[member])) for member in self.parts}
        return parallel_operator.NormMethod(
            sharded_norms(wire, lambda v: id(v) in shards, f"{prefix}.norms_of_layers"),
            "norms of layers: the ranks sum the squared norms of their shards",
        )

    def finalize(self) -> None:
        self._inner.finalize_variable_values(self.targets)
        self._gather_variables(constrained=set())

    def refresh(self) -> None:
        for member, (begin, end) in self.parts.items():
            if begin < end:
                flat = tf.reshape(tf.convert_to_tensor(self._variables[member]), [-1])
                self.targets[member].assign(flat[begin:end])

    def _gather_variables(self, constrained: set[int], counts: tf.Tensor | None = None) -> None:
        """Assigns the gathered values to the variables; `counts` is False for a dropped update."""
        wire = self._exchanger.wire
        for index, bucket, scheme in self._buckets:
            # Leave out targets without a part, which are single zeros.
            own = [
                tf.cast(self.targets[member], bucket.dtype)
                for member in bucket.members
                if self.parts[member] != (0, 0)
            ]
            vector = tf.concat(own, 0) if own else zeros([0], self._zeros[bucket.dtype])
            name = f"{self._exchanger.prefix}.bucket_{index}"
            whole = Levels(bucket.length, wire.topology).gather(vector, wire, name, None)
            # Call the method of `Scheme`, because `OwnParts.unpack` returns only this rank's parts.
            values = Scheme.unpack(scheme, whole, bucket.descriptions, wire.topology)
            for member, value in zip(bucket.members, values, strict=True):
                variable = self._variables[member]
                value = tf.cast(value, variable.dtype)
                # Constrain whole variables, because a constraint may use norms of the variable.
                constraint = variable.constraint if member in constrained else None
                variable.assign(_constrained(value, constraint, counts))

    def _contribute_nothing(self, means: list[Any]) -> list[Any]:
        """Joins the other ranks' collectives after the exchange, without changing any values."""
        means = self.received(means)
        self.refresh()
        self._gather_variables(constrained=set())
        return means

    def gather_state(self, rank: int) -> None:
        whole = {}
        for number, state in enumerate(self.states):
            value = self._gather(state, f"tp.gather_state_{number}")
            if self._exchanger.wire.topology.rank == rank:
                whole[state.index_in(self._inner)] = value
        self._whole = self._step(), whole

    def scatter_state(self, rank: int) -> None:
        wire, whole = self._exchanger.wire, self._current_whole()
        # All ranks must take the same branch, but only one of them has loaded the state.
        if not exchange_objects(bool(whole), wire, "tp.scatter_state")[rank]:
            return
        for number, state in enumerate(self.states):
            # A broadcast ignores the values of the other ranks, which supply the shape.
            others = np.zeros(self._variables[state.member].shape)
            value = whole.get(state.index_in(self._inner), others)
            own = pack([value], summed_dtype([state.variable]))
            flat = wire.broadcast(own, rank, f"tp.scatter_state_{number}")
            begin, end = self.parts[state.member]
            if begin < end:
                state.variable.assign(flat[begin:end])
        self._whole = (0, {})

    def _current_whole(self) -> dict[int, np.ndarray]:
        """Returns the whole state, if this rank has it; ignores state that steps have replaced."""
        step, whole = self._whole
        return whole if step == self._step() else {}

    def _gather(self, state: _ShardState, name: str) -> np.ndarray:
        topology = self._exchanger.wire.topology
        begin, end = self.parts[state.member]
        # Convert bfloat16, which Horovod does not support. Leave out the zero of a missing part.
        own = pack([state.variable], summed_dtype([state.variable]))[: end - begin]
        joined = self._exchanger.wire.all_gather(own, topology.world, name).numpy()
        parts = [self._parts_of(rank)[state.member] for rank in range(topology.size)]
        pieces = np.split(joined, np.cumsum([end - begin for begin, end in parts])[:-1])
        in_order = [pieces[rank] for rank in sorted(range(topology.size), key=parts.__getitem__)]
        return np.concatenate(in_order).reshape(self._variables[state.member].shape)

    def _save(self, store: Any) -> None:
        if self._exchanger.wire.topology.size == 1:
            self.gather_state(0)
        whole = self._current_whole()
        if len(whole) < len(self.states):
            raise RuntimeError(
                "The sharded optimizer state must be gathered before it is saved. Received: saving "
                f"at step {self._step()}, whose state was not gathered on this rank. Call "
                "optimizer.gather_state() on all ranks, pass keras_callbacks.GatherState() to fit "
                "before the callback that saves, or save with keras_callbacks.Checkpoint, which "
                "needs no gathering."
            )
        for index, variable in enumerate(self._inner.variables):
            store[str(index)] = whole[index] if index in whole else variable.numpy()

    def _load(self, store: Any) -> None:
        # Keras passes a group of its file, which is not a mapping.
        arrays = {key: store[key] for key in store.keys()}  # noqa: SIM118
        whole = {}
        for state in self.states:
            index = state.index_in(self._inner)
            if str(index) in arrays:
                begin, end = self.parts[state.member]
                whole[index] = np.asarray(arrays[str(index)])
                flat = whole[index].reshape(-1)
                arrays[str(index)] = flat[begin:end] if begin < end else state.variable.numpy()
        self._load_whole(arrays)
        # Retain the state until the first step, because `scatter_state` may send it.
        self._whole = self._step(), whole

    def _step(self) -> int:
        return int(self._inner.iterations.numpy())

    def _parts_of(self, rank: int) -> dict[int, tuple[int, int]]:
        topology = self._exchanger.wire.topology.seen_from(rank)
        return {
            member: part
            for _, bucket, scheme in self._buckets
            for member, part in zip(
                bucket.members, scheme.parts(bucket.descriptions, topology), strict=True
            )
        }

    def _exclude_from_weight_decay(self) -> None:
        excluded = []
        for variable, target in zip(self._variables, self.targets, strict=True):
            # Query with TensorFlow's variable, because its name also contains the layer's name.
            if not self._inner._use_weight_decay(of_tensorflow(variable)):
                excluded += [variable, target]
        # Exclude all of them in one call, because each call replaces the list.
        if excluded:
            self._inner.exclude_from_weight_decay(var_list=excluded)


def _constrained(value: tf.Tensor, constraint: Any, counts: tf.Tensor | None) -> tf.Tensor:
    if constraint is None or counts is None:
        return value if constraint is None else constraint(value)
    # In a dropped step, ranks with exhausted input apply no constraint, and applying a constraint
    # twice may change bits.
    return tf.cond(counts, lambda: tf.cast(constraint(value), value.dtype), lambda: value)
