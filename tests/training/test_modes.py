"""Tests every scheme in each of TensorFlow's modes, and every optimizer on one processor."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as private_config

import keras_callbacks
import tfposeidon as tp
from benchmarks.baselines import FactorServer
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import SERVED, distributed

SCHEMES = {
    "allreduce": "allreduce",
    "alltoall": "alltoall",
    "alltoall16": tp.schemes.AllToAll(wire_dtype="float16"),
    "torus": "torus2d",
    "ps": "ps",
    "factors": "factors",
    "server": FactorServer(),
    "hybrid": "hybcomm",
    "exact": tp.schemes.HiTopK(density=0.1, min_elements=0, select="exact"),
    "mstopk": tp.schemes.HiTopK(density=0.1, min_elements=0, select="mstopk"),
    "gathered": tp.schemes.TopK(density=0.1, min_elements=0),
}
"""Maps the name of each layer to the scheme of its weights; one model has all these layers."""
FEW = 3
"""Number of layers of models whose weights all have the same scheme."""
ONE_PROCESSOR = {
    "processors": 1,
    "environment": {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"},
}
CLUSTERS = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}


def _weights(optimizer, wire, **options):
    """Trains some steps, checks that ranks are equal, and returns the weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    has_rules = isinstance(getattr(optimizer, "policy", None), tp.policies.Rules)
    names = list(SCHEMES)[: len(SCHEMES) if has_rules else FEW]
    layers = [keras.layers.Dense(16, activation="tanh", name=name) for name in names]
    model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dropout(0.1)])
    model.compile(optimizer, "mse", **options)
    x, _ = models.share(models.mlp.data(32), 16, wire.topology)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :16])).shuffle(8, seed=1).batch(8)
    history = model.fit(data, epochs=2, verbose=0, callbacks=[keras_callbacks.MetricAverage()])
    # The server does not train.
    assert np.isfinite(history.history.get("loss", 0.0)).all()
    weights = model.get_weights()
    same_on_all_ranks(weights, wire)
    return weights


def _optimizers(**others):
    rules = [(f"{name}/", scheme) for name, scheme in (SCHEMES | others).items()]
    for scheme in (rules, SERVED, "auto"):
        yield distributed(keras.optimizers.SGD(0.05), scheme)


@contextlib.contextmanager
def _deterministic():
    tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        # There is no public function for this, and other tests share the process.
        private_config.disable_op_determinism()


@contextlib.contextmanager
def _eager():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@contextlib.contextmanager
def _where_placed():
    tf.config.set_soft_device_placement(False)
    try:
        yield
    finally:
        tf.config.set_soft_device_placement(True)


@functools.cache
def _usual(wire):
    """Returns each optimizer and its weights, trained with deterministic ops."""
    with _deterministic():
        return [(optimizer, _weights(optimizer, wire)) for optimizer in _optimizers()]


@pytest.mark.ranks("2")
def test_deterministic_ops_reproduce_the_same_bits(wire):
    for (first, once), second in zip(_usual(wire), _optimizers(), strict=True):
        with _deterministic():
            again = _weights(second, wire)
            assert float(tp.all_reduce(tf.constant(2.0))) == 2.0
        for one, other in zip(once, again, strict=True):
            np.testing.assert_array_equal(one, other)
        if not first.policy.is_fixed:
            assert "deterministic ops: the plan does not depend on measured times" in str(
                first.plan
            )


@pytest.mark.ranks("2")
@pytest.mark.parametrize("mode", [_eager, _where_placed], ids=["eager", "without soft placement"])
def test_all_modes_produce_equal_weights(wire, mode):
    # Eager gradients have no factors, which these two schemes require.
    others = {"factors": "alltoall", "server": "alltoall"} if mode is _eager else {}
    with mode():
        found = [_weights(optimizer, wire) for optimizer in _optimizers(**others)]
    for weights, (_, expected) in zip(found, _usual(wire), strict=True):
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.ranks("2", environment=CLUSTERS)
def test_replicas_stay_equal_with_automatic_clusters_of_xla(wire):
    _weights(next(_optimizers()), wire)


@pytest.mark.ranks("2", **ONE_PROCESSOR)
def test_one_processor_suffices(wire):
    for optimizer in _optimizers():
        _weights(optimizer, wire)
    accumulating = tp.DistributedOptimizer(
        keras.optimizers.Adam(0.01), gradient_accumulation_steps=2
    )
    _weights(accumulating, wire)


@pytest.mark.ranks("2", **ONE_PROCESSOR)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"outer_optimizer": "outer"},
        {"hierarchical": True, "overlap_steps": 1},
        {"overlap_steps": 1},
    ],
    ids=str,
)
def test_one_processor_suffices_for_local_updates(wire, options):
    _weights(tp.LocalUpdates(keras.optimizers.SGD(0.05), sync_every=2, **options), wire)


@pytest.mark.ranks("2", server_rank=0, **ONE_PROCESSOR)
def test_one_processor_suffices_for_a_server(wire):
    _weights(tp.ElasticAveraging(keras.optimizers.SGD(0.05), sync_every=2), wire)
