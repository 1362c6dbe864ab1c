"""Completes what an optimizer would find out from whole gradients, where it gets parts of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.optimizers.wrapping import innermost


def clip_by_whole_norms(
    gradients: list[Any], served: Sequence[int], optimizer: Any, wire: Wire, name: str
) -> list[Any]:
    """Clips by norms of whole gradients, and shows values that are not finite to all ranks.

    The optimizer must not clip once more: norms of parts differ between ranks.

    Args:
      gradients: Parts of those of `served`, the others whole; `None` where there is none.
      served: Places of gradients whose parts lie on all ranks.
      optimizer: What they are for; it may scale losses.
      name: Of the one small all-reduce, which is left out where nothing asks for it.
    """
    inner = innermost(optimizer)
    by_norm = bool(inner.clipnorm or inner.global_clipnorm)
    if not (by_norm or (served and isinstance(optimizer, keras.optimizers.LossScaleOptimizer))):
        return gradients
    result = list(gradients)
    squares, finite = _reduced([gradients[place] for place in served], wire, name)
    for place in served:
        # One that is not finite counts for all: so it does on one rank alone.
        result[place] = tf.where(finite, gradients[place], float("nan"))
    if not by_norm:
        return result
    # Clipped before the loss scale is taken off, so the limit is scaled.
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)
    known = dict(zip(served, squares, strict=True))
    norms = {
        m: known[m] if m in known else _square(g) for m, g in enumerate(result) if g is not None
    }
    if inner.global_clipnorm:
        norms = dict.fromkeys(norms, tf.add_n(list(norms.values())))
    limit = (inner.clipnorm or inner.global_clipnorm) * scale
    for place, square in norms.items():
        result[place] = _clipped(result[place], tf.sqrt(square), limit)
    return result


def _reduced(
    parts: Sequence[tf.Tensor], wire: Wire, name: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Squared norm of each gradient, and whether all of them are finite, over all ranks."""
    if not parts:
        return [], tf.constant(True)
    unbounded = tf.add_n(
        [tf.reduce_sum(tf.cast(~tf.math.is_finite(part), tf.float32)) for part in parts]
    )
    total = wire.all_reduce(tf.stack([*map(_square, parts), unbounded]), wire.topology.world, name)
    *squares, unbounded = tf.unstack(total)
    return squares, unbounded == 0.0


def _clipped(gradient: tf.Tensor, norm: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    # As Keras: with a norm that is not finite nothing is.
    factor = limit / tf.maximum(norm, limit) + (norm - norm)
    return gradient * tf.cast(factor, gradient.dtype)


def _square(gradient: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
