"""Shards of variables on each rank, and the optimizer state for them.

The inner optimizer is built on shards in place of variables, without special support: shards have
their variables' names, norms and finiteness are those of whole gradients, and the state is saved
and loaded as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.wire import Wire, Zeros, exchange_objects, zeros
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.means import Means
from tfposeidon.exchange.plan import Bucket
from tfposeidon.gradients import (
    describe,
    distinct_paths,
    is_overwritten,
    of_tensorflow,
)
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer
from tfposeidon.optimizers.wrapper import innermost
from tfposeidon.schemes import Scheme
from tfposeidon.sharded.scheme import OwnParts, clip_by_whole_norms, sharded_norms
from tfposeidon.state.placement import Placement, StateDescription


class _ShardSlot(NamedTuple):
    """Optimizer state of one shard: `name` as the optimizer requested it, such as "momentum".

    `variable` has the shard's length, and `member` is the index of the shard's variable.
    """

    name: str
    variable: keras.Variable
    member: int

    def index_in(self, optimizer: Any) -> int:
        """Returns its index in the optimizer's variables, which is its key in Keras's files."""
        return next(
            index for index, variable in enumerate(optimizer.variables) if variable is self.variable
        )


class Shard(keras.Variable):
    """A part of a variable, with the variable's name.

    Optimizers derive the names of their state, and exclusions from weight decay, from it.
    """

    def __init__(self, whole: Any, length: int) -> None:
        self.whole = whole
        # Keras sanitizes the names of TensorFlow variables in this way.
        self._whole_path = describe(whole).path.replace(":", "_")
        dtype = keras.backend.standardize_dtype(whole.dtype)
        super().__init__(
            tf.zeros([length], dtype),
            dtype=dtype,
            trainable=True,
            # Keras refuses slashes in names; TensorFlow's are such as "scope/kernel:0".
            name=whole.name.partition(":")[0].rpartition("/")[2],
        )

    @property
    @override
    def path(self) -> str:
        return self._whole_path


class Shards:
    """Shards of variables that this rank updates.

    The inner optimizer is built on and applied to `targets`: shards, and whole variables for other
    schemes than `OwnParts`, in the order of `variables`.
    """

    def __init__(self, exchanger: Exchanger, variables: Sequence[Any]) -> None:
        self._exchanger = exchanger
        self._variables = variables
        self._buckets = [
            (index, bucket, bucket.scheme)
            for index, bucket in enumerate(exchanger.plan.buckets)
            if isinstance(bucket.scheme, OwnParts)
        ]
        self._zeros, self._sinks = Zeros(), Zeros()
        for _, bucket, _ in self._buckets:
            self._zeros[bucket.dtype], self._sinks[bucket.dtype]
        # Collectives after each exchange, a new object whenever they change.
        self.afterwards: Afterwards = self._contribute_nothing
        self._parts = self._parts_of(exchanger.wire.topology.rank)
        # Where a rank owns no part of a variable it has a single zero, which can be clipped and
        # decayed like any value, and can carry a NaN that another rank has found.
        with tf.init_scope():
            shards = {
                m: Shard(variables[m], max(1, end - begin))
                for m, (begin, end) in self._parts.items()
            }
        self.targets = [shards.get(member, variable) for member, variable in enumerate(variables)]
        self._slots: list[_ShardSlot] = []
        self._gathered: tuple[int, dict[int, np.ndarray]] | None = None
        self._loaded: dict[int, np.ndarray] = {}
        self._loaded_at = 0

    @property
    def has_any(self) -> bool:
        """True if any variable is sharded."""
        return bool(self._parts)

    def build(self, inner_optimizer: Any) -> None:
        """Builds the unbuilt inner optimizer on shards, and redirects saving and loading."""
        self._updater, self._inner = inner_optimizer, innermost(inner_optimizer)
        self._exclude_from_weight_decay()
        with self._recording_slots():
            inner_optimizer.build(self.targets)
        # Override the methods on the instance: Keras saves and loads nested optimizers separately,
        # and calls those of the unwrapped optimizer directly.
        self._load_whole = self._inner.load_own_variables
        self._inner.save_own_variables = self._save
        self._inner.load_own_variables = self._load

    def use(self, updater: Any) -> None:
        """Sets the optimizer that applies means from now on: a loss scale, or the inner one."""
        if updater is not self._updater:
            self._updater = updater
            self.afterwards = functools.partial(self._contribute_nothing)

    @property
    def rank_state(self) -> Iterator[tuple[Any, StateDescription]]:
        """Variables with state of this rank's shards, with descriptions."""
        descriptions = [describe(variable) for variable in self._variables]
        paths = distinct_paths(descriptions)
        for slot in self._slots:
            begin, end = self._parts[slot.member]
            length = descriptions[slot.member].length
            # The single zero of a rank without a part covers no element of the variable.
            offset = begin if begin < end else length
            members = ((paths[slot.member], length),)
            yield (
                slot.variable,
                StateDescription(
                    name=slot.name,
                    members=members,
                    placement=Placement.SHARDED,
                    offset=offset,
                    owners=1,
                ),
            )

    def without_slots(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the inner optimizer's variables that are equal on all ranks."""
        own = {id(slot.variable) for slot in self._slots}
        return [variable for variable in variables if id(variable) not in own]

    def received(self, means: Sequence[Any]) -> list[Any]:
        """Converts means to the form that the inner optimizer accepts.

        Results are dense: vectors for shards, `[1]` zeros without a part, `None` without a
        gradient. They are clipped by norms of whole gradients, and NaN if any rank has found values
        that are not finite.
        """
        found = [None if mean is None else tf.convert_to_tensor(mean) for mean in means]
        for member, (begin, end) in self._parts.items():
            mean = found[member]
            if mean is None:
                continue
            if begin < end:
                found[member] = tf.reshape(mean, [-1])
            else:
                dtype = mean.dtype.name
                # TensorFlow prunes a collective whose result is unused, as on a rank that owns no
                # part of a bucket; the other ranks would wait for it.
                self._sinks[dtype].assign(tf.reduce_sum(mean))
                found[member] = zeros([1], self._zeros[dtype])
        return self._clipped(found)

    def _clipped(self, means: list[Any]) -> list[Any]:
        served = [member for member in self._parts if means[member] is not None]
        name = f"{self._exchanger.prefix}.norms"
        wire = self._exchanger.wire
        values = [m for m, v in enumerate(self._variables) if is_overwritten(v)]
        clipped = clip_by_whole_norms(
            [None if m in values else mean for m, mean in enumerate(means)],
            *(served, self._updater, wire, name),
        )
        return [means[m] if m in values else mean for m, mean in enumerate(clipped)]

    def apply(self, means: Means) -> None:
        """Applies the inner optimizer to shards and whole variables, and gathers the new values."""
        self._loaded = {}
        self._refresh()
        # Means clipped by norms of whole gradients must not be clipped by norms of parts again.
        with _set_to_none(self._inner, "clipnorm", "global_clipnorm"):
            means.update(lambda found: self._updater.apply(found, self.targets))
        # Runs for dropped updates, too: ranks with exhausted input join this all-gather.
        updated = {member for member, mean in enumerate(means.values) if mean is not None}
        self._pull(updated, means.everybody)

    def refreshed(self) -> list[Any]:
        """Copies the current values of the variables to the targets, and returns the targets."""
        self._refresh()
        return self.targets

    def choose_norms(
        self, optimizer: Any, variables: Sequence[Any], wire: Wire, prefix: str
    ) -> parallel_operator.NormMethod:
        """Returns the method for layer norms of sharded variables; see `parallel_operator`."""
        if not self._parts or wire.topology.size == 1:
            return parallel_operator.choose_norms(optimizer, variables, wire, prefix)
        if not isinstance(self._inner, LayerWiseOptimizer):
            return parallel_operator.NormMethod()
        return parallel_operator.NormMethod(
            sharded_norms(wire, self._is_served, f"{prefix}.norms_of_layers"),
            "norms of layers: the ranks sum the squared norms of their shards",
        )

    def _is_served(self, variable: Any) -> bool:
        return any(of_tensorflow(self.targets[member]) is variable for member in self._parts)

    def finalize(self) -> None:
        """Ends `fit` like the inner optimizer: `use_ema` replaces variables by their averages."""
        self._inner.finalize_variable_values(self.targets)
        self._pull(constrained=set())

    def _refresh(self) -> None:
        """Copies the values of the variables, which callbacks or loading may have changed."""
        for member, (begin, end) in self._parts.items():
            if begin < end:
                flat = tf.reshape(tf.convert_to_tensor(self._variables[member]), [-1])
                self.targets[member].assign(flat[begin:end])

    def _pull(self, constrained: set[int], counts: tf.Tensor | None = None) -> None:
        """Assigns the gathered values of all parts to the variables.

        Constraints apply to the variables in `constrained`, unless `counts` (a bool scalar) is
        False because this step's update was dropped.
        """
        for index, bucket, scheme in self._buckets:
            pulled = self._gather_bucket(index, bucket, scheme)
            for member, value in zip(bucket.members, pulled, strict=True):
                variable = self._variables[member]
                value = tf.cast(value, variable.dtype)
                # On whole variables: a constraint may use norms of the variable.
                constraint = variable.constraint if member in constrained else None
                variable.assign(_constrained(value, constraint, counts))

    def _gather_bucket(self, index: int, bucket: Bucket, scheme: OwnParts) -> list[tf.Tensor]:
        parts = [self._parts[member] for member in bucket.members]
        own = [
            tf.cast(self.targets[member], bucket.dtype)
            for member, (begin, end) in zip(bucket.members, parts, strict=True)
            # The others are single zeros; see `received`.
            if begin < end
        ]
        vector = zeros([0], self._zeros[bucket.dtype])
        if own:
            vector = tf.concat(own, 0)
        wire, name = self._exchanger.wire, f"{self._exchanger.prefix}.bucket_{index}"
        whole = scheme.gather(vector, bucket.length, wire, name)
        # In the same way as other schemes unpack their results.
        return Scheme.unpack(scheme, whole, bucket.descriptions, wire.topology)

    def _contribute_nothing(self, means: list[Any]) -> list[Any]:
        """Joins the other ranks' collectives after the exchange, and leaves values unchanged."""
        means = self.received(means)
        self._refresh()
        self._pull(constrained=set())
        return means

    def gather_state(self, rank: int) -> None:
        """Gathers the state on one rank, which can save it until the next step; collective."""
        whole = {}
        saves = self._exchanger.wire.topology.rank == rank
        for number, slot in enumerate(self._slots):
            value = self._gather(slot, f"tp.gather_state_{number}")
            if saves:
                whole[slot.index_in(self._inner)] = value
        self._gathered = (self._step(), whole) if saves else None

    def scatter_state(self, rank: int) -> None:
        """Distributes state that one rank has loaded, if any, to its owners; collective."""
        wire = self._exchanger.wire
        # Later steps have moved on from it.
        is_loaded = bool(self._loaded) and self._loaded_at == self._step()
        # Only that rank knows, and all ranks must take the same branch.
        if not exchange_objects(is_loaded, wire, "tp.scatter_state")[rank]:
            return
        for number, slot in enumerate(self._slots):
            whole = self._loaded.get(slot.index_in(self._inner))
            if whole is None:
                # Only the root's values matter in a broadcast; other ranks supply the shape.
                whole = np.zeros(self._variables[slot.member].shape)
            dtype = tf.float32 if slot.variable.dtype == "bfloat16" else slot.variable.dtype
            flat = wire.broadcast(
                tf.reshape(tf.cast(whole, dtype), [-1]), rank, f"tp.scatter_state_{number}"
            )
            begin, end = self._parts[slot.member]
            if begin < end:
                slot.variable.assign(flat[begin:end])
        self._loaded = {}

    def _gather(self, slot: _ShardSlot, name: str) -> np.ndarray:
        topology = self._exchanger.wire.topology
        begin, end = self._parts[slot.member]
        # Without the single zero of a rank that owns no part.
        own = tf.convert_to_tensor(slot.variable)[: end - begin]
        # Horovod does not support bfloat16; float32 represents all of its values.
        own = tf.cast(own, tf.float32) if own.dtype == tf.bfloat16 else own
        joined = self._exchanger.wire.all_gather(own, topology.world, name).numpy()
        parts = [self._parts_of(rank)[slot.member] for rank in range(topology.size)]
        ends = np.cumsum([end - begin for begin, end in parts])
        whole = np.empty(joined.size, joined.dtype)
        for (begin, end), last in zip(parts, ends, strict=True):
            whole[begin:end] = joined[last - (end - begin) : last]
        return whole.reshape(self._variables[slot.member].shape)

    def _save(self, store: Any) -> None:
        if self._exchanger.wire.topology.size == 1:
            self.gather_state(0)
        if self._gathered is None or self._gathered[0] != self._step():
            gathered = (
                f"gathered at step {self._gathered[0]}"
                if self._gathered
                else "not gathered on this rank"
            )
            raise RuntimeError(
                "The sharded optimizer state must be gathered before it is saved. Received: "
                f"saving at step {self._step()}, {gathered}. Call optimizer.gather_state() on all "
                "ranks, pass keras_callbacks.GatherState() to fit before the callback that "
                "saves, or save with keras_callbacks.Checkpoint, which needs no gathering."
            )
        whole = self._gathered[1]
        for index, variable in enumerate(self._inner.variables):
            store[str(index)] = whole[index] if index in whole else variable.numpy()

    def _load(self, store: Any) -> None:
        # Keras passes a group of its file, which is not a mapping.
        arrays = {key: store[key] for key in store.keys()}  # noqa: SIM118
        for slot in self._slots:
            index = slot.index_in(self._inner)
            if str(index) in arrays:
                begin, end = self._parts[slot.member]
                # Retained for `scatter_state`, until the first step: it may be called on this rank.
                self._loaded[index] = np.asarray(arrays[str(index)])
                flat = self._loaded[index].reshape(-1)
                arrays[str(index)] = flat[begin:end] if begin < end else slot.variable.numpy()
        self._load_whole(arrays)
        self._loaded_at = self._step()

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
        """Excludes shards from weight decay if their variable is excluded, also by name."""
        # Queried with TensorFlow's variable: its name, unlike Keras's, contains the layer.
        excluded = [
            (variable, target)
            for variable, target in zip(self._variables, self.targets, strict=True)
            if not self._inner._use_weight_decay(of_tensorflow(variable))
        ]
        if excluded:
            self._inner.exclude_from_weight_decay(var_list=[v for pair in excluded for v in pair])

    @contextmanager
    def _recording_slots(self) -> Iterator[None]:
        """Records the optimizer's variables for shards, which do not reveal their origin later."""
        members = {
            id(target): member
            for member, target in enumerate(self.targets)
            if member in self._parts
        }
        make = self._inner.add_variable_from_reference

        def record(reference_variable: Any, name: str | None = None, **options: Any) -> Any:
            variable = make(reference_variable, name=name, **options)
            if id(reference_variable) in members:
                self._slots.append(
                    _ShardSlot(name or "state", variable, members[id(reference_variable)])
                )
            return variable

        self._inner.add_variable_from_reference = record
        try:
            yield
        finally:
            self._inner.add_variable_from_reference = make


@contextmanager
def _set_to_none(target: Any, *names: str) -> Iterator[None]:
    before = {name: getattr(target, name) for name in names}
    try:
        for name in names:
            setattr(target, name, None)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _constrained(value: tf.Tensor, constraint: Any, counts: tf.Tensor | None) -> tf.Tensor:
    """Applies a constraint, unless the update was dropped.

    Ranks with exhausted input apply none in such a step, and applying it twice may change bits.
    """
    if constraint is None:
        return value
    if counts is None:
        return constraint(value)
    return tf.cond(counts, lambda: tf.cast(constraint(value), value.dtype), lambda: value)
