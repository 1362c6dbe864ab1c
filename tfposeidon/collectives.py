"""Provides collectives that scripts and custom training loops call directly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import (
    Wire,
    exchange_objects,
    from_horovod_dtype,
    opaque,
    to_horovod_dtype,
    unknown_zero,
)
from tfposeidon.exchange import replicas

# TensorFlow has no public way to distinguish branches and loops from named functions.
_OF_CONTROL_FLOW = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileCondFuncGraph,
    func_graphs.WhileBodyFuncGraph,
)
# Horovod sums these dtypes. Tensors of the dtypes in `_WIDER` are cast first, and complex tensors
# are sent as their real and imaginary parts.
_ADDED = ("float16", "float32", "float64", "int32", "int64")
_WIDER = {
    # A sum of float16 values may overflow although their mean does not.
    **dict.fromkeys(("float16", "bfloat16"), tf.float32),
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), tf.int32),
    # Modulo 2**64, signed and unsigned sums have the same bits.
    **dict.fromkeys(("uint32", "uint64"), tf.int64),
}


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Copies variables, such as initial weights and optimizer state, from one rank to all others.

    All ranks must call this function together, outside of any `tf.function`.

    Args:
      variables: A Keras or TensorFlow variable of any dtype, including strings, or a structure of
        such variables (lists, tuples, dictionaries), in the same order on every rank.
      root_rank: Rank whose values all ranks receive (default 0).

    Raises:
      ValueError: If `root_rank` is not a rank of the job, if the call is in a `tf.function`, or if
        an element is not a variable.
      RuntimeError: On all ranks, if paths, shapes or dtypes of variables differ; the message names
        the first difference.

    Example:
      >>> import keras, tfposeidon as tp
      >>> weight = keras.Variable([1.0, 2.0])
      >>> tp.broadcast_variables([weight])
      >>> tp.broadcast_variables({"weight": weight})
    """
    if not 0 <= root_rank < runtime.size():
        raise ValueError(
            f"`root_rank` must be a rank of the job, 0 to {runtime.size() - 1}. "
            f"Received: {root_rank}. Leave `root_rank` out for rank 0."
        )
    if not tf.executing_eagerly():
        raise ValueError(
            "broadcast_variables must be called outside of tf.function. Received: a call in a "
            "tf.function. Call it once, eagerly, before training."
        )
    flat = keras.tree.flatten(variables)
    for one in flat:
        if not isinstance(one, keras.Variable | tf.Variable):
            raise ValueError(
                "`variables` must hold keras.Variable or tf.Variable objects, which are updated in "
                f"place. Received: {type(one).__name__}. To get the value of another rank, gather "
                "the values of all ranks (tp.all_gather)."
            )
    replicas.broadcast(flat, runtime.wire(), root_rank)


@tf.autograph.experimental.do_not_convert
def all_reduce(value: Any, op: str = "mean", name: str | None = None) -> Any:
    """Computes the mean or sum of a tensor, or of each tensor of a structure, over all ranks.

    All ranks must call this function in the same order, eagerly or in a `tf.function`. In a
    `tf.function`, the result must be used, because TensorFlow prunes unused ops. TensorFlow may run
    iterations of a loop in parallel, but Horovod rejects concurrent collectives of the same name.
    In a loop, make the value depend on the previous iteration, or set `parallel_iterations=1` with
    `tf.autograph.experimental.set_loop_options`.

    Args:
      value: Tensor of any dtype except string, or a value that can be converted to one, of the same
        shape and dtype on every rank. A list or tuple of numbers is one tensor. Alternatively, a
        dictionary, list or tuple of such values, such as the result of
        `evaluate(return_dict=True)`.
      op: `"mean"` (default), for floating-point and complex values, or `"sum"`.
      name: Name of the collective, the same on all ranks. If one graph calls `all_reduce` several
        times, directly and in functions that it calls, each call requires a different name.

    Returns:
      Tensor of the same shape and dtype with the same bits on every rank, or a structure of such
      tensors. Sums of bools are int32. Sums of integers wrap around as in TensorFlow.

    Raises:
      ValueError: If `op` is invalid, if `op="mean"` and a value is neither floating point nor
        complex, or if a value is not numeric. In eager mode, all ranks raise the error.
      RuntimeError: In eager mode, on all ranks, if structures, shapes, dtypes or operations differ.
        In a `tf.function`, Horovod raises its own error.

    Cost: one all-reduce per tensor, 2 (P - 1) / P of its bytes sent per rank over a ring, of 16-bit
    floats as float32; in eager mode, one additional small all-gather that compares the arguments.

    Example:
      >>> import tfposeidon as tp
      >>> float(tp.all_reduce(3.0))
      3.0
      >>> sorted(tp.all_reduce({"loss": 0.5, "accuracy": 1.0}))
      ['accuracy', 'loss']
    """

    def check(tensor: tf.Tensor) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f'`op` must be "mean" or "sum". Received: op={op!r}. Use "mean".')
        if tensor.dtype.name not in (*_ADDED, *_WIDER) and not tensor.dtype.is_complex:
            raise ValueError(
                f"all_reduce requires a numeric tensor. Received: dtype {tensor.dtype.name}. Cast "
                f"it to one of {', '.join(_ADDED)}, or use tp.all_gather for strings."
            )
        if op == "mean" and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise ValueError(
                'op="mean" requires a floating-point tensor. Received: '
                f'dtype={tensor.dtype.name}. Cast it, or use op="sum".'
            )

    return _on_each(
        value,
        _name("all_reduce", name),
        check,
        lambda tensor, wire, one: _reduced(tensor, op, wire, one),
        lambda tensor: [op, tensor.dtype.name, tensor.shape.as_list()],
    )


