"""Every Keras layer with weights trains as in one process, with factors or without."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests import keras_layers
from tests.helpers.models import copy, same_on_all_ranks
from tests.helpers.training import BATCH, check_close, check_equal, train_alone, train_together

pytestmark = pytest.mark.ranks("2x1")

STEPS = 3
LEFT_OUT = {
    "BatchNormalization": "each rank computes the statistics of its own samples",
    "GRUCell": "as in GRU",
    "LSTMCell": "as in LSTM",
    "SimpleRNNCell": "as in SimpleRNN",
    "RNN": "as in SimpleRNN",
}
CASES = [case for name, case in keras_layers.CASES.items() if name not in LEFT_OUT]


def test_every_layer_trains_as_in_one_process(wire):
    """One model contains all layers with samples of one shape."""
    for kind in dict.fromkeys((case.shape, case.dtype) for case in CASES):
        _check(_Side(*kind), wire)


class _Side:
    """Builds a model of all layers for samples of one shape, with one score per layer."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self.cases = [case for case in CASES if (case.shape, case.dtype) == (shape, dtype)]

    def __call__(self):
        x = keras.Input(self.shape, dtype=self.dtype)
        # A constant score gives the loss a second class, even for a single layer.
        nothing = keras_layers.number(0.0 * keras.ops.cast(x, "float32"))
        scores = [keras_layers.number(case.apply(x)) for case in self.cases]
        return keras.Model(x, keras.ops.concatenate([nothing, *scores], axis=1))

    def data(self, count):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(count, *self.shape))
        if self.dtype == "int32":
            x = draw.integers(0, keras_layers.VOCABULARY, x.shape)
        return x.astype(self.dtype), draw.integers(0, len(self.cases) + 1, count)


def _check(build, wire):
    data, start = build.data(STEPS * BATCH), build()
    reference = train_alone(copy(build, start), data, keras.optimizers.SGD(0.1))
    model = copy(build, start)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="hybcomm")
    weights = train_together(model, data, optimizer, wire)
    same_on_all_ranks(weights, wire)
    check_equal(weights, reference)
    # Biases of keys cancel in the softmax, so they change only by rounding.
    triples = zip(weights, reference, start.get_weights(), strict=True)
    moved = [triple for triple in triples if np.linalg.norm(triple[1] - triple[2]) > 1e-6]
    assert len(weights) - len(moved) <= len(build.cases) // 10
    check_close(*zip(*moved, strict=True), 1e-3)
    _check_plan(optimizer.plan, [shape for case in build.cases for shape in case.factors])


def _check_plan(plan, expected):
    """Checks which variables have factors, and that the plan states why the others have none."""
    factors = []
    for bucket in plan.buckets:
        for description, choice in zip(bucket.descriptions, bucket.choices, strict=True):
            if description.structure is None:
                assert description.why_no_structure, description.path
                assert description.why_no_structure in choice.reason, (
                    description.path,
                    choice.reason,
                )
            else:
                factors.append(tuple(description.shape))
    assert sorted(factors) == sorted(expected)
