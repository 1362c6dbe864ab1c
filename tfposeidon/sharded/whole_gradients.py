"""Norms and non-finite values of whole gradients, for optimizers that get parts of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.optimizers.layer_wise import Norms, local_norms
from tfposeidon.optimizers.wrapping import innermost


def clip_by_whole_norms(
    gradients: list[Any], served: Sequence[int], optimizer: Any, wire: Wire, name: str
) -> list[Any]:
    """Clips by norms of whole gradients, and shows values that are not finite to all ranks.

    The optimizer must not clip once more: norms of parts differ between ranks.

    Args:
      gradients: Gradients: parts of this rank for indices in `served`, whole ones for others;
        `None` where there is none.
      served: Indices of gradients whose parts lie on all ranks.
      optimizer: Optimizer of the gradients; it may scale losses.
      wire: Collectives that join the ranks.
      name: Name of the one small all-reduce, which is left out where nothing asks for it.

    Returns:
      Clipped gradients. If the optimizer clips by norm or scales losses, and a part on some rank is
      not finite, then all parts on all ranks are NaN, so that all skip the step alike.
    """
    inner = innermost(optimizer)
    by_norm = bool(inner.clipnorm or inner.global_clipnorm)
    if not (by_norm or (served and isinstance(optimizer, keras.optimizers.LossScaleOptimizer))):
        return gradients
    result = list(gradients)
    squares, finite = _reduced([gradients[index] for index in served], wire, name)
    for index in served:
        # One value that is not finite counts for all, as it does on a single rank.
        result[index] = tf.where(finite, gradients[index], float("nan"))
    if not by_norm:
        return result
    # Gradients are clipped before the loss scale is taken off them, so the limit is scaled, too.
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)
    known = dict(zip(served, squares, strict=True))
    squared_norms = {
        m: known[m] if m in known else _square(g) for m, g in enumerate(result) if g is not None
    }
    if inner.global_clipnorm:
        squared_norms = dict.fromkeys(squared_norms, tf.add_n(list(squared_norms.values())))
    limit = (inner.clipnorm or inner.global_clipnorm) * scale
    for index, square in squared_norms.items():
        result[index] = _clipped(result[index], tf.sqrt(square), limit)
    return result


def _reduced(
    parts: Sequence[tf.Tensor], wire: Wire, name: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the squared norm of each gradient, and whether all are finite, over all ranks."""
    if not parts:
        return [], tf.constant(True)
    # Counted apart from the squares: these may overflow where all values are finite.
    unbounded = tf.add_n(
        [tf.reduce_sum(tf.cast(~tf.math.is_finite(part), tf.float32)) for part in parts]
    )
    total = wire.all_reduce(tf.stack([*map(_square, parts), unbounded]), wire.topology.world, name)
    *squares, unbounded = tf.unstack(total)
    return squares, unbounded == 0.0


def _clipped(gradient: tf.Tensor, norm: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    # Keras does the same: if the norm is not finite, nothing is (norm - norm is NaN then).
    factor = limit / tf.maximum(norm, limit) + (norm - norm)
    return gradient * tf.cast(factor, gradient.dtype)


def _square(gradient: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))


def sharded_norms(wire: Wire, served: Callable[[Any], bool], name: str) -> Norms:
    """Returns a function for norms of variables of which ranks hold parts: it sums their squares.

    Args:
      wire: Collectives that join the ranks.
      served: Function that returns whether this rank has only a part of a variable.
      name: Name of the one small all-reduce.
    """

    def norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        own = local_norms(variables, rows)
        parts = [index for index, variable in enumerate(variables) if served(variable)]
        if not parts:
            return own
        # In 64 bits: a square of what float32 holds may be more than it holds.
        squares = tf.square(tf.cast(tf.gather(own, parts), tf.float64))
        total = wire.all_reduce(tf.reshape(squares, [-1]), wire.topology.world, name)
        whole = tf.cast(tf.sqrt(tf.reshape(total, squares.shape)), own.dtype)
        return tf.tensor_scatter_nd_update(own, [[index] for index in parts], whole)

    return norms
