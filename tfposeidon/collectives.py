"""Collectives for scripts, which a hand-written loop needs beside the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.carried import as_carried, from_carried
from tfposeidon.communication.wire import Wire, exchange_objects, opaque, unknown_zero
from tfposeidon.exchange import replicas

# Private: TensorFlow has no public way to tell a branch or loop from a function of its own name.
_OF_CONTROL_FLOW = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileCondFuncGraph,
    func_graphs.WhileBodyFuncGraph,
)
# Dtypes that Horovod adds up. Smaller ones go as wider ones; complex ones as pairs of real ones.
_ADDED = ("float16", "float32", "float64", "int32", "int64")
_WIDER = {
    "bfloat16": tf.float32,
    "bool": tf.int32,
    "int8": tf.int32,
    "uint8": tf.int32,
    "int16": tf.int32,
    "uint16": tf.int32,
    "uint32": tf.int64,
    # Modulo 2**64, both are added up alike.
    "uint64": tf.int64,
}
_REMEDY = "Give every rank the same structure, with values of the same shapes and dtypes."


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Gives every rank the values of one, such as weights and optimizer state before training.

    All ranks call it together, not in a `tf.function`.

    Args:
      variables: Keras or TensorFlow variables of any dtype, text too, or a structure of them
        (lists, tuples, dictionaries), the same and in the same order on every rank.
      root_rank: Rank whose values everybody gets.

    Raises:
      ValueError: If there is no such rank, in a `tf.function`, or for what is no variable.
      RuntimeError: On all ranks, if their variables differ; it names the first difference.

    Example:
      >>> import keras, tfposeidon as tp
      >>> weight = keras.Variable([1.0, 2.0])
      >>> tp.broadcast_variables([weight])
      >>> tp.broadcast_variables({"weight": weight})
    """
    if not 0 <= root_rank < runtime.size():
        raise ValueError(
            f"`root_rank` must be a rank of the job, 0 to {runtime.size() - 1}. "
            f"Received: {root_rank}"
        )
    if not tf.executing_eagerly():
        raise ValueError(
            "Variables are broadcast once, before training. Received: a call of "
            "broadcast_variables in a tf.function. Call it outside."
        )
    flat = keras.tree.flatten(variables)
    for one in flat:
        if not isinstance(one, keras.Variable | tf.Variable):
            raise ValueError(
                "Variables are broadcast, in place. Received: "
                f"{type(one).__name__}. For the value of another rank, gather those of all "
                "(tp.all_gather)."
            )
    replicas.broadcast(flat, runtime.wire(), root_rank)


