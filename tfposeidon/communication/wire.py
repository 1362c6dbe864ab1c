"""Provides four collectives on groups of ranks, and packs tensors for them.

This is the only module that uses Horovod's collectives.

Grappler optimizes Horovod's TensorFlow ops as if they were arithmetic: it folds a collective with a
constant input (which then runs once or hangs), prunes a collective whose output is unused, and
merges two equal collectives. Therefore no input may be a constant (see `zeros`), every output must
be used, and each call has a unique name, the same on every rank. The parts of names are joined by
dots, because Horovod removes the parts before a slash.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.checks import require_equal
from tfposeidon.communication.topology import Group, Topology

_MORE_THAN_A_CONSTANT = 256
"""Length of a vector that `tf.function` captures as an input; constants have up to 128 elements."""
_SAME_BITS = {
    "bfloat16": tf.uint16,
    "uint32": tf.int32,
    "uint64": tf.int64,
    "complex64": tf.int64,
    # The bitcast tensor has an additional axis of length 2.
    "complex128": tf.int64,
}

_suffix = contextvars.ContextVar("suffix", default="")
"""Suffix of the names of all collectives that are called or traced within `names_ending_in`."""


@contextlib.contextmanager
def names_ending_in(suffix: str) -> Iterator[None]:
    """Appends a suffix to the names of collectives within this context, which may be nested."""
    # Code that one graph calls several times needs a different suffix for each call. TensorFlow
    # also makes names unique, but differently in branches, and on ranks with exhausted input.
    token = _suffix.set(suffix + _suffix.get())
    try:
        yield
    finally:
        _suffix.reset(token)


class Wire(Protocol):
    """Collectives that schemes use. Groups of one rank send no data.

    All ranks of a group call each collective with the same name, and must use the result, because
    TensorFlow prunes unused ops.

    Attributes:
      topology: Topology of the job, from the perspective of this rank.
    """

    topology: Topology

    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        """Returns `scale` times the sum over the group, with the same bits on every rank.

        Args:
          tensor: Vector, `[n]`, of the same length and dtype on every rank.
          group: Ranks that take part.
          name: Name of the collective.
          scale: Factor of the sum (default 1).
        """

    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Returns the tensors of all ranks, concatenated along the first axis in the group's order.

        Args:
          tensor: Tensor, `[m, ...]`; `m` may differ between ranks.
          group: Ranks that take part.
          name: Name of the collective.
        """

    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        """Sends each rank of the group one part of a tensor, in the group's order.

        Args:
          tensor: Concatenated parts, `[m, ...]`.
          splits: Length along the first axis of the part for each rank of the group; their sum is
            `m`.
          group: Ranks that take part.
          name: Name of the collective.

        Returns:
          Concatenated parts that the ranks of the group sent to this one, `[sum of lengths, ...]`
          in the same dtype.
        """

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """Returns the tensor of one rank on all ranks of the job.

        Args:
          tensor: Tensor of any shape and dtype, both the same on every rank.
          root_rank: Rank whose tensor all ranks receive.
          name: Name of the collective.
        """


class HorovodWire(Wire):
    """Implements the collectives with Horovod's ops, over NCCL, MPI or Gloo.

    `process_sets` must contain each group of `topology.groups()`.
    """

    def __init__(self, topology: Topology, process_sets: dict[Group, Any]) -> None:
        self.topology = topology
        # `None` stands for Horovod's global process set.
        self._process_sets = {topology.world: None} | process_sets
        # Ranks of the job, by their number in `topology`.
        self._ranks = topology.world.ranks

    @override
    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        if group.size == 1:
            return tensor if scale == 1.0 else tensor * tf.cast(scale, tensor.dtype)
        ops, options = _horovod_ops(), self._options(name, group)
        return ops._allreduce(tensor, op=ops.Sum, postscale_factor=scale, **options)

    @override
    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        if group.size == 1:
            return tensor
        return _horovod_ops().allgather(tensor, **self._options(name, group))

    @override
    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        if group.size == 1:
            return tensor
        options = self._options(name, group)
        return _horovod_ops().alltoall(tensor, splits=list(splits), **options)[0]

    @override
    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        if self.topology.size == 1:
            return tensor
        options = self._options(name, self.topology.world)
        return _horovod_ops().broadcast(tensor, self._ranks[root_rank], **options)

    def _options(self, name: str, group: Group) -> dict[str, Any]:
        in_job = Group(tuple(self._ranks[rank] for rank in group.ranks))
        process_set = self._process_sets[in_job] or _horovod_ops().global_process_set
        # Ignore name scopes: Horovod matches collectives by name, and scopes may differ between
        # ranks, as in branches.
        name += _suffix.get()
        return {"name": name, "ignore_name_scope": True, "process_set": process_set}


def unknown_zero(dtype: str = "int32") -> tf.Tensor:
    """Returns a scalar 0 that TensorFlow does not recognize as a constant."""
    # Use an outer tensor, because code in a user's `tf.function` may not create variables.
    # TensorFlow captures small outer tensors as constants, and large ones as inputs.
    with tf.init_scope(), tf.device("/CPU:0"):
        outside = tf.zeros([_MORE_THAN_A_CONSTANT], dtype)
    with tf.device("/CPU:0"):
        return outside[0]


