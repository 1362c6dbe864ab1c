"""What a rank keeps as the server of its shards (Poseidon, section 4.1): optimizer state for these alone.

The inner optimizer is built on shards in place of variables. It may not find out: shards have the names of their
variables, norms and non-finite values are those of whole gradients, and the state is saved and loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfposeidon import whole_gradients
from tfposeidon.exchanger import Exchanger
from tfposeidon.gradient import describe
from tfposeidon.guards import innermost
from tfposeidon.rank_state import Piece


class _Slot(NamedTuple):
    """State that the optimizer keeps for one shard."""

    name: str
    variable: keras.Variable
    member: int


class Shard(keras.Variable):
    """A part of a variable, under the variable's name, by which optimizers call their state and exclude from decay."""

    def __init__(self, whole: Any, length: int) -> None:
        # As Keras sanitises names of TensorFlow's variables.
        self._whole_path = describe(whole).path.replace(":", "_")
        dtype = keras.backend.standardize_dtype(whole.dtype)
        super().__init__(tf.zeros([length], dtype), dtype=dtype, trainable=True, name=whole.name.partition(":")[0])

    @property
    def path(self) -> str:
        return self._whole_path


class ServerShards:
    """This rank's shards of the variables that are updated at their servers.

    Args:
      exchanger: Of all variables that the optimizer trains.
      variables: These; what the plan does not give to servers stays whole.

    Attributes:
      targets: What the inner optimizer is to be built on and applied to: shards, and variables that stay whole.
    """

    def __init__(self, exchanger: Exchanger, variables: Sequence[Any]) -> None:
        self._exchanger = exchanger
        self._variables = variables
        self._buckets = [bucket for bucket in exchanger.plan.buckets if bucket.server]
        self._parts = self._parts_of(exchanger.wire.topology.rank)
        # Where a rank serves nothing of a variable it has one zero: it can be clipped, decayed, and shown a NaN.
        with tf.init_scope():
            shards = {m: Shard(variables[m], max(1, end - begin)) for m, (begin, end) in self._parts.items()}
        self.targets = [shards.get(member, variable) for member, variable in enumerate(variables)]
        self._slots: list[_Slot] = []
        self._gathered: tuple[int, dict[int, np.ndarray]] | None = None

    def build(self, inner_optimizer: Any) -> None:
        """Builds the inner optimizer on shards, and has its state saved and loaded whole."""
        self._inner = innermost(inner_optimizer)
        self._exclude_from_weight_decay()
        with self._noting_slots():
            inner_optimizer.build(self.targets)
        # Keras asks each optimizer for itself.
        self._load_whole = self._inner.load_own_variables
        self._inner.save_own_variables = self._save
        self._inner.load_own_variables = self._load
        # For replicas of tf.distribute, which is refused; it would have the first pull wait for the last push.
        self._inner._all_reduce_sum_gradients = list

    @property
    def rank_state(self) -> Iterator[tuple[Any, Piece]]:
        """State of this rank's shards, and what each variable of it is."""
        for slot in self._slots:
            begin, end = self._parts[slot.member]
            whole = self._variables[slot.member]
            description = describe(whole)
            # What stands for nothing lies behind the end.
            offset = begin if begin < end else description.length
            members = ((description.path, description.length),)
            yield slot.variable, Piece(name=slot.name, members=members, offset=offset, holders=1)

    def without_slots(self, variables: Sequence[Any]) -> list[Any]:
        """Those of the inner optimizer's variables that are equal on all ranks."""
        own = {id(slot.variable) for slot in self._slots}
        return [variable for variable in variables if id(variable) not in own]

    def completed(self, means: list[Any], inner_optimizer: Any) -> list[Any]:
        """Gradients as the inner optimizer may see them, which knows only a part of some.

        Args:
          means: As `Exchanger.exchange` returns them.
        """
        served = [member for member in self._parts if means[member] is not None]
        return whole_gradients.completed(
            means, served, inner_optimizer, self._exchanger.wire, f"{self._exchanger.prefix}.norms"
        )

    def own_parts(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients as `Exchanger.exchange` returns them, where there is but one rank and nothing to exchange."""
        parts = list(gradients)
        for place in self._parts:
            if parts[place] is not None:
                parts[place] = tf.reshape(tf.convert_to_tensor(parts[place]), [-1])
        return parts

    def refresh(self) -> None:
        """Takes values from the variables: what callbacks, constraints or loading did to them counts."""
        for member, (begin, end) in self._parts.items():
            if begin < end:
                flat = tf.reshape(tf.convert_to_tensor(self._variables[member]), [-1])
                self.targets[member].assign(flat[begin:end])

    def pull(self) -> None:
        """Gives the variables the values that all servers have for them now."""
        for bucket in self._buckets:
            shards = [tf.convert_to_tensor(self.targets[member]) for member in bucket.members]
            for member, value in zip(bucket.members, self._exchanger.pull(bucket, shards), strict=True):
                variable = self._variables[member]
                value = tf.cast(value, variable.dtype)
                variable.assign(value if variable.constraint is None else variable.constraint(value))

    @tf.function
    def contribute_nothing(self) -> None:
        """Takes part in one pull with values as they are."""
        self.refresh()
        self.pull()

    def gather_state(self, rank: int) -> None:
        """Brings whole state to `rank`, where it can be saved until the next step."""
        places = {id(variable): place for place, variable in enumerate(self._inner.variables)}
        whole = {}
        saves = self._exchanger.wire.topology.rank == rank
        for number, slot in enumerate(self._slots):
            value = self._gather(slot, f"tp.gather_state_{number}")
            if saves:
                whole[places[id(slot.variable)]] = value
        self._gathered = (self._step(), whole) if saves else None

    def _gather(self, slot: _Slot, name: str) -> np.ndarray:
        topology = self._exchanger.wire.topology
        begin, end = self._parts[slot.member]
        own = tf.cast(tf.convert_to_tensor(slot.variable)[: end - begin], tf.float32)
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
            raise RuntimeError(
                "The optimizer's state lies on all ranks, because servers update, and has to be gathered before it is "
                f"saved. Received: saving at step {self._step()}, "
                + (f"gathered at step {self._gathered[0]}. " if self._gathered else "not gathered on this rank. ")
                + "Have all ranks call optimizer.gather_state(), give fit keras_callbacks.GatherState() before what "
                "saves, or save with keras_callbacks.Checkpoint, which needs no gathering."
            )
        whole = self._gathered[1]
        for place, variable in enumerate(self._inner.variables):
            store[str(place)] = whole[place] if place in whole else variable.numpy()

    def _load(self, store: Any) -> None:
        members = {id(slot.variable): slot.member for slot in self._slots}
        arrays = {key: store[key] for key in store.keys()}  # noqa: SIM118 - h5py's groups are no mappings of Keras's
        for place, variable in enumerate(self._inner.variables):
            if id(variable) in members and str(place) in arrays:
                begin, end = self._parts[members[id(variable)]]
                flat = np.asarray(arrays[str(place)]).reshape(-1)
                arrays[str(place)] = flat[begin:end] if begin < end else variable.numpy()
        self._load_whole(arrays)

    def _step(self) -> int:
        return int(self._inner.iterations.numpy())

    def _parts_of(self, rank: int) -> dict[int, tuple[int, int]]:
        topology = self._exchanger.wire.topology.seen_from(rank)
        return {
            member: part
            for bucket in self._buckets
            for member, part in zip(bucket.members, bucket.served_parts(topology), strict=True)
        }

    def _exclude_from_weight_decay(self) -> None:
        """Shards of excluded variables are excluded too; names say so by themselves."""
        excluded: set[Any] = getattr(self._inner, "_exclude_from_weight_decay", set())
        key = self._inner._var_key
        pairs = zip(self._variables, self.targets, strict=True)
        excluded |= {key(target) for variable, target in pairs if key(variable) in excluded}

    @contextmanager
    def _noting_slots(self) -> Iterator[None]:
        """What the optimizer makes for a shard meanwhile is noted: afterwards there is no telling."""
        members = {id(target): member for member, target in enumerate(self.targets) if member in self._parts}
        make = self._inner.add_variable_from_reference

        def note(reference_variable: Any, name: str | None = None, **options: Any) -> Any:
            variable = make(reference_variable, name=name, **options)
            if id(reference_variable) in members:
                self._slots.append(_Slot(name or "state", variable, members[id(reference_variable)]))
            return variable

        self._inner.add_variable_from_reference = note
        try:
            yield
        finally:
            self._inner.add_variable_from_reference = make