@tf.autograph.experimental.do_not_convert
def all_reduce(value: Any, op: str = "mean", name: str | None = None) -> Any:
    """Computes the mean, or the sum, of a tensor over all ranks, or of each one of a structure.

    All ranks call it together, in the same order, eagerly or in a `tf.function`. In a function its
    result has to be used: TensorFlow leaves out what nobody uses. Iterations of a loop of
    TensorFlow's may run side by side, and Horovod then refuses two collectives of one name: reduce
    what follows from the iteration before, or give the loop `parallel_iterations=1`
    (`tf.autograph.experimental.set_loop_options`).

    Args:
      value: Tensor, or what can be converted to one, of the same shape and dtype on every rank: any
        but text. A list or tuple of numbers is one tensor. Or dictionaries, lists and tuples of
        these, such as what `evaluate(return_dict=True)` returns.
      op: `"mean"`, for floating-point and complex values, or `"sum"`.
      name: Name of the collective, the same on all ranks. It is needed where one graph calls
        `all_reduce` several times, by itself and in functions that it calls: another name for each
        call.

    Returns:
      Tensor of the same shape and dtype, the same bits on every rank, or a structure of them. A sum
      of bools is of int32; sums of integers wrap around as TensorFlow's do.

    Raises:
      ValueError: If `op` is another, for a mean of values that are not floating point, and for what
        is no tensor of numbers. Eagerly, on all ranks.
      RuntimeError: Eagerly, on all ranks, if they give other structures, shapes, dtypes or
        operations. In a function Horovod refuses what differs.

    Cost: one all-reduce for each tensor, 2 (P - 1) / P of its bytes sent per rank over a ring;
    eagerly, two small all-gathers that compare what ranks give.

    Example:
      >>> import tfposeidon as tp
      >>> float(tp.all_reduce(3.0))
      3.0
      >>> sorted(tp.all_reduce({"loss": 0.5, "accuracy": 1.0}))
      ['accuracy', 'loss']
    """

    def check(tensor: tf.Tensor) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f'`op` must be "mean" or "sum". Received: op={op!r}')
        if tensor.dtype.name not in (*_ADDED, *_WIDER) and not tensor.dtype.is_complex:
            raise ValueError(
                f"Numbers are added up. Received: dtype {tensor.dtype.name}. Cast it to one of "
                f"{', '.join(_ADDED)}; tp.all_gather joins text."
            )
        if op == "mean" and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise ValueError(
                "A mean is of floating-point values. "
                f'Received: dtype {tensor.dtype.name}. Cast it, or use op="sum".'
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

    All ranks call it together, in the same order, eagerly or in a `tf.function`; see `all_reduce`.

    Args:
      value: Tensor `[n, ...]`, or what can be converted to one, of the same dtype on every rank:
        numbers or text. Ranks may differ in `n`; a scalar counts as `[1]`. Or a structure of
        these; see `all_reduce`.
      name: Name of the collective; see `all_reduce`.

    Returns:
      `[sum of n, ...]` in the same dtype, the same bits on every rank, or a structure of such.

    Raises:
      ValueError: For what is no tensor. Eagerly, on all ranks.
      RuntimeError: Eagerly, on all ranks, if they give other structures, dtypes or shapes beyond
        the first axis.

    Cost: one all-gather for each tensor, two for text; every rank receives the tensors of all
    others.

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
    """Waits until all ranks are here.

    In a `tf.function`, ops that come later in it may start earlier, unless they depend on it.

    Args:
      name: Name of the collective; see `all_reduce`.

    Example:
      >>> import tfposeidon as tp
      >>> tp.barrier()
    """
    name = name or ("barrier" if tf.executing_eagerly() else None)
    arrived = all_reduce(tf.ones([]), "sum", name)
    # An assertion, as TensorFlow leaves out a collective whose result nobody uses.
    tf.debugging.assert_greater(arrived, 0.0)


def _name(what: str, given: str | None) -> str:
    """Returns a name that is unique in its graph and the same on all ranks."""
    if given is not None:
        return f"tp.{what}.{given}"
    if tf.executing_eagerly():
        return f"tp.{what}"
    # Eagerly one name does for all calls, as each has ended before the next begins.
    graph = function = tf.compat.v1.get_default_graph()
    # TensorFlow names branches and bodies of loops by a number of the process, which may differ
    # from rank to rank.
    while isinstance(function, _OF_CONTROL_FLOW):
        function = function.outer_graph
    name = re.sub(r"[^\w.-]", "_", function.name)
    # In its own graph the op will mark the name as used; a branch's op does not mark it outside.
    return str(function.unique_name(f"tp.{what}.{name}", mark_as_used=function is not graph))


def _on_each(
    value: Any,
    name: str,
    check: Callable[[tf.Tensor], None],
    collective: Callable[[tf.Tensor, Wire, str], tf.Tensor],
    describe: Callable[[tf.Tensor], Any],
) -> Any:
    """Applies a collective to each tensor of a structure, of which ranks must have the same."""
    wire, refusal = runtime.wire(), None
    tensors: Any = None
    try:
        tensors = keras.tree.map_structure(_tensor, keras.tree.traverse(_joined, value))
        for tensor in keras.tree.flatten(tensors):
            check(tensor)
    except ValueError as error:
        refusal = error
    if tf.executing_eagerly() and wire.topology.size > 1:
        given = {}
        if refusal is None:
            paths = keras.tree.flatten_with_path(tensors)
            given = {"/".join(map(str, path)): describe(tensor) for path, tensor in paths}
        _compare(given, refusal, wire, f"{name}.given")
    if refusal is not None:
        raise refusal
    flat = keras.tree.flatten(tensors)
    names = [name if len(flat) == 1 else f"{name}.{number}" for number in range(len(flat))]
    results = [collective(one, wire, named) for one, named in zip(flat, names, strict=True)]
    return keras.tree.pack_sequence_as(tensors, results)


def _compare(given: dict[str, Any], refusal: Exception | None, wire: Wire, name: str) -> None:
    """Raises an error on all ranks if one refuses what it was given, or ranks were given others."""
    everybody = exchange_objects([str(refusal or ""), given], wire, name)
    refused = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everybody) if text]
    if refused:
        raise refusal or ValueError(f"Another rank was given what it cannot take. {refused[0]}")
    agreement.require_equal(
        [one for _, one in everybody],
        "All ranks must give a collective the same kind of values",
        _REMEDY,
        agreement.at_first_entry(),
    )


