"""Public collectives agree in eager code, functions, loops and branches, and with constants."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks
from tfposeidon.communication.wire import exchange_objects

pytestmark = pytest.mark.ranks("2")


def _both(function):
    """Returns the results of two eager calls and of two traced functions."""
    return [function(), function(), *(tf.function(function)() for _ in range(2))]


def test_all_reduce_sums_and_averages_every_dtype(wire):
    rank, size = wire.topology.rank, wire.topology.size
    for dtype in ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8"):
        for shape in ((), (3,), (2, 0), (2, 3)):
            value = tf.cast(tf.fill(shape, rank + 1), dtype)
            for total in _both(lambda value=value: tp.all_reduce(value, "sum")):
                assert (total.dtype.name, total.shape) == (dtype, shape)
                assert np.all(total.numpy().astype(float) == size * (size + 1) / 2)
    for mean in _both(lambda: tp.all_reduce([1.0, float(rank)])):
        np.testing.assert_allclose(mean.numpy(), [1.0, (size - 1) / 2])
    assert int(tp.all_reduce(rank == 0, "sum")) == 1
    # The sum, 80000, exceeds the largest float16.
    assert float(tp.all_reduce(tf.constant(40000.0, tf.float16))) == 40000.0


def test_all_gather_accepts_tensors_of_unknown_rank(wire):
    unknown = tf.function(
        lambda x: tp.all_gather(tf.py_function(lambda value: value, [x], tf.float32))
    )
    found = unknown(tf.fill([2], float(wire.topology.rank))).numpy()
    assert found.tolist() == [float(r) for r in range(wire.topology.size) for _ in range(2)]


def test_several_collectives_share_one_graph(wire):
    @tf.function
    def inner(x):
        return tp.all_reduce(x, "sum", name="inner")

    @tf.function
    def outer(x):
        return tp.all_reduce(x), tp.all_reduce(2 * x), inner(x), tp.all_gather(x[tf.newaxis])

    size = wire.topology.size
    for turn in range(3):
        mean, twice, total, everybody = outer(tf.constant(float(wire.topology.rank + turn)))
        expected = np.arange(size) + turn
        np.testing.assert_allclose(everybody.numpy(), expected)
        np.testing.assert_allclose(
            [mean, twice, total], [expected.mean(), 2 * expected.mean(), expected.sum()]
        )


def test_collectives_in_loops_and_branches_agree(wire):
    """TensorFlow numbers loops and branches within each process, so their names differ."""
    if wire.topology.rank == 0:
        tf.function(lambda x: [tf.cond(x > i, lambda: x, lambda: -x) for i in range(10)])(
            tf.constant(1.0)
        )

    @tf.function
    def total():
        added = tf.zeros([])
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            added += tp.all_reduce(1.0, "sum") + tp.all_reduce(tf.ones([2]), "sum")[0]
        return tf.cond(added > 0.0, lambda: added + tp.all_reduce(1.0, "sum"), lambda: added)

    assert float(total()) == 7 * wire.topology.size


def test_all_gather_joins_unequal_parts(wire):
    rank, size = wire.topology.rank, wire.topology.size
    for joined in _both(lambda: tp.all_gather(tf.fill([rank + 1, 2], rank))):
        np.testing.assert_array_equal(
            joined.numpy()[:, 0], np.repeat(np.arange(size), np.arange(size) + 1)
        )
    for scalars in _both(lambda: tp.all_gather(rank)):
        assert scalars.numpy().tolist() == list(range(size))


NUMBERS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e5m2", "float8_e4m3fn"),
)


def _real(tensor):
    return tensor.numpy().real.astype("float32").tolist()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_dtype_is_sent(wire, dtype):
    rank, size = wire.topology.rank, wire.topology.size
    value = tf.cast(tf.constant([[rank, 1.0]]), dtype)
    for joined in _both(lambda: tp.all_gather(value)):
        assert joined.dtype.name == dtype
        assert _real(joined) == [[r, 1] for r in range(size)]
    variable = tf.Variable(value)
    tp.broadcast_variables((variable,), size - 1)
    assert _real(variable) == [[size - 1, 1]]
    if "float8" in dtype:
        with Raises(ValueError, f"requires a numeric tensor. Received: dtype {dtype}. Cast it"):
            tp.all_reduce(value, "sum")
        return
    for total in _both(lambda: tp.all_reduce(value, "sum")):
        assert total.dtype.name == ("int32" if dtype == "bool" else dtype)
        assert _real(total) == [[1, size]]


def test_text_is_gathered_and_broadcast_but_not_reduced(wire):
    rank, size = wire.topology.rank, wire.topology.size
    mine = [[f"rank {rank}", "é"], ["", "\0"]][: 1 + rank]
    for joined in _both(lambda: tp.all_gather(mine)):
        expected = [row for r in range(size) for row in [[f"rank {r}", "é"], ["", "\0"]][: 1 + r]]
        assert joined.numpy().tolist() == [[text.encode() for text in row] for row in expected]
    assert tp.all_gather(str(rank)).numpy().tolist() == [b"0", b"1"]
    many = [f"{number:060d}" for number in range(20_000)]
    assert tp.all_gather(many).numpy().tolist() == [text.encode() for text in size * many]
    variable = tf.Variable([f"of rank {rank}", "é"])
    tp.broadcast_variables({"text": variable})
    assert variable.numpy().tolist() == [b"of rank 0", "é".encode()]
    with Raises(ValueError, "all_reduce requires a numeric tensor. Received: dtype string"):
        tp.all_reduce("text", "sum")


def test_collectives_accept_nested_structures(wire):
    rank = wire.topology.rank
    given = {"loss": 1.0 + rank, "more": [tf.constant([rank, 2.0]), (np.float32(rank), [1.0, 2.0])]}
    for means in _both(lambda: tp.all_reduce(given)):
        assert list(means) == ["loss", "more"]
        assert float(means["loss"]) == 1.5
        vector, (scalar, numbers) = means["more"]
        assert (vector.numpy().tolist(), float(scalar)) == ([0.5, 2.0], 0.5)
        assert numbers.numpy().tolist() == [1.0, 2.0]
    assert tp.all_gather({"a": rank})["a"].numpy().tolist() == [0, 1]
    weights = {"b": [keras.Variable([float(rank)])], "a": keras.Variable(float(rank))}
    tp.broadcast_variables(weights, 1)
    assert [float(weights["a"]), float(weights["b"][0][0])] == [1.0, 1.0]


def test_different_values_on_ranks_are_refused(wire):
    rank = wire.topology.rank
    with Raises(
        RuntimeError,
        r"of the same structure and type to a collective. "
        r"Received:  \['mean', 'float32', \[2, 3\]\] on",
    ):
        tp.all_reduce(tf.zeros([2 + rank, 3 - rank]))
    with Raises(RuntimeError, r"Received:  \['mean', 'float32', \[\]\] on rank 0"):
        tp.all_reduce(tf.cast(1.0, ["float32", "float64"][rank]))
    with Raises(RuntimeError, r"Received: a \['mean', 'float32', \[\]\] on rank 0, none on rank 1"):
        tp.all_reduce({"ab"[rank]: 1.0})
    with Raises(RuntimeError, r"Received:  \['sum', 'float32', \[\]\] on rank 0"):
        tp.all_reduce(1.0, ["sum", "mean"][rank])
    with Raises(
        RuntimeError, r"Received:  \['float32', \[3\]\] on rank 0, \['float32', \[4\]\] on rank 1"
    ):
        tp.all_gather(tf.zeros([2, 3 + rank]))
    # If one rank passes an invalid value, the other rank raises an error and does not wait.
    other = f"{'rank 1: ' if rank == 0 else ''}A collective requires tensors, numbers"
    with Raises(ValueError, other):
        tp.all_reduce([1.0, tf.ragged.constant([[1], [2, 3]])][rank])
    with Raises(ValueError, "which are updated in place. Received: float."):
        tp.broadcast_variables([1.0])


def test_barrier_runs_eagerly_and_traced(wire):
    tp.barrier()

    @tf.function
    def waits():
        tp.barrier()
        return tf.constant(1)

    assert int(waits()) == 1


def test_ranks_of_a_custom_loop_start_and_stay_equal(wire):
    keras.utils.set_random_seed(wire.topology.rank)
    model, optimizer = models.mlp(), tp.DistributedOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)
    first = exchange_objects(models.digest(model.get_weights()), wire, "first")
    assert len(set(first)) == wire.topology.size
    tp.broadcast_variables([*model.variables, *optimizer.variables])

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return tp.all_reduce(loss)

    x, y = models.mlp.data(8 * wire.topology.size)
    mine = slice(wire.topology.rank, None, wire.topology.size)
    losses = [float(step(x[mine], y[mine])) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert len({str(other) for other in exchange_objects(losses, wire, "losses")}) == 1
    same_on_all_ranks(model.get_weights(), wire)


def test_invalid_arguments_are_refused(wire):
    weight = keras.Variable([1.0])
    with Raises(
        ValueError, f"must be a rank of the job, 0 to {wire.topology.size - 1}. Received: 9"
    ):
        tp.broadcast_variables([weight], 9)
    with Raises(
        ValueError, "broadcast_variables must be called outside of tf.function. Received: a call"
    ):
        tf.function(lambda: tp.broadcast_variables([weight]))()
    with Raises(ValueError, '`op` must be "mean" or "sum"'):
        tp.all_reduce(1.0, "max")
    with Raises(ValueError, 'op="mean" requires a floating-point tensor. Received: dtype=int32'):
        tp.all_reduce(1)
