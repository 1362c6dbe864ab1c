"""A model of `keras.applications` with large dense layers and random weights trains under HybComm.

Models that take longer to trace (ConvNeXtTiny, MobileNetV2, Inception, Xception, DenseNet),
ResNet50V2 and EfficientNetV2B0 were tested by hand.
"""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2x1")

NAMES = ("VGG16",)
SIDE = 32
"""Side in pixels of the smallest images that the model accepts."""


def _trained(name, wire):
    model = getattr(keras.applications, name)(weights=None, input_shape=(SIDE, SIDE, 3), classes=5)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1e-3), scheme="hybcomm")
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    generator = np.random.default_rng(wire.topology.rank)
    x, y = generator.normal(size=(2, SIDE, SIDE, 3)).astype("float32"), generator.integers(0, 5, 2)
    classifier = model.layers[-1].kernel
    before = classifier.numpy()
    model.fit(x, y, batch_size=2, verbose=0)
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
    assert np.abs(classifier.numpy() - before).max() > 0
    return optimizer.plan, classifier.path


def test_the_classifier_uses_factors_and_other_layers_the_server(wire):
    for name in NAMES:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        plan, classifier = _trained(name, wire)
        schemes = {
            d.path: bucket.scheme.name for bucket in plan.buckets for d in bucket.descriptions
        }
        # With two samples per rank, the classifier's factors have fewer bytes than its matrix.
        assert schemes[classifier] == "factors", (name, schemes)
        assert "ps" in schemes.values()