@tf.autograph.experimental.do_not_convert
def all_gather(value: Any, name: str | None = None) -> Any:
    """Concatenates the tensors of all ranks along the first axis, in the order of ranks.

    All ranks must call this function in the same order, eagerly or in a `tf.function`; see
    `all_reduce`.

    Args:
      value: Tensor `[n, ...]` of numbers or strings, or a value that can be converted to one, of
        the same dtype on every rank. `n` may differ between ranks; a scalar counts as `[1]`.
        Alternatively, a structure of such values; see `all_reduce`.
      name: Name of the collective; see `all_reduce`.

    Returns:
      `[sum of n, ...]` in the same dtype with the same bits on every rank, or a structure of such
      tensors.

    Raises:
      ValueError: If a value cannot be converted to a tensor. In eager mode, all ranks raise the
        error.
      RuntimeError: In eager mode, on all ranks, if structures, dtypes or shapes beyond the first
        axis differ.

    Cost: one all-gather per tensor, two for strings; every rank receives the tensors of all others.
    In eager mode, one additional small all-gather compares the ranks' arguments.

    Example:
      >>> import tfposeidon as tp
      >>> tp.all_gather([1.0, 2.0]).numpy().tolist()
      [1.0, 2.0]
      >>> tp.all_gather("a text").numpy().tolist()
      [b'a text']
    """
    return _on_each(
        value,
        _name("all_gather", name),
        lambda tensor: None,
        _gathered,
        lambda tensor: [tensor.dtype.name, tensor.shape.as_list()[1:]],
    )


@tf.autograph.experimental.do_not_convert
def barrier(name: str | None = None) -> None:
    """Waits until all ranks have called this function.

    In a `tf.function`, TensorFlow may start later ops before the barrier ends, unless they depend
    on it.

    Args:
      name: Name of the collective; see `all_reduce`.

    Example:
      >>> import tfposeidon as tp
      >>> tp.barrier()
    """
    name = name or ("barrier" if tf.executing_eagerly() else None)
    arrived = all_reduce(tf.ones([]), "sum", name)
    # The assertion uses the result, because TensorFlow prunes a collective whose result is unused.
    tf.debugging.assert_greater(arrived, 0.0)


def _name(what: str, given: str | None) -> str:
    """Returns a name that is unique in its graph and the same on all ranks."""
    runtime.check_is_outside_xla(f"tp.{what}")
    if given is not None:
        return f"tp.{what}.{given}"
    # In eager mode one name is sufficient, because each call ends before the next starts.
    if tf.executing_eagerly():
        return f"tp.{what}"
    graph = function = tf.compat.v1.get_default_graph()
    # Use the name of the function around branches and loop bodies: TensorFlow numbers these per
    # process, so their names may differ between ranks.
    while isinstance(function, _OF_CONTROL_FLOW):
        function = function.outer_graph
    name = re.sub(r"[^\w.-]", "_", function.name)
    # In the op's own graph, the op will mark the name as used. An op in a branch will not mark the
    # name in the function around the branch, so mark it here.
    return str(function.unique_name(f"tp.{what}.{name}", mark_as_used=function is not graph))


