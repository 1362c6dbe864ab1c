"""Who takes the norms that layer-wise optimizers ask for: each rank all, each rank a share, or servers their parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication.partition import balanced
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange.parallel_operator import gather_results
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer, Norms, local_norms, norm_dtype
from tfposeidon.optimizers.wrapping import innermost

ROUNDS = 7


def parallel_norms(wire: Wire, name: str) -> Norms:
    """Norms of which each rank takes those of some layers (CommLib, section 4.2), for variables that ranks agreed on.

    Cost: a P-th of the reading, and one all-gather of two numbers per layer.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        sizes = [sum(tensor.shape.num_elements() for tensor in row) for row in rows]
        begin, end = balanced(sizes, wire.topology.size)[wire.topology.rank]
        # That of all, and not of this rank's share.
        dtype, width = norm_dtype(rows), len(rows[0])
        own = (
            tf.cast(local_norms(variables[begin:end], rows[begin:end]), dtype)
            if begin < end
            else None
        )
        return tf.ensure_shape(
            gather_results(own, dtype.name, [width], wire, name), [len(rows), width]
        )

    return norms


def sharded_norms(wire: Wire, served: Callable[[Any], bool], name: str) -> Norms:
    """Norms of variables of which some lie in parts on all ranks: their squares are summed.

    Args:
      wire: What joins the ranks.
      served: Whether this rank has only a part of a variable.
      name: Of the one small all-reduce.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        own = local_norms(variables, rows)
        parts = [place for place, variable in enumerate(variables) if served(variable)]
        if not parts:
            return own
        # In 64 bits: a square of what float32 holds may be more than it holds.
        squares = tf.square(tf.cast(tf.gather(own, parts), tf.float64))
        total = wire.all_reduce(tf.reshape(squares, [-1]), wire.topology.world, name)
        whole = tf.cast(tf.sqrt(tf.reshape(total, squares.shape)), own.dtype)
        return tf.tensor_scatter_nd_update(own, [[place] for place in parts], whole)

    return norms


class NormMethod(NamedTuple):
    """Who takes the norms of one list of variables.

    Attributes:
      norms: For `override_norms`; `None` where the optimizer asks for none, or servers complete them.
      note: For the plan; may be empty.
    """

    norms: Norms | None = None
    note: str = ""


def choose_norms(
    optimizer: Any, variables: Sequence[Any], served: bool, wire: Wire, prefix: str
) -> NormMethod:
    """Who takes the norms that a layer-wise optimizer asks for, at the first trace of a step.

    Args:
      optimizer: The one inside `DistributedOptimizer`; it need not be layer-wise.
      variables: What it trains; ranks have agreed on them, and on `norm_settings`.
      served: Whether servers update some of them.
      wire: What joins the ranks.
      prefix: Begins the names of collectives.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer) or wire.topology.size == 1:
        return NormMethod()
    if served:
        return NormMethod(
            note="norms of layers: of the servers' parts, their squares are summed over the ranks"
        )
    layers = inner.scaled_variables(variables)
    parallel = parallel_norms(wire, f"{prefix}.norms_of_layers")
    wanted, why = inner.parallel, f"parallel={inner.parallel}"
    if wanted == "auto":
        local_s, parallel_s = _measured(layers, wire, prefix)
        wanted = parallel_s < local_s
        why = f"measured once: {1e3 * parallel_s:.2f} ms in parallel, {1e3 * local_s:.2f} ms on every rank"
    note = f"norms of {len(layers)} layers: {'each rank a share' if wanted else 'all on every rank'} ({why})"
    return NormMethod(parallel if wanted else local_norms, note)


def norm_settings(optimizer: Any) -> dict[str, Any]:
    """What decides which collectives norms need, and so must be the same on all ranks; for JSON."""
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer):
        return {}
    return {"parallel": inner.parallel, "excluded": inner.excluded}


@contextmanager
def override_norms(optimizer: Any, norms: Norms | None) -> Iterator[None]:
    """Within it a layer-wise optimizer takes its norms so; elsewhere, whoever has it takes them by himself."""
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
    """Seconds on every rank and in parallel: those of the slowest rank, so that all ranks choose alike."""
    if not layers:
        return 0.0, 0.0
    with tf.init_scope():
        candidates = [local_norms, parallel_norms(wire, f"{prefix}.measured_norms")]
        mine = [
            _seconds(norms, layers, wire, f"{prefix}.norms_{place}")
            for place, norms in enumerate(candidates)
        ]
        everybody = exchange_objects(mine, wire, f"{prefix}.norms_measured")
    local_s, parallel_s = (max(times) for times in zip(*everybody, strict=True))
    return local_s, parallel_s


def _seconds(norms: Norms, layers: Sequence[Any], wire: Wire, name: str) -> float:
    # Values stand for gradients, which have their sizes.
    @tf.function(autograph=False)
    def once() -> tf.Tensor:
        return norms(layers, [[tf.convert_to_tensor(variable)] * 2 for variable in layers])

    times = []
    for turn in range(ROUNDS):
        exchange_objects(turn, wire, f"{name}.{turn}")
        begin = time.perf_counter()
        once().numpy()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
