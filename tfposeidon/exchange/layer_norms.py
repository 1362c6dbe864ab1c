"""Norms for layer-wise optimizers: each rank computes all of them, or a share."""

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
"""Number of measurements of each method; the first, which traces, does not count."""


def parallel_norms(wire: Wire, name: str) -> Norms:
    """Returns a function by which each rank computes norms of some layers and receives the rest.

    Ranks must have agreed on the variables.

    Args:
      wire: Collectives that join the ranks.
      name: Name of the all-gather.

    Cost: a P-th of the reading, and one all-gather of two numbers per layer.
    Source: Shi et al. 2021 (CommLib), section 4.2.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        sizes = [sum(tensor.shape.num_elements() for tensor in row) for row in rows]
        begin, end = balanced(sizes, wire.topology.size)[wire.topology.rank]
        # The dtype of all rows: a rank's share may have another one, and results must fit together.
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

    Attributes:
      norms: Function for `override_norms`; `None` where the optimizer asks for no norms.
      note: Line for the plan; may be empty.
    """

    norms: Norms | None = None
    note: str = ""


def choose_norms(optimizer: Any, variables: Sequence[Any], wire: Wire, prefix: str) -> NormMethod:
    """Chooses how norms of a layer-wise optimizer are computed, at the first trace of a step.

    With `parallel="auto"` it measures both ways, which takes a few milliseconds for each.

    Args:
      optimizer: Optimizer inside `DistributedOptimizer`; it need not be layer-wise.
      variables: Variables that the optimizer trains; ranks have agreed on them, and on
        `norm_settings`.
      wire: Collectives that join the ranks.
      prefix: Prefix of the names of collectives.

    Returns:
      The function for `override_norms`, and a line for the plan.
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
    who = "each rank a share" if wanted else "all on every rank"
    note = f"norms of {len(layers)} layers: {who} ({why})"
    return NormMethod(parallel if wanted else local_norms, note)


def norm_settings(optimizer: Any) -> dict[str, Any]:
    """Returns the settings that decide which collectives norms need, for JSON.

    They must be the same on all ranks.

    Args:
      optimizer: Optimizer inside `DistributedOptimizer`; without settings of this kind unless it is
        layer-wise.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, LayerWiseOptimizer):
        return {}
    return {"parallel": inner.parallel, "excluded": inner.excluded}


@contextmanager
def override_norms(optimizer: Any, norms: Norms | None) -> Iterator[None]:
    """Makes a layer-wise optimizer compute its norms by another function, within this context.

    Elsewhere it computes them by itself, as when somebody calls the inner optimizer directly.

    Args:
      optimizer: Optimizer inside `DistributedOptimizer`; any other than a layer-wise one stays as
        it is.
      norms: Function that computes the norms, or `None` to change nothing.
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
    """Measures seconds on every rank and in parallel, of the slowest rank: so all choose alike."""
    if not layers:
        return 0.0, 0.0
    # Outside of the graph that is traced, to run now.
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
    # The values of variables stand for gradients, which have the same sizes.
    @tf.function(autograph=False)
    def once() -> tf.Tensor:
        return norms(layers, [[tf.convert_to_tensor(variable)] * 2 for variable in layers])

    times = []
    for turn in range(ROUNDS):
        # All ranks begin together, or the wait for the last one would be measured.
        exchange_objects(turn, wire, f"{name}.{turn}")
        begin = time.perf_counter()
        once().numpy()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
