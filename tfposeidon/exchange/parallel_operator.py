"""Computes a part of a result on each rank, and gathers all parts: the parallel tensor operator.

Layer-wise optimizers need the norms of all layers on all ranks. Computing only a share on each rank
saves time, but the all-gather of the norms takes time, so `parallel="auto"` measures both methods.

Source: Shi et al. 2021 (CommLib), section 4.2.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.checks import at_first_item, require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.topology import balanced_parts, even_parts
from tfposeidon.communication.wire import Wire, exchange_objects, opaque, unknown_zero, zeros
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer, Norms, local_norms, norm_dtype
from tfposeidon.optimizers.wrapper import innermost

CARRIED = (
    *("uint8", "int8", "uint16", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bool"),
)
"""Dtypes that Horovod supports."""

ROUNDS = 7
"""Number of measurements of each method, including the first, which traces and is discarded."""


# Number the calls, because Horovod matches collectives by name. All ranks make the same calls.
_numbers = itertools.count()


# Disable AutoGraph, which would convert all functions that are called.
@tf.autograph.experimental.do_not_convert
def parallel_tensor_operator(function: Callable[[Any], Any], tensors: Any) -> tf.Tensor:
    """Computes `function(tensors)` in parallel: each rank computes a part and receives the others.

    This saves time if the computation takes longer than an all-gather of the results, as for many
    norms or long sorts. All ranks must pass the same tensors, such as averaged gradients, and must
    call the operator, and use the results, in the same order. The operator has no gradient:
    differentiating it raises a `LookupError`.

    In a loop, call it within a `tf.function`, because ranks otherwise compare their arguments at
    every call. In a `tf.function`, ranks compare their arguments at every trace, so all ranks must
    trace together: use an `input_signature` if, for example, the last batch of one rank may have
    another size.

    Args:
      function: Function from consecutive items to a tensor `[m, ...]` for any `m`. The concatenated
        results for parts of the items must equal the result for all items. The function is not
        called on a rank without items.
      tensors: List of tensors or of tuples of tensors, or one tensor, the same on all ranks. A list
        is split between items, so that the largest part has as few elements as possible, and
        `function` receives lists. A tensor is split evenly along its first axis.

    Returns:
      Tensor `[m, ...]`, bit-equal on all ranks.

    Raises:
      ValueError: If there is nothing to split (no tensors, a scalar, or an empty first axis), if a
        shape is unknown, if `function` returns a scalar or a dtype that Horovod does not support,
        or inside XLA.
      RuntimeError: If ranks pass different tensors, if `function` fails on another rank, or if
        results are incompatible.

    Cost: 1 / P of the computation; every rank receives all results, (P - 1) / P of their bytes, in
    P - 1 steps.
    Source: Shi et al. 2021 (CommLib), Eq. 12 to 14.

    Example:
      >>> import tensorflow as tf, tfposeidon as tp
      >>> weights = [tf.fill([2, 2], 1.0), tf.fill([3], 2.0)]
      >>> def sums(some):
      ...     return tf.stack([tf.reduce_sum(weight) for weight in some])
      >>> tp.parallel_tensor_operator(sums, weights).numpy().tolist()
      [4.0, 6.0]
    """
    wire, name = runtime.wire(), f"tp.parallel_tensor_operator_{next(_numbers)}"
    result, problem, description = None, None, None
    # The other ranks wait for this one, so send them any error before raising it.
    try:
        runtime.check_graph()
        items = _items(tensors)
        nested = items if isinstance(items, list) else [items]
        description = [
            [[t.dtype.name, t.shape.as_list()] for t in tf.nest.flatten(item)] for item in nested
        ]
        begin, end = _cut(items, wire.topology.size)[wire.topology.rank]
        result = _result(function(items[begin:end])) if begin < end else None
    except Exception as error:  # noqa: BLE001
        problem = error
    mine = {
        "tensors": description,
        "result": None if result is None else [result.dtype.name, result.shape[1:].as_list()],
        "error": None if problem is None else f"{type(problem).__name__}: {problem}",
    }
    with tf.init_scope():
        everybody = exchange_objects(mine, wire, name)
    if problem is not None:
        raise problem
    dtype, shape = _agreed(everybody)
    return gather_results(result, dtype, shape, wire, f"{name}.all_gather")


def gather_results(
    own: tf.Tensor | None, dtype: str, shape: list[int], wire: Wire, name: str
) -> tf.Tensor:
    """Gathers results `[m, *shape]` by rank; `own` is `None` on a rank without items."""
    rows = zeros([0, *shape], unknown_zero(dtype)) if own is None else opaque(own, unknown_zero())
    whole = tf.ensure_shape(wire.all_gather(rows, wire.topology.world, name), [None, *shape])
    # Prevent the gradient of Horovod's all-gather, which would reach only this rank's part.
    return tf.raw_ops.PreventGradient(
        input=whole, message="a parallel tensor operator has no gradient"
    )


def _items(tensors: Any) -> Any:
    """Returns a list of tensors or of tuples of tensors, or one tensor, all of known shapes."""
    tensors = list(tensors) if isinstance(tensors, tuple) else tensors
    items = tf.nest.map_structure(tf.convert_to_tensor, tensors)
    shapes = [tensor.shape for tensor in tf.nest.flatten(items)]
    if not shapes or not all(shape.is_fully_defined() for shape in shapes):
        raise ValueError(
            "A parallel tensor operator requires tensors of known shapes, to divide them among "
            f"ranks. Received: {[str(shape) for shape in shapes]}. Use tf.ensure_shape."
        )
    return items


def _cut(items: Any, ranks: int) -> list[tuple[int, int]]:
    if isinstance(items, list):
        return balanced_parts(
            [sum(t.shape.num_elements() for t in tf.nest.flatten(item)) for item in items], ranks
        )
    if items.shape.rank == 0 or items.shape[0] == 0:
        raise ValueError(
            "A parallel tensor operator requires a non-empty first axis, along which it divides "
            f"the tensor. Received: shape {items.shape}. Compute the result on every rank."
        )
    return even_parts(items.shape[0], ranks)


def _result(result: Any) -> tf.Tensor:
    result = tf.convert_to_tensor(result)
    is_known = bool(result.shape.rank) and result.shape[1:].is_fully_defined()
    if not is_known or result.dtype.name not in CARRIED:
        raise ValueError(
            "The function of a parallel tensor operator must return a tensor [m, ...] whose "
            "shape is known except for m, and whose dtype Horovod supports: "
            f"{', '.join(CARRIED)}. Received: {result.dtype.name}, shape {result.shape}. Stack "
            "scalars, and cast tensors of other dtypes."
        )
    return result


def _agreed(everybody: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Returns the dtype of the result, and its shape without the first axis."""
    for rank, other in enumerate(everybody):
        if other["error"] is not None:
            raise RuntimeError(
                "A parallel tensor operator must not fail on any rank: correct the tensors or the "
                f"function of the rank that failed. Received on rank {rank}: {other['error']}"
            )
    require_equal(
        [other["tensors"] for other in everybody],
        "All ranks must pass the same tensors to a parallel tensor operator",
        "Build the same list, in the same order, on every rank.",
        at_first_item("item"),
    )
    results = {rank: other["result"] for rank, other in enumerate(everybody) if other["result"]}
    require_equal(
        results,
        "The results of a parallel tensor operator must have one dtype, and one shape except for "
        "the first axis",
        "Return one or more rows for each item.",
        lambda first, other: (_readable(first), _readable(other)),
    )
    dtype, shape = next(iter(results.values()))
    return dtype, shape