def _on_each(
    value: Any,
    name: str,
    check: Callable[[tf.Tensor], None],
    collective: Callable[[tf.Tensor, Wire, str], tf.Tensor],
    describe: Callable[[tf.Tensor], Any],
) -> Any:
    """Applies a collective to each tensor of a structure, which must be the same on all ranks."""
    wire, refusal = runtime.wire(), None
    given: dict[str, Any] = {}
    tensors: Any = None
    try:
        tensors = keras.tree.map_structure(_tensor, keras.tree.traverse(_joined, value))
        for path, tensor in keras.tree.flatten_with_path(tensors):
            check(tensor)
            if tf.executing_eagerly():
                given["/".join(map(str, path))] = describe(tensor)
    except ValueError as error:
        refusal = error
    if tf.executing_eagerly():
        _compare(given, refusal, wire, f"{name}.given")
    elif refusal is not None:
        raise refusal
    flat = keras.tree.flatten(tensors)
    names = [name if len(flat) == 1 else f"{name}.{number}" for number in range(len(flat))]
    results = [collective(one, wire, named) for one, named in zip(flat, names, strict=True)]
    return keras.tree.pack_sequence_as(tensors, results)


def _compare(given: dict[str, Any], refusal: Exception | None, wire: Wire, name: str) -> None:
    """Raises an error on all ranks if any rank's arguments are invalid, or if arguments differ."""
    ranks = exchange_objects([str(refusal or ""), given], wire, name)
    refused = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(ranks) if text]
    if refused:
        raise refusal or ValueError(
            f"All ranks must pass valid arguments to a collective. Received on {refused[0]}"
        )
    require_equal(
        [described for _, described in ranks],
        "All ranks must pass values of the same structure and type to a collective",
        "Pass the same structure, with values of the same shapes and dtypes, on every rank.",
        at_first_entry(),
    )


def _joined(value: Any) -> tf.Tensor | None:
    """Returns a list or tuple of numbers or strings as one tensor, `None` for other values."""
    scalars = (bool, int, float, complex, str, bytes, np.generic)
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    if not is_list or not all(isinstance(one, scalars) for one in keras.tree.flatten(value)):
        return None
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        # The lengths or types of elements differ.
        return None


def _tensor(value: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            "A collective requires tensors, numbers or strings, or dictionaries, lists or tuples "
            f"of them. Received: {type(value).__name__}, which TensorFlow cannot convert. Convert "
            "it to a tensor."
        ) from error


def _reduced(tensor: tf.Tensor, op: str, wire: Wire, name: str) -> tf.Tensor:
    if tensor.dtype.is_complex:
        pairs = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return tf.complex(*tf.unstack(_reduced(pairs, op, wire, name), axis=-1))
    carried = tf.cast(tensor, _WIDER.get(tensor.dtype.name, tensor.dtype))
    # Retain the shape, so that Horovod rejects different shapes. Make the tensor opaque, because a
    # script may pass a constant, and Grappler folds a collective on a constant.
    row = carried[tf.newaxis] if carried.shape.rank is not None else tf.reshape(carried, [1, -1])
    scale = 1.0 / wire.topology.size if op == "mean" else 1.0
    total = wire.all_reduce(opaque(row, unknown_zero()), wire.topology.world, name, scale)
    total = tf.ensure_shape(tf.reshape(total, tf.shape(carried)), carried.shape)
    return total if tensor.dtype == tf.bool else tf.cast(total, tensor.dtype)


def _gathered(tensor: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
    rows = tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor
    if rows.dtype == tf.string:
        return _gathered_text(rows, wire, name)
    carried = opaque(to_horovod_dtype(rows), unknown_zero())
    return from_horovod_dtype(wire.all_gather(carried, wire.topology.world, name), rows.dtype)


def _gathered_text(rows: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
    """Gathers the lengths and bytes of strings, because Horovod does not support strings."""
    flat, world = tf.reshape(rows, [-1]), wire.topology.world
    zero = unknown_zero()
    lengths = wire.all_gather(opaque(tf.strings.length(flat), zero), world, f"{name}.lengths")
    content = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    everything = wire.all_gather(opaque(content, zero), world, f"{name}.bytes")
    characters = tf.constant([bytes([byte]) for byte in range(256)])
    letters = tf.gather(characters, tf.cast(everything, tf.int32))
    count = tf.size(lengths)
    texts = tf.strings.unsorted_segment_join(letters, tf.repeat(tf.range(count), lengths), count)
    return tf.reshape(texts, tf.concat([[-1], tf.shape(rows)[1:]], 0))
