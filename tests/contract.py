"""The table of what every scheme promises. A new scheme adds one row to SCHEMES."""

import numpy as np
import tensorflow as tf

from tfposeidon import schemes

SCHEMES = {
    "allreduce": (schemes.AllReduce(), 0.0),
    "allreduce float16": (schemes.AllReduce(wire_dtype="float16"), 2e-3),
    "asa": (schemes.AllToAll(), 0.0),
    "asa float16": (schemes.AllToAll(wire_dtype="float16"), 1e-3),
    "asa bfloat16": (schemes.AllToAll(wire_dtype="bfloat16"), 8e-3),
    "2dtar": (schemes.Torus2D(), 0.0),
    "2dtar bfloat16": (schemes.Torus2D(wire_dtype="bfloat16"), 1.2e-2),
}
"""Scheme, and its rounding relative to the largest value (0 for exact schemes)."""

LENGTHS = (0, 1, 7, 64, 10_007)


def gradient(length, rank, dtype="float32"):
    """Whole numbers, so that sums are known exactly in any order."""
    generator = np.random.default_rng([length, rank])
    return generator.integers(-64, 64, length).astype(dtype)


def check(name, length, wire, run=lambda function, *args: function(*args)):
    """Exchanges one gradient on this rank; returns its mean for comparison over ranks.

    Args:
      run: How to call the exchange: as it is, or compiled by `tf.function`.
    """
    scheme, rounding = SCHEMES[name]
    topology = wire.topology
    mine = gradient(length, topology.rank)
    given = tf.constant(mine)
    label = f"contract.{name}.{length}".replace(" ", "_")
    mean, state = run(lambda vector: scheme.exchange(vector, (), wire, label), given)
    expected = np.mean([gradient(length, rank, "float64") for rank in range(topology.size)], axis=0)
    assert state == ()
    assert mean.dtype == given.dtype
    assert mean.shape == (length,)
    np.testing.assert_array_equal(given.numpy(), mine, "the input was changed")
    tolerance = max(rounding, 2**-23) * 64
    np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=tolerance)
    return mean.numpy()
