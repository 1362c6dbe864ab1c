"""The one door to Horovod's collectives: four operations on groups of ranks.

Horovod's TensorFlow ops look like arithmetic to Grappler: with a constant input the collective is
folded (runs once, or hangs), an unused one is pruned, two equal ones are merged. So no input may be
a constant (see `zeros`), every output has to be used, and each call has its own name, the same on
every rank. Names are joined by dots, for Horovod cuts off what stands before a slash. No other module
imports Horovod's collectives.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfposeidon.communication import agreement
from tfposeidon.communication.topology import Group, Topology

# Of the names of all collectives that are called, or traced, in a `numbered_names` block.
_suffix = contextvars.ContextVar("suffix", default="")


@contextlib.contextmanager
def numbered_names(number: int) -> Iterator[None]:
    """Names all collectives inside anew: for code that one graph calls several times, from 0.

    TensorFlow would make names unique by itself, but in each branch and on a rank that is out of data in another way.
    """
    token = _suffix.set(f".{number}" if number else "")
    try:
        yield
    finally:
        _suffix.reset(token)


class Wire(Protocol):
    """What schemes exchange over. Groups of one rank send nothing."""

    topology: Topology

    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        """`scale` times the sum over the group; `[n]` -> `[n]`, the same bits on every rank."""
        ...

    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Concatenation along the first axis in the group's order; parts may differ in length."""
        ...

    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        """Sends `splits[i]` of the first axis to the group's rank `i`; returns what came, in the group's order."""
        ...

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """The tensor of the world's rank `root_rank`."""
        ...


class HorovodWire:
    """Horovod's ops: NCCL, MPI or Gloo move the bytes.

    Args:
      topology: The ranks of the job.
      process_sets: Horovod's process set of each group in `topology.groups()`.
    """

    def __init__(self, topology: Topology, process_sets: dict[Group, Any]) -> None:
        self.topology = topology
        self._process_sets = process_sets

    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        if group.size == 1:
            return tensor if scale == 1.0 else tensor * tf.cast(scale, tensor.dtype)
        ops = _horovod_ops()
        return ops._allreduce(
            tensor,
            name=name + _suffix.get(),
            op=ops.Sum,
            postscale_factor=scale,
            ignore_name_scope=True,
            process_set=self._process_set(group),
        )

    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        if group.size == 1:
            return tensor
        return _horovod_ops().allgather(
            tensor,
            name=name + _suffix.get(),
            ignore_name_scope=True,
            process_set=self._process_set(group),
        )

    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        if group.size == 1:
            return tensor
        received, _ = _horovod_ops().alltoall(
            tensor,
            splits=list(splits),
            name=name + _suffix.get(),
            ignore_name_scope=True,
            process_set=self._process_set(group),
        )
        return received

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        if self.topology.size == 1:
            return tensor
        return _horovod_ops().broadcast(
            tensor, root_rank, name=name + _suffix.get(), ignore_name_scope=True
        )

    def _process_set(self, group: Group) -> Any:
        if group == self.topology.world:
            return _horovod_ops().global_process_set
        return self._process_sets[group]


def unknown_zero(dtype: str = "int32") -> tf.Tensor:
    """A scalar 0 of which TensorFlow does not know that it is one: no time is before 1970.

    For functions that may be called in anybody's `tf.function`, which lets nobody make a variable.
    """
    with tf.device("/CPU:0"):
        return tf.cast(tf.timestamp() < 0.0, dtype)


class Zeros(dict[str, tf.Variable]):
    """Scalar variables that hold 0, by dtype, for `zeros` and `opaque`; each is made when it is first asked for.

    TensorFlow traces a function twice whose first trace makes variables: what is traced asks for none that is new.
    """

    def __missing__(self, dtype: str) -> tf.Variable:
        with tf.init_scope():
            self[dtype] = tf.Variable(tf.zeros([], dtype), trainable=False, name="zero")
        return self[dtype]


def zeros(shape: Sequence[int], zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Zeros that TensorFlow cannot fold: a collective on `tf.zeros` runs on no rank, or hangs.

    Args:
      shape: Shape of the result.
      zero: A scalar variable that holds 0, or `unknown_zero`; its dtype is the result's.
    """
    return tf.broadcast_to(tf.convert_to_tensor(zero), shape)


def opaque(tensor: tf.Tensor, zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """The same `[n, ...]` tensor, which TensorFlow can no longer see to be a constant; costs no copy.

    Args:
      zero: A scalar int32 variable that holds 0, or `unknown_zero`.
    """
    # All of it, from a place that only the variable knows. A reshape would not do: where all but one of its
    # dimensions are given, TensorFlow finds the last by itself.
    begin = tf.stack([tf.convert_to_tensor(zero), *([0] * (tensor.shape.rank - 1))])
    return tf.ensure_shape(tf.slice(tensor, begin, [-1] * tensor.shape.rank), tensor.shape)


def exchange_objects(value: Any, wire: Wire, name: str) -> list[Any]:
    """Every rank's `value`, in rank order. Eager; for small things that JSON can hold.

    Raises:
      RuntimeError: On all ranks, if they are not at the same place: eager collectives have no names.
    """
    if wire.topology.size == 1:
        return [value]
    text = json.dumps([name, value]).encode()
    world = wire.topology.world
    lengths = wire.all_gather(tf.constant([len(text)], tf.int64), world, f"{name}.lengths").numpy()
    joined = (
        wire.all_gather(tf.constant(list(text), tf.uint8), world, f"{name}.texts").numpy().tobytes()
    )
    ends = lengths.cumsum()
    pairs = [
        json.loads(joined[end - length : end]) for end, length in zip(ends, lengths, strict=True)
    ]
    agreement.require_equal(
        [name for name, _ in pairs],
        "All ranks must communicate alike",
        "Give every rank the same callbacks, in the same order, and the same number of epochs and "
        "evaluations.",
    )
    return [value for _, value in pairs]


def broadcast_bytes(content: bytes, wire: Wire, root_rank: int, name: str) -> bytes:
    """The `content` of `root_rank`. Eager; every rank may give another length."""
    length = wire.broadcast(tf.constant([len(content)], tf.int64), root_rank, f"{name}.length")
    mine = (
        np.frombuffer(content, np.uint8)
        if wire.topology.rank == root_rank
        else np.zeros(int(length[0]), np.uint8)
    )
    received: bytes = (
        wire.broadcast(tf.constant(mine), root_rank, f"{name}.bytes").numpy().tobytes()
    )
    return received


def _horovod_ops() -> Any:
    # Loaded late: tfposeidon loads models and plans without Horovod, and importing starts nothing.
    from horovod.tensorflow import mpi_ops

    return mpi_ops
