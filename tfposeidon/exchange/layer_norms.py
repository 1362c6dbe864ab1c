"""Norms for layer-wise optimizers: each rank computes all of them, or a share.

All ranks need the norms of all layers. A share saves computation but costs an all-gather, so
`parallel="auto"` times both methods.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication.partition import balanced
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange.parallel_operator import gather_results
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer, Norms, local_norms, norm_dtype
from tfposeidon.optimizers.wrapping import innermost

ROUNDS = 7
"""Number of measurements of each method, including the first, which traces and is discarded."""


def parallel_norms(wire: Wire, name: str) -> Norms:
    """Returns a function by which each rank computes norms of some layers and receives the rest.

    Ranks must have agreed on the variables. Each rank reads 1 / P of the values, and one all-gather
    sends two numbers per layer.

    Source: Shi et al. 2021 (CommLib), section 4.2.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        sizes = [sum(tensor.shape.num_elements() for tensor in row) for row in rows]
        begin, end = balanced(sizes, wire.topology.size)[wire.topology.rank]
        # Use the dtype of all rows: a rank's share may have another one, and results must be
        # compatible.
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


class NormMethod(NamedTuple):
    """Method by which the norms of one list of variables are computed.

    `norms` is for `override_norms`, or `None` if the optimizer needs no norms. `note` is a line for
    the plan, or empty.
    """

    norms: Norms | None = None
    note: str = ""


def choose_norms(optimizer: Any, variables: Sequence[Any], wire: Wire, prefix: str) -> NormMethod:
    """Chooses how to compute a layer-wise optimizer's norms, when a step is first traced.

    With `parallel="auto"`, it times both methods, for a few milliseconds each. Ranks must have
    agreed on the variables and on `norm_settings`.
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
        why = (
            f"measured once: {1e3 * parallel_s:.2f} ms in parallel, "
            f"{1e3 * local_s:.2f} ms on every rank"
        )
    who = "each rank computes a share" if wanted else "every rank computes all"
    note = f"norms of {len(layers)} layers: {who} ({why})"
    return NormMethod(parallel if wanted else local_norms, note)


def norm_settings(optimizer: Any) -> dict[str, Any]:
    """Returns the settings that determine the collectives of norms and must be equal, for JSON."""
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer):
        return {}
    return {"parallel": inner.parallel, "excluded": inner.excluded}


@contextmanager
def override_norms(optimizer: Any, norms: Norms | None) -> Iterator[None]:
    """Makes a layer-wise optimizer use another norm function within this context.

    Elsewhere it computes its own norms, for example if the inner optimizer is called directly.
    """
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
    """Measures seconds of the slowest rank, local and parallel, so that all ranks choose alike."""
    if not layers:
        return 0.0, 0.0
    # Run now, outside of the traced graph.
    with tf.init_scope():
        candidates = [local_norms, parallel_norms(wire, f"{prefix}.measured_norms")]
        mine = [
            _seconds(norms, layers, wire, f"{prefix}.norms_{index}")
            for index, norms in enumerate(candidates)
        ]
        everybody = exchange_objects(mine, wire, f"{prefix}.norms_measured")
    local_s, parallel_s = (max(times) for times in zip(*everybody, strict=True))
    return local_s, parallel_s


def _seconds(norms: Norms, layers: Sequence[Any], wire: Wire, name: str) -> float:
    # Use variables in place of gradients, which have the same sizes.
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