class Zeros(dict[str, tf.Variable]):
    """Scalar variables with value 0, by dtype, for `zeros` and `opaque`; created on first access.

    Access them before tracing: TensorFlow traces a function twice if its first trace creates
    variables.
    """

    def __missing__(self, dtype: str) -> tf.Variable:
        with tf.init_scope():
            self[dtype] = tf.Variable(tf.zeros([], dtype), trainable=False, name="zero")
        return self[dtype]


def zeros(shape: Sequence[int], zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns zeros that TensorFlow cannot fold, in the dtype of `zero`, a scalar 0."""
    return tf.broadcast_to(tf.convert_to_tensor(zero), shape)


def opaque(tensor: tf.Tensor, zero: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns `tensor` as the output of an op that TensorFlow cannot fold, without a copy."""
    # The result is a slice of the whole tensor that starts at `zero`, an int32 scalar 0. A reshape
    # is not sufficient: if all dimensions but one are known, TensorFlow infers the last.
    if tensor.shape.rank is None:
        return tensor
    begin = tf.stack([tf.convert_to_tensor(zero), *([0] * (tensor.shape.rank - 1))])
    return tf.ensure_shape(tf.slice(tensor, begin, [-1] * tensor.shape.rank), tensor.shape)


def exchange_objects(value: Any, wire: Wire, name: str) -> list[Any]:
    """Returns the JSON values of all ranks, by rank; all ranks call it together, eagerly."""
    if wire.topology.size == 1:
        return [value]
    # In eager mode, Horovod matches collectives by order and not by name. The message therefore
    # includes the name, which reveals ranks that call from different places.
    line = np.frombuffer(json.dumps([name, value]).encode() + b"\n", np.uint8)
    received = wire.all_gather(tf.constant(line), wire.topology.world, name).numpy().tobytes()
    pairs = [json.loads(text) for text in received.splitlines()]
    require_equal(
        [name for name, _ in pairs],
        "All ranks must call the same collectives in the same order",
        "Use the same callbacks, in the same order, and the same number of epochs and evaluations "
        "on every rank.",
    )
    return [value for _, value in pairs]


def broadcast_bytes(content: bytes, wire: Wire, root_rank: int, name: str) -> bytes:
    """Returns the bytes of `root_rank` on all ranks; all ranks call it together, eagerly."""
    length = wire.broadcast(tf.constant([len(content)], tf.int64), root_rank, f"{name}.length")
    # A broadcast requires the same number of bytes on every rank.
    mine = content if wire.topology.rank == root_rank else bytes(int(length[0]))
    sent = tf.constant(np.frombuffer(mine, np.uint8))
    return wire.broadcast(sent, root_rank, f"{name}.bytes").numpy().tobytes()


def _horovod_ops() -> Any:
    # Import Horovod only here, because tfposeidon can load models and plans without it.
    from horovod.tensorflow import mpi_ops

    return mpi_ops


class GroupWire(HorovodWire):
    """Implements the collectives among some ranks of a job, including this rank.

    Horovod must have a process set for these ranks. `topology` describes only these ranks, numbered
    from 0, and their nodes.
    """

    def __init__(self, wire: HorovodWire, ranks: Iterable[int]) -> None:
        own = self._ranks = tuple(sorted(ranks))
        nodes = [tuple(own.index(r) for r in node if r in own) for node in wire.topology.nodes]
        self.topology = Topology(own.index(wire.topology.rank), tuple(filter(None, nodes)))
        self._process_sets = wire._process_sets


def to_horovod_dtype(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor in a dtype that Horovod supports."""
    name = tensor.dtype.name
    if name in _SAME_BITS:
        return tf.bitcast(tensor, _SAME_BITS[name])
    # TensorFlow cannot bitcast float8, but float32 represents each of its values exactly.
    return tf.cast(tensor, tf.float32) if name.startswith("float8") else tensor


def from_horovod_dtype(carried: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Inverts `to_horovod_dtype` for a tensor of the given dtype."""
    if dtype.name in _SAME_BITS:
        return tf.bitcast(carried, dtype)
    return tf.cast(carried, dtype)


def summed_dtype(values: Sequence[Any]) -> tf.DType:
    """Returns the dtype for sums and means of values: float64 if any is float64, else float32."""
    wide = [value for value in values if tf.as_dtype(value.dtype) == tf.float64]
    return tf.float64 if wide else tf.float32


def pack(values: Sequence[Any], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns floating-point values, flattened and concatenated to one vector."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(v), dtype), [-1]) for v in values]
    return tf.concat(flat, 0) if flat else tf.zeros([0], dtype)


def unpack(vector: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Splits a vector from `pack` into tensors with the shapes and dtypes of `like`."""
    if not like:
        return []
    shapes = [tf.TensorShape(value.shape) for value in like]
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [
        tf.cast(tf.reshape(part, shape), keras.backend.standardize_dtype(value.dtype))
        for part, shape, value in zip(parts, shapes, like, strict=True)
    ]