def _readable(result: list[Any]) -> str:
    dtype, shape = result
    return f"{dtype} [{', '.join(['?', *map(str, shape)])}]"


# ------------------------------------------------------------------ norms of layers


def parallel_norms(wire: Wire, name: str) -> Norms:
    """Returns a norm function: each rank computes the norms of some layers and receives the others.

    Ranks must have agreed on the variables. One all-gather sends two numbers per layer.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        sizes = [sum(tensor.shape.num_elements() for tensor in row) for row in rows]
        begin, end = balanced_parts(sizes, wire.topology.size)[wire.topology.rank]
        # Choose the dtype from all rows, because it must be the same on all ranks.
        dtype, width, own = norm_dtype(rows), len(rows[0]), None
        if begin < end:
            own = tf.cast(local_norms(variables[begin:end], rows[begin:end]), dtype)
        gathered = gather_results(own, dtype.name, [width], wire, name)
        return tf.ensure_shape(gathered, [len(rows), width])

    return norms


class NormMethod(NamedTuple):
    """Function for `override_norms` (`None` without norms), and remark for the plan (or `""`)."""

    norms: Norms | None = None
    note: str = ""


def choose_norms(optimizer: Any, variables: Sequence[Any], wire: Wire, prefix: str) -> NormMethod:
    """Chooses how to compute a layer-wise optimizer's norms, when a step is first traced.

    With `parallel="auto"`, this function times both methods, for a few milliseconds each. Ranks
    must have agreed on the variables and on `norm_settings`.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer) or wire.topology.size == 1:
        return NormMethod()
    layers = inner.scaled_variables(variables)
    parallel = parallel_norms(wire, f"{prefix}.norms_of_layers")
    wanted, why = inner.parallel, f"parallel={inner.parallel}"
    if wanted == "auto":
        local_s, parallel_s = _measured(layers, wire, prefix)
        wanted = parallel_s < local_s
        times = f"{1e3 * parallel_s:.2f} ms in parallel, {1e3 * local_s:.2f} ms on every rank"
        why = f"measured once: {times}"
    work = "each rank computes a share" if wanted else "every rank computes all"
    note = f"norms of {len(layers)} layers: {work} ({why})"
    return NormMethod(parallel if wanted else local_norms, note)


