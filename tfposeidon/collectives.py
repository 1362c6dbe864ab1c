"""Collectives for scripts, which a hand-written loop needs beside the optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import opaque, unknown_zero
from tfposeidon.exchange import replicas

# Private: TensorFlow has no public way to tell a branch or loop from a function of its own name.
_OF_CONTROL_FLOW = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileCondFuncGraph,
    func_graphs.WhileBodyFuncGraph,
)
# Dtypes that Horovod cannot add up go as wider ones.
_WIDER = {
    "bfloat16": tf.float32,
    "bool": tf.int32,
    "int8": tf.int32,
    "uint8": tf.int32,
    "int16": tf.int32,
}


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Gives every rank the values of one, such as weights and optimizer state before training.

    All ranks call it together, not in a `tf.function`.

    Args:
      variables: Keras or TensorFlow variables of any dtype, the same and in the same order on every
        rank.
      root_rank: Rank whose values everybody gets.

    Raises:
      ValueError: If there is no such rank, or in a `tf.function`.
      RuntimeError: On all ranks, if their variables differ; it names the first difference.

    Example:
      >>> import keras, tfposeidon as tp
      >>> weight = keras.Variable([1.0, 2.0])
      >>> tp.broadcast_variables([weight])
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
    replicas.broadcast(list(variables), runtime.wire(), root_rank)


@tf.autograph.experimental.do_not_convert
def all_reduce(value: Any, op: str = "mean", name: str | None = None) -> tf.Tensor:
    """Computes the mean, or the sum, of a tensor over all ranks.

    All ranks call it together, in the same order, eagerly or in a `tf.function`. In a function its
    result has to be used: TensorFlow leaves out what nobody uses. Iterations of a loop of
    TensorFlow's may run side by side, and Horovod then refuses two collectives of one name: reduce
    what follows from the iteration before, or give the loop `parallel_iterations=1`
    (`tf.autograph.experimental.set_loop_options`).

    Args:
      value: Tensor, or what can be converted to one, of the same shape and dtype on every rank:
        floating point, a signed integer, uint8 or bool.
      op: `"mean"`, for floating-point values, or `"sum"`.
      name: Name of the collective, the same on all ranks. It is needed where one graph calls
        `all_reduce` several times, by itself and in functions that it calls: another name for each
        call.

    Returns:
      Tensor of the same shape and dtype, the same bits on every rank. A sum of bools is of int32.

    Raises:
      ValueError: If `op` is another, or for a mean of values that are not floating point.

    Cost: one all-reduce, 2 (P - 1) / P of the tensor's bytes sent per rank over a ring.

    Example:
      >>> import tfposeidon as tp
      >>> float(tp.all_reduce(3.0))
      3.0
    """
    tensor = tf.convert_to_tensor(value)
    if op not in ("mean", "sum"):
        raise ValueError(f'`op` must be "mean" or "sum". Received: op={op!r}')
    if op == "mean" and not tensor.dtype.is_floating:
        raise ValueError(
            "A mean is of floating-point values. "
            f'Received: dtype {tensor.dtype.name}. Cast it, or use op="sum".'
        )
    carried = tf.cast(tensor, _WIDER.get(tensor.dtype.name, tensor.dtype))
    wire = runtime.wire()
    scale = 1.0 / wire.topology.size if op == "mean" else 1.0
    # Grappler folds a collective on a constant, which a script may well give.
    flat = opaque(tf.reshape(carried, [-1]), unknown_zero())
    total = wire.all_reduce(flat, wire.topology.world, _name("all_reduce", name), scale)
    total = tf.ensure_shape(tf.reshape(total, tf.shape(carried)), carried.shape)
    return total if tensor.dtype == tf.bool else tf.cast(total, tensor.dtype)


@tf.autograph.experimental.do_not_convert
def all_gather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first axis, in the order of ranks.

    All ranks call it together, in the same order, eagerly or in a `tf.function`; see `all_reduce`.

    Args:
      value: Tensor `[n, ...]`, or what can be converted to one, of the same dtype on every rank.
        Ranks may differ in `n`.
      name: Name of the collective; see `all_reduce`.

    Returns:
      `[sum of n, ...]` in the same dtype, the same bits on every rank.

    Raises:
      ValueError: If `value` is a scalar.

    Cost: one all-gather; every rank receives the tensors of all others.

    Example:
      >>> import tfposeidon as tp
      >>> tp.all_gather([1.0, 2.0]).numpy().tolist()
      [1.0, 2.0]
    """
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank == 0:
        raise ValueError(
            "Tensors are joined along their first axis. Received: a scalar. Give it one: "
            "value[tf.newaxis]."
        )
    wire = runtime.wire()
    return wire.all_gather(
        opaque(tensor, unknown_zero()), wire.topology.world, _name("all_gather", name)
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
