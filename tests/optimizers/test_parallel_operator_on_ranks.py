"""On ranks, the parallel tensor operator equals one process, and errors reach all ranks."""

import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2")

WEIGHTS = [
    np.random.default_rng(i).normal(size=shape)
    for i, shape in enumerate([(64, 3), (1,), (7, 5), (2, 2), (90,)])
]


def weights():
    return [tf.constant(w, "float32") for w in WEIGHTS]


def norms(tensors):
    return tf.stack([tf.norm(tensor) for tensor in tensors])


def test_lists_are_processed_in_parallel(wire):
    whole = norms(weights()).numpy()
    for run in (lambda f: f, tf.function):
        found = run(lambda: tp.parallel_tensor_operator(norms, weights()))().numpy()
        np.testing.assert_array_equal(found, whole)
        same_on_all_ranks([found], wire)


def test_a_list_may_have_fewer_items_than_ranks(wire):
    one = weights()[:1]
    np.testing.assert_array_equal(tp.parallel_tensor_operator(norms, one), norms(one))


def test_lists_of_pairs_are_processed_in_parallel(wire):
    pairs = list(zip(weights(), weights()[::-1], strict=True))
    found = tp.parallel_tensor_operator(
        lambda some: tf.stack([norms(pair) for pair in some]), pairs
    )
    np.testing.assert_array_equal(found, tf.stack([norms(pair) for pair in pairs]))


def test_one_tensor_is_split_along_its_first_axis(wire):
    tensor = tf.reshape(tf.range(7 * 3, dtype=tf.int64), [7, 3])
    compiled = tf.function(lambda: tp.parallel_tensor_operator(lambda rows: rows**2, tensor))
    np.testing.assert_array_equal(compiled(), tensor**2)


def test_results_may_have_any_length(wire):
    values = tf.constant(np.random.default_rng(3).normal(size=1000), "float32")
    found = tp.parallel_tensor_operator(lambda part: part[part > 1.5], values)
    np.testing.assert_array_equal(found, values[values > 1.5])
    nothing = tp.parallel_tensor_operator(lambda part: part[part > 99.0], values)
    assert nothing.shape == (0,)


def test_the_operator_runs_in_every_step_of_a_loop(wire):
    variables = [tf.Variable(w) for w in weights()]

    @tf.function
    def step():
        for variable, norm in zip(
            variables, tf.unstack(tp.parallel_tensor_operator(norms, variables), 5), strict=True
        ):
            variable.assign(variable / norm)

    for _ in range(3):
        step()
    np.testing.assert_allclose(norms(variables), np.ones(5), rtol=1e-6)
    same_on_all_ranks([v.numpy() for v in variables], wire)


def test_different_tensors_on_a_rank_are_refused(wire):
    mine = weights()[: 3 if wire.topology.rank else 4]
    problem = (
        r"same tensors.*first difference at item 3: \[\['float32', \[2, 2\]\]\] on rank 0, "
        r"none \(there are 3\)"
    )
    with Raises(RuntimeError, problem):
        tp.parallel_tensor_operator(norms, mine)
    mine = [tf.cast(w, "float64") if wire.topology.rank else w for w in weights()]
    with Raises(RuntimeError, "same tensors.*float32.* on rank 0, .*float64.* on rank 1"):
        tp.parallel_tensor_operator(norms, mine)


def test_inconsistent_parts_are_refused(wire):
    def columns(some):
        return tf.zeros([len(some), 2 if wire.topology.rank else 3])

    with Raises(
        RuntimeError,
        r"must have one dtype, and one shape.*"
        r"float32 \[\?, 3\] on rank 0, float32 \[\?, 2\] on rank 1",
    ):
        tp.parallel_tensor_operator(columns, weights())


def test_a_failing_function_on_one_rank_raises_on_all_ranks(wire):
    def fails(some):
        if wire.topology.rank == 1:
            raise KeyError("no such layer")
        return norms(some)

    expected = (
        (KeyError, "no such layer")
        if wire.topology.rank == 1
        else (RuntimeError, "on rank 1: KeyError.*no such")
    )
    with Raises(*expected):
        tp.parallel_tensor_operator(fails, weights())
    with Raises(*expected):
        tf.function(lambda: tp.parallel_tensor_operator(fails, weights()), autograph=False)()
    # The job continues after the error.
    test_lists_are_processed_in_parallel(wire)


def test_a_non_tensor_on_one_rank_raises_on_all_ranks(wire):
    mine = [weights()[0], None] if wire.topology.rank == 1 else weights()[:2]
    expected = (
        (ValueError, "NoneType")
        if wire.topology.rank == 1
        else (RuntimeError, "on rank 1: ValueError.*NoneType")
    )
    with Raises(*expected):
        tp.parallel_tensor_operator(norms, mine)


def test_gradients_through_the_operator_are_refused(wire):
    with tf.GradientTape() as tape:
        variable = tf.Variable(tf.ones([8]))
        found = tp.parallel_tensor_operator(lambda part: part**2, variable)
    with Raises(LookupError, "a parallel tensor operator has no gradient"):
        tape.gradient(found, variable)


def test_invalid_tensors_and_functions_are_refused(wire):
    scalar = tf.constant(1.0)
    for function, tensors, problem in (
        (norms, [], "tensors of known shapes"),
        (norms, scalar, "it divides the tensor. Received: shape ()"),
        (lambda some: scalar, weights(), "must return a tensor .m, .... .*float32, shape ()"),
        (
            lambda some: tf.cast(norms(some), tf.bfloat16),
            weights(),
            "whose dtype Horovod supports.*bfloat16",
        ),
    ):
        # Ranks without a part receive the error from other ranks.
        with Raises((ValueError, RuntimeError), problem):
            tp.parallel_tensor_operator(function, tensors)
    with Raises(ValueError, "must run without XLA"):
        tf.function(
            lambda: tp.parallel_tensor_operator(norms, weights()), jit_compile=True, autograph=False
        )()