def norm_settings(optimizer: Any) -> dict[str, Any]:
    """Returns the settings of norms that must be equal on all ranks, as JSON values."""
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer):
        return {}
    return {"parallel": inner.parallel, "excluded": inner.excluded}


@contextmanager
def override_norms(optimizer: Any, norms: Norms | None) -> Iterator[None]:
    """Replaces the norm function of a layer-wise optimizer within this context."""
    inner = innermost(optimizer)
    if norms is None or not isinstance(inner, LayerWiseOptimizer):
        yield
        return
    before, inner.norms = inner.norms, norms
    try:
        yield
    finally:
        inner.norms = before


def _measured(layers: Sequence[Any], wire: Wire, prefix: str) -> tuple[float, float]:
    """Returns the slowest rank's seconds for local and parallel norms, the same on all ranks."""
    if not layers:
        return 0.0, 0.0
    # Measure now, outside of the traced graph.
    with tf.init_scope():
        parallel = parallel_norms(wire, f"{prefix}.measured_norms")
        local_s = _seconds(local_norms, layers, wire, f"{prefix}.norms_0")
        parallel_s = _seconds(parallel, layers, wire, f"{prefix}.norms_1")
        everybody = exchange_objects([local_s, parallel_s], wire, f"{prefix}.norms_measured")
    return max(local for local, _ in everybody), max(parallel for _, parallel in everybody)


def _seconds(norms: Norms, layers: Sequence[Any], wire: Wire, name: str) -> float:
    # Time norms of variables, because gradients, which have the same sizes, are symbolic here.
    @tf.function(autograph=False)
    def once() -> tf.Tensor:
        return norms(layers, [[tf.convert_to_tensor(variable)] * 2 for variable in layers])

    times = []
    for turn in range(ROUNDS):
        # Start together, because waiting for the last rank must not be timed.
        exchange_objects(turn, wire, f"{name}.{turn}")
        begin = time.perf_counter()
        once().numpy()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
