"""Contract of all schemes, with a table of their rounding; a new scheme adds a row to SCHEMES.

The table includes a custom scheme of the benchmarks.
"""

import functools

import numpy as np
import tensorflow as tf

from benchmarks.baselines import OneBit
from tfposeidon import schemes

SCHEMES = {
    "allreduce": (schemes.AllReduce(), 0.0),
    "allreduce float16": (schemes.AllReduce(wire_dtype="float16"), 2e-3),
    "alltoall": (schemes.AllToAll(), 0.0),
    "alltoall float16": (schemes.AllToAll(wire_dtype="float16"), 1e-3),
    "alltoall bfloat16": (schemes.AllToAll(wire_dtype="bfloat16"), 8e-3),
    "torus2d": (schemes.Torus2D(), 0.0),
    "torus2d bfloat16": (schemes.Torus2D(wire_dtype="bfloat16"), 1.2e-2),
    "ps": (schemes.ParameterServer(), 0.0),
    "onebit": (OneBit(min_elements=0), None),
    "hitopk": (schemes.HiTopK(density=0.02, min_elements=0), None),
    "hitopk bfloat16": (
        schemes.HiTopK(
            density=0.1, wire_dtype="bfloat16", select="dgc", momentum=0.5, min_elements=0
        ),
        None,
    ),
    "hitopk warm-up": (
        schemes.HiTopK(density=0.005, warmup_steps=3, min_elements=0),
        None,
    ),
    "topk": (schemes.TopK(density=0.01, min_elements=0), None),
    "topk float16": (
        schemes.TopK(density=0.01, wire_dtype="float16", min_elements=0),
        None,
    ),
}
"""Scheme, and its rounding relative to the largest value: 0 if exact, None with state."""

OF_EACH_CLASS = list({type(scheme): scheme for scheme, _ in reversed(SCHEMES.values())}.values())
"""One scheme of each class, for tests that do not depend on options."""

LENGTHS = (0, 1, 7, 64, 10_007)


def gradient(length, rank, dtype="float32"):
    """Returns whole numbers, whose sums are exact in any order."""
    generator = np.random.default_rng([length, rank])
    return generator.integers(-64, 64, length).astype(dtype)


@functools.cache
def _mean(length, size):
    return np.mean([gradient(length, rank, "float64") for rank in range(size)], axis=0)


def fresh_state(scheme, length, topology):
    """Returns the state that the optimizer has at the first step."""
    return tuple(tf.zeros(slot.shape) for slot in scheme.slots(length, topology))


def settled_state(scheme, length, topology):
    """Returns a state after the warm-up, when costs are those that `cost` predicts."""
    # Residuals are nonzero, because zeros make the code of one-bit gradients longer.
    return tuple(
        tf.fill(t.shape, 100.0 if t.shape.rank == 0 else 0.25)
        for t in fresh_state(scheme, length, topology)
    )


def check(name, length, wire, run=lambda function, *args: function(*args)):
    """Exchanges one gradient on this rank, and returns its mean for comparison over ranks.

    Args:
      run: Function that calls the exchange, eagerly or in a `tf.function`.
    """
    scheme, rounding = SCHEMES[name]
    topology = wire.topology
    mine = gradient(length, topology.rank)
    given = tf.constant(mine)
    label = f"contract.{name}.{length}".replace(" ", "_")
    before = settled_state(scheme, length, topology)
    mean, state = run(lambda vector: scheme.exchange(vector, before, wire, label), given)
    assert [tensor.shape for tensor in state] == [tensor.shape for tensor in before]
    assert mean.dtype == given.dtype
    assert mean.shape == (length,)
    np.testing.assert_array_equal(given.numpy(), mine, "the input was changed")
    if rounding is not None:
        tolerance = max(rounding, 2**-23) * 64
        np.testing.assert_allclose(
            mean.numpy(), _mean(length, topology.size), rtol=0, atol=tolerance
        )
    return mean.numpy()


def check_conservation(
    scheme, length, wire, steps, label, run=lambda function, *args: function(*args), flush_at=None
):
    """Asserts at every step that ranks retain exactly what they do not send.

    Over all ranks: sum(gradient + old residual) = ranks x update + sum(new residual). With momentum
    correction, the incoming velocity replaces the gradient.

    Args:
      flush_at: Step that sends all residuals; afterwards they must be zero.
    """
    topology = wire.topology
    slots = scheme.slots(length, topology)
    state = fresh_state(scheme, length, topology)

    def exchange(vector, *state):
        return scheme.exchange(vector, state, wire, f"{label}.{step}")

    for step in range(steps):
        if step == flush_at:
            state = scheme.flushing(state)
        mine = (
            np.random.default_rng([step, length, topology.rank])
            .normal(size=length)
            .astype("float32")
        )
        before = _placed(slots, state, length)
        mean, state = run(exchange, tf.constant(mine), *state)
        after = _placed(slots, state, length)
        given = mine + before["residual"] + getattr(scheme, "momentum", 0.0) * before["velocity"]
        totals = _summed(np.stack([given, after["residual"]]), wire, f"{label}.{step}")
        np.testing.assert_allclose(totals[0], topology.size * mean.numpy() + totals[1], atol=1e-4)
        if flush_at is not None and step >= flush_at:
            assert not totals[1].any()
    return mean.numpy(), state


def _placed(slots, state, length):
    """Returns residual and velocity of this rank as full vectors, 0 outside of its parts."""
    vectors = {"residual": np.zeros(length, "float32"), "velocity": np.zeros(length, "float32")}
    for slot, tensor in zip(slots, state, strict=True):
        if slot.shape:
            vectors[slot.name][slot.offset : slot.offset + slot.shape[0]] = tensor.numpy()
    return vectors


def _summed(array, wire, label):
    everybody = wire.all_gather(tf.constant(array[None]), wire.topology.world, f"{label}.totals")
    return everybody.numpy().astype("float64").sum(axis=0)
