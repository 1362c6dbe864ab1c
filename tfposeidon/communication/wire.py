"""Wire between ranks: the only use of Horovod's collectives, four operations on groups.

Horovod's TensorFlow ops look like arithmetic to Grappler: with a constant input the collective is
folded (runs once, or hangs), an unused one is pruned, two equal ones are merged. So no input may be
a constant (see `zeros`), every output has to be used, and each call has its own name, the same on
every rank. Names are joined by dots, for Horovod cuts off what stands before a slash. No other
module imports Horovod's collectives.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import agreement
from tfposeidon.communication.topology import Group, Topology

_MORE_THAN_A_CONSTANT = 256
"""Elements of a tensor that a function takes as an input; TensorFlow's bound is 128."""

# Ends the names of all collectives that are called, or traced, within `names_ending_in`.
_suffix = contextvars.ContextVar("suffix", default="")


@contextlib.contextmanager
def names_ending_in(suffix: str) -> Iterator[None]:
    """Gives collectives names of their own, within this context, also within another one.

    It is for code that one graph calls several times. TensorFlow would make names unique by itself,
    but in other ways in branches and on ranks that are out of data.
    """
    token = _suffix.set(suffix + _suffix.get())
    try:
        yield
    finally:
        _suffix.reset(token)


class Wire(Protocol):
    """Collectives over which schemes exchange. Groups of one rank send nothing.

    All ranks of a group call each of them with the same name, and must use the result: TensorFlow
    leaves out what nobody uses.

    Attributes:
      topology: Ranks of the job, as this one sees them.
    """

    topology: Topology

    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        """Returns `scale` times the sum over the group, the same bits on every rank.

        Args:
          tensor: Vector, `[n]`, of the same length and dtype on every rank.
          group: Ranks that take part.
          name: Name of the collective.
          scale: Factor on the sum.
        """
        ...

    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Returns the tensors of all ranks along the first axis, in the group's order.

        Args:
          tensor: Tensor, `[m, ...]`; ranks may differ in `m`.
          group: Ranks that take part.
          name: Name of the collective.
        """
        ...

    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        """Sends each rank of the group a part of a tensor, in the group's order.

        Args:
          tensor: Parts one after the other, `[m, ...]`.
          splits: Length along the first axis of the part for each rank of the group; they add up to
            `m`.
          group: Ranks that take part.
          name: Name of the collective.

        Returns:
          `[sum of lengths, ...]` in the same dtype: what each rank of the group has sent to this
          one.
        """
        ...

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """Returns the tensor of one rank on all ranks of the job.

        Args:
          tensor: Tensor of any shape and dtype, both the same on every rank.
          root_rank: Rank whose tensor everybody gets.
          name: Name of the collective.
        """
        ...


class HorovodWire(Wire):
    """Wire over Horovod's ops: NCCL, MPI or Gloo move the bytes.

    Args:
      topology: Ranks of the job, as this one sees them.
      process_sets: Horovod's process set of each group in `topology.groups()`.

    Attributes:
      topology: Ranks of the job, as this one sees them.
    """

    def __init__(self, topology: Topology, process_sets: dict[Group, Any]) -> None:
        self.topology = topology
        self._process_sets = process_sets

    @override
    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        if group.size == 1:
            return tensor if scale == 1.0 else tensor * tf.cast(scale, tensor.dtype)
        # Collectives meet by name, and scopes may differ between ranks, as in branches: all names
        # leave them out.
        ops = _horovod_ops()
        return ops._allreduce(
            tensor,
            name=name + _suffix.get(),
            op=ops.Sum,
            postscale_factor=scale,
            ignore_name_scope=True,
            process_set=self._process_set(group),
        )

    @override
    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        if group.size == 1:
            return tensor
        return _horovod_ops().allgather(
            tensor,
            name=name + _suffix.get(),
            ignore_name_scope=True,
            process_set=self._process_set(group),
        )

    @override
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

    @override
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
    """Returns a scalar 0 of which TensorFlow does not know that it is one.

    It is for functions that may be called in anybody's `tf.function`, which lets nobody make a
    variable. TensorFlow copies small tensors from outside into a function as constants, and takes
    large ones as inputs.
    """
    with tf.init_scope(), tf.device("/CPU:0"):
        outside = tf.zeros([_MORE_THAN_A_CONSTANT], dtype)
    with tf.device("/CPU:0"):
        return outside[0]


class Zeros(dict[str, tf.Variable]):
    """Scalar variables that hold 0, by dtype, for `zeros` and `opaque`.

    Each is made when it is first asked for. TensorFlow traces a function twice whose first trace
    makes variables: what is traced asks for none that is new.
    """

    def __missing__(self, dtype: str) -> tf.Variable:
        with tf.init_scope():
            self[dtype] = tf.Variable(tf.zeros([], dtype), trainable=False, name="zero")
        return self[dtype]


def zeros(shape: Sequence[int], zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns zeros that TensorFlow cannot fold.

    A collective on `tf.zeros` would run on no rank, or hang.

    Args:
      shape: Shape of the result.
      zero: Scalar variable that holds 0, or `unknown_zero`; its dtype is the result's.
    """
    return tf.broadcast_to(tf.convert_to_tensor(zero), shape)


def opaque(tensor: tf.Tensor, zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns the same tensor, which TensorFlow no longer sees to be a constant; it costs no copy.

    Args:
      tensor: Tensor, `[n, ...]` of any dtype.
      zero: Scalar int32 variable that holds 0, or `unknown_zero`.
    """
    # A slice of all of it, from an index that only the variable knows. A reshape would not do:
    # where all but one of its dimensions are given, TensorFlow finds the last by itself.
    begin = tf.stack([tf.convert_to_tensor(zero), *([0] * (tensor.shape.rank - 1))])
    return tf.ensure_shape(tf.slice(tensor, begin, [-1] * tensor.shape.rank), tensor.shape)


def exchange_objects(value: Any, wire: Wire, name: str) -> list[Any]:
    """Returns what every rank has given, by rank; all ranks call it together, eagerly.

    Args:
      value: Small thing that JSON can hold.
      wire: Collectives that join the ranks.
      name: Name of the collective.

    Raises:
      RuntimeError: On all ranks, if they call it with different names: one of them has not come to
        the same line.
    """
    if wire.topology.size == 1:
        return [value]
    # Eagerly Horovod matches collectives by their order, whatever their names: the name travels
    # along.
    text = json.dumps([name, value]).encode()
    world = wire.topology.world
    lengths = wire.all_gather(tf.constant([len(text)], tf.int64), world, f"{name}.lengths").numpy()
    joined = (
        wire.all_gather(tf.constant(list(text), tf.uint8), world, f"{name}.texts").numpy().tobytes()
    )
    # The texts come one after the other, and only the lengths tell where each ends.
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
    """Returns the bytes of one rank on all ranks; all call it together, eagerly.

    Args:
      content: Bytes that count on `root_rank` alone; others may give any, such as none.
      wire: Collectives that join the ranks.
      root_rank: Rank whose bytes everybody gets.
      name: Name of the collective.
    """
    length = wire.broadcast(tf.constant([len(content)], tf.int64), root_rank, f"{name}.length")
    # A broadcast needs as many bytes on every rank.
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
    # Imported late: tfposeidon loads models and plans without Horovod, and importing starts
    # nothing.
    from horovod.tensorflow import mpi_ops

    return mpi_ops
