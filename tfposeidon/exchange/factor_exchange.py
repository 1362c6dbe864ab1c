"""Exchange of one bucket whose gradients are sent as sufficient factors.

Ranks first count the rows of all ranks, by which the scheme may choose how to send them, and then
exchange the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.communication.wire import Wire, Zeros, opaque, zeros
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.embedding_rows import Rows
from tfposeidon.gradients.factors import FactorPair
from tfposeidon.planning.plan import Bucket


def exchange(
    bucket: Bucket,
    gradients: Sequence[Any],
    weight: tf.Tensor | None,
    wire: Wire,
    name: str,
    zero: Zeros,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges factors; returns the concatenated means, and the rows of all ranks."""
    pairs = zip(gradients, bucket.descriptions, strict=True)
    factors = [_no_rows(d, zero) if g is None else g for g, d in pairs]
    rows = _agreed_rows(factors, wire, name, zero, after=[weight] if weight is not None else [])
    sent = [_sent(one, weight, zero) for one in factors]
    mean = bucket.scheme.exchange_products(sent, rows, bucket.dtype, wire, name)
    mean = tf.ensure_shape(mean, [bucket.length])
    # The local term is the same on all ranks, so each adds it to the mean itself.
    if any(one.local is not None for one in factors):
        mean += tf.concat(
            [_local(one, d, zero) for one, d in zip(factors, bucket.descriptions, strict=True)], 0
        )
    return mean, rows


def _agreed_rows(
    factors: Sequence[FactorPair], wire: Wire, name: str, zero: Zeros, after: Sequence[tf.Tensor]
) -> tf.Tensor:
    # Activations are known in the forward pass, so the sum is mostly ready before the first
    # gradient. It waits for them and for the weight even if shapes are static, because a rank whose
    # iterator has just ended must not have counted. Run on the CPU, because branching on a GPU
    # tensor would wait for the GPU.
    with tf.device("/CPU:0"), tf.control_dependencies([*(one.left for one in factors), *after]):
        mine = tf.cast(tf.add_n([tf.shape(one.left)[0] for one in factors]), tf.float32)
        # Static shapes are constants, which a collective must not receive.
        mine += zero["float32"].read_value()
        return wire.all_reduce(mine[tf.newaxis], wire.topology.world, f"{name}.rows")[0]


def _sent(factors: FactorPair, weight: tf.Tensor | None, zero: Zeros) -> FactorPair:
    if weight is not None:
        factors = factors.weighted(weight)
    left, right = (opaque(matrix, zero["int32"]) for matrix in (factors.left, factors.right))
    return dataclasses.replace(factors, left=left, right=right)


def _no_rows(description: Description, zero: Zeros) -> FactorPair:
    shape = description.factors
    assert shape is not None
    value = zero[shape.dtype]
    if shape.indexed:
        return Rows(zeros([0], zero["int32"]), zeros([0, shape.right], value), table=shape.left)
    return FactorPair(zeros([0, shape.left], value), zeros([0, shape.right], value))


def _local(factors: FactorPair, description: Description, zero: Zeros) -> tf.Tensor:
    if factors.local is None:
        return zeros([description.length], zero[description.dtype])
    return tf.reshape(tf.cast(factors.local, description.dtype), [-1])