def _joined(value: Any) -> tf.Tensor | None:
    """Returns a list of numbers or texts as one tensor; `None` for anything else."""
    scalars = (bool, int, float, complex, str, bytes, np.generic)
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    if not is_list or not all(isinstance(one, scalars) for one in keras.tree.flatten(value)):
        return None
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        # Of several lengths or types.
        return None


def _tensor(value: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            "Collectives take tensors, numbers and text, and dictionaries, lists and tuples of "
            f"them. Received: {type(value).__name__}, of which TensorFlow makes no tensor."
        ) from error


def _reduced(tensor: tf.Tensor, op: str, wire: Wire, name: str) -> tf.Tensor:
    if tensor.dtype.is_complex:
        pairs = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return tf.complex(*tf.unstack(_reduced(pairs, op, wire, name), axis=-1))
    carried = tf.cast(tensor, _WIDER.get(tensor.dtype.name, tensor.dtype))
    # With its shape, so that Horovod refuses another one. Grappler folds a collective on a
    # constant, which a script may well give.
    row = carried[tf.newaxis] if carried.shape.rank is not None else tf.reshape(carried, [1, -1])
    scale = 1.0 / wire.topology.size if op == "mean" else 1.0
    total = wire.all_reduce(opaque(row, unknown_zero()), wire.topology.world, name, scale)
    total = tf.ensure_shape(tf.reshape(total, tf.shape(carried)), carried.shape)
    return total if tensor.dtype == tf.bool else tf.cast(total, tensor.dtype)


def _gathered(tensor: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
    rows = tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor
    if rows.dtype == tf.string:
        return _gathered_text(rows, wire, name)
    carried = opaque(as_carried(rows), unknown_zero())
    return from_carried(wire.all_gather(carried, wire.topology.world, name), rows.dtype)


def _gathered_text(rows: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
    """Gathers the bytes of all texts one after the other, and their lengths."""
    flat, world = tf.reshape(rows, [-1]), wire.topology.world
    zero = unknown_zero()
    lengths = wire.all_gather(opaque(tf.strings.length(flat), zero), world, f"{name}.lengths")
    content = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    everything = wire.all_gather(opaque(content, zero), world, f"{name}.bytes")
    characters = tf.constant([bytes([byte]) for byte in range(256)])
    joined = tf.strings.reduce_join(tf.gather(characters, tf.cast(everything, tf.int32)))
    texts = tf.strings.substr(
        tf.fill(tf.shape(lengths), joined), tf.cumsum(lengths, exclusive=True), lengths
    )
    return tf.reshape(texts, tf.concat([[-1], tf.shape(rows)[1:]], 0))
