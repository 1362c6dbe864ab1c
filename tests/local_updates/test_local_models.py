"""Tests `LocalUpdates` with typical models and inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import hub, models
from tests.helpers.local_updates import own_weights
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import BATCH, adam, sgd

pytestmark = pytest.mark.ranks("2x1")

EVERY = 3


def _check(model, start, wire):
    """Checks that global weights are equal and have changed, and that local weights differ."""
    weights = model.get_weights()
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
    assert all(np.isfinite(w).all() for w in weights)
    assert max(np.abs(a - b).max() for a, b in zip(weights, start, strict=True)) > 1e-4
    own = exchange_objects(models.digest(own_weights(model)), wire, "own")
    assert len(set(own)) == wire.topology.size


def test_gemma_with_lora_trains_in_half_precision(wire):
    """LoRA trains few of the weights, and the texts have any length."""
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy("mixed_float16")
    model, local = hub.gemma_with_lora(), BATCH // wire.topology.size
    start = model.get_weights()
    scheme = tp.schemes.AllToAll(wire_dtype="float16")
    optimizer = tp.LocalUpdates(adam(), EVERY, "outer", scheme, overlap_steps=1)
    model.compile(optimizer, models.LOSS)
    data = models.share(hub.make_texts(4 * BATCH), BATCH, wire.topology)
    model.fit(models.of_any_length(*data, local).prefetch(1), verbose=0)
    _check(model, start, wire)


def test_moving_statistics_are_synchronized_with_augmentation(wire):
    """MobileNet, whose trace takes longer, was tested by hand."""
    model = models.normalized()
    start = model.get_weights()
    model.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS)
    data = models.share(models.normalized.data(4 * BATCH), BATCH, wire.topology)
    model.fit(*data, batch_size=BATCH // wire.topology.size, verbose=0)
    statistics = [v for v in model.non_trainable_variables if "moving" in v.path]
    assert statistics
    same_on_all_ranks([v.numpy() for v in statistics], wire)
    _check(model, start, wire)


def test_a_pydataset_trains_in_half_precision_with_accumulation(wire):
    """Threads read the data, and an execution has several steps."""
    keras.config.set_dtype_policy("mixed_float16")
    model = models.mlp()
    start = model.get_weights()
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(tp.LocalUpdates(inner, sync_every=4), models.LOSS, steps_per_execution=2)
    model.fit(models.Batches(*models.mlp.data(10 * BATCH), BATCH, workers=2), epochs=2, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert max(np.abs(a - b).max() for a, b in zip(model.get_weights(), start, strict=True)) > 1e-4


def test_embeddings_with_repeated_tokens_train(wire):
    """Sparse gradients stay on their rank, because only weights are sent."""
    keras.utils.set_random_seed(5)
    model = models.embedding()
    start = model.get_weights()
    x, y = models.embedding.data(4 * BATCH)
    model.compile(tp.LocalUpdates(adam(), EVERY, scheme="topk"), models.LOSS)
    share = models.share((x, y), BATCH, wire.topology)
    data = tf.data.Dataset.from_tensor_slices(share).batch(BATCH // wire.topology.size)
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.MetricAverage()]
    history = model.fit(data, validation_data=data.take(1), verbose=0, callbacks=callbacks).history
    assert len(set(exchange_objects(history["loss"][-1], wire, "loss"))) == 1
    _check(model, start, wire)
