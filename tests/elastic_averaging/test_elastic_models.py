"""Tests `ElasticAveraging` with typical models and inputs; the server is on rank 0."""

import csv
import os
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import hub, models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import Raises
from tests.helpers.elastic_averaging import (
    ALPHA,
    BATCH,
    elastic_fitted,
    elastic_share,
    elastic_state,
    is_server,
    sgd,
    step_count,
    with_state,
)
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.several_optimizers import Gan, gan_data
from tests.helpers.training import adam
from tests.training.test_unbuilt_models import UNBUILT, sequential

pytestmark = pytest.mark.ranks("3", server_rank=0)


def test_bert_in_half_precision_trains_on_tf_data(wire):
    """The texts have any length, and a loss scale wraps the optimizer."""
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy("mixed_float16")
    model = hub.bert()
    start = model.get_weights()
    model.compile(tp.ElasticAveraging(adam(), sync_every=2, alpha=ALPHA), models.LOSS)
    texts = hub.make_texts(8 * BATCH)
    validation = models.of_any_length(*texts, BATCH)
    data = models.of_any_length(*elastic_share(texts), BATCH).prefetch(1)
    history = model.fit(data, validation_data=validation, epochs=2, verbose=0).history
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(tp.unwrap(model.optimizer), tp.ElasticAveraging)
    same_on_all_ranks(elastic_state(model), wire)
    moved = [np.abs(a - b).max() for a, b in zip(model.get_weights(), start, strict=True)]
    assert max(moved) > 1e-4
    assert np.isfinite(moved).all()
    if is_server():
        assert np.isfinite(history["val_loss"]).all()


@pytest.mark.parametrize("make", UNBUILT, ids=lambda make: make.__name__)
def test_the_first_batch_builds_the_model(wire, make):
    data = elastic_share(models.mlp.data(4 * BATCH))
    keras.utils.set_random_seed(tp.rank())
    model = make()
    model.compile(tp.ElasticAveraging(sgd(), sync_every=1, alpha=ALPHA), models.LOSS)
    given = data if make is sequential else (models.Batches(*data, BATCH),)
    model.fit(*given, batch_size=None, verbose=0)
    same_on_all_ranks(elastic_state(model), wire)
    assert len(model.get_weights()) == 4


def test_a_pydataset_trains_in_half_precision_with_accumulation(wire):
    """Each worker reads the data with threads, and its inner optimizer accumulates gradients."""
    keras.config.set_dtype_policy("mixed_float16")
    model = models.mlp()
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(tp.ElasticAveraging(inner, sync_every=3, alpha=ALPHA), models.LOSS)
    data = models.Batches(*models.mlp.data(120), 12, workers=2)
    history = model.fit(data, epochs=2, verbose=0).history
    same_on_all_ranks(elastic_state(model), wire)
    if is_server():
        # Each worker has 20 batches; the final exchange covers the last 2.
        assert history["exchanges"][-1] == 7 * tp.workers().size


def test_two_optimizers_of_one_train_step_train_together(wire):
    gan, made = Gan(2), [tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA) for _ in range(2)]
    gan.compile(*made)
    with Raises(ValueError, "optimizer.build"):
        gan.fit(*gan_data(8), verbose=0)
    for optimizer, part in zip(made, (gan.discriminator, gan.generator), strict=True):
        optimizer.build(part.trainable_weights)
    gan.fit(*elastic_share(gan_data(48)), batch_size=BATCH, epochs=2, verbose=0)
    same_on_all_ranks(gan.get_weights(), wire)
    assert [int(one.iterations) for one in made] == [2 * step_count(48, 2), step_count(48, 2)]


def test_an_overflow_does_not_delay_workers(wire):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        return models.mlp()

    # The first loss scales exceed the largest float16.
    inside = tp.ElasticAveraging(sgd(), sync_every=3, alpha=ALPHA)
    made = keras.optimizers.LossScaleOptimizer(inside, initial_scale=2.0**24)
    model, history = elastic_fitted(models.mlp.data(48), made, build, epochs=3)
    same_on_all_ranks(model.get_weights(), wire)
    assert np.isfinite(model.get_weights()[0]).all()
    # Skipped steps do not count as updates, but as calls between exchanges.
    assert 0 < int(made.iterations) < step_count(48, 3)
    if is_server():
        assert history["exchanges"][-1] == tp.workers().size * step_count(48, 3) / 3
    else:
        assert float(made.dynamic_scale) < 2.0**24


def test_eager_steps_train_in_half_precision(wire):
    """An evaluation in the first epoch builds the metrics, so that the log has their columns."""
    keras.config.set_dtype_policy("mixed_float16")
    folder, data = shared_folder(wire), models.mlp.data(32)
    path = os.path.join(folder, "log.csv")
    model = models.mlp()
    optimizer = tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA)
    model.compile(optimizer, models.LOSS, metrics=["accuracy"], run_eagerly=True)
    validation = {"validation_data": data, "validation_freq": 2}
    own = {"batch_size": BATCH, "epochs": 2, "callbacks": [keras.callbacks.CSVLogger(path)]}
    history = model.fit(*elastic_share(data), **own, **validation, verbose=0).history
    same_on_all_ranks(elastic_state(model), wire)
    if is_server():
        assert history["exchanges"][-1] == tp.workers().size * step_count(32, 2) / 2
    else:
        assert int(optimizer.iterations) == step_count(32, 2)
    exchange_objects(None, wire, "done")
    if is_server():
        with open(path, newline="") as stream:
            assert not any(row["val_accuracy"] == "NA" for row in csv.DictReader(stream))
        shutil.rmtree(folder)


def test_epochs_may_have_different_and_unknown_lengths(wire):
    x, y = models.mlp.data(40)
    count = 8 * (1 + tp.rank())
    data = tf.data.Dataset.from_tensor_slices((x[:count], y[:count])).batch(4)
    model = models.mlp()
    model.compile(tp.ElasticAveraging(sgd(), sync_every=2), models.LOSS)
    model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert model.optimizer.alpha == 0.9 / tp.workers().size


def test_workers_exchange_statistics_but_no_seeds_or_frozen_weights(wire):
    # Frozen weights differ at the start, and callbacks set the learning rate on workers.
    keras.utils.set_random_seed(tp.rank())
    warmup = keras_callbacks.LearningRateWarmup(0.25, warmup_epochs=1)
    model, _ = elastic_fitted(models.mlp.data(96), build=with_state, epochs=3, callbacks=[warmup])
    keras.utils.set_random_seed(7)
    same_on_all_ranks(elastic_state(model), wire)
    assert float(model.optimizer.learning_rate) == 0.25
    peak, _, normalization, _, last = model.layers
    served = [peak.peak, normalization.moving_mean, normalization.moving_variance]
    assert all((v.numpy() != start).all() for v, start in zip(served, (0, 0, 1), strict=True))
    same_on_all_ranks([v.numpy() for v in served], wire)
    # Seeds differ, although the layer was created with the same seed on all ranks.
    seeds = exchange_objects(str(model.layers[3].seed_generator.state.numpy()), wire, "seeds")
    assert len(set(seeds)) == wire.topology.size
    trained = [normalization.gamma, normalization.beta, *last.trainable_variables]
    exchanged = model.optimizer.exchanged_variables
    assert {v.path for v in exchanged} == {v.path for v in [*trained, *served]}
    if is_server():
        return
    # Simulate a step that was traced with fewer variables than the attached optimizer exchanges.
    model.optimizer.attach(types.SimpleNamespace(), 0)
    with Raises(RuntimeError, "compile them again"):
        model.optimizer._swap_values(tf.zeros([3]))
    model.optimizer.detach()


def test_a_loop_without_models_does_not_change_moving_statistics(wire):
    x, y = elastic_share(models.mlp.data(48))
    x = x + tp.rank()

    def fitted(**options):
        keras.utils.clear_session(free_memory=False)
        model = with_state()
        optimizer = tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, models.LOSS)
        given = {name: [model] for name in options}

        def train():
            for _ in range(5):
                model.train_on_batch(x, y)

        optimizer.run(train, **given)
        same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
        means = exchange_objects(model.layers[2].moving_mean.numpy().tolist(), wire, "means")
        return len({str(mean) for mean in means})

    assert fitted(models=True) == 1
    assert fitted() == tp.size()


def test_an_execution_may_have_several_exchanges(wire):
    keras.utils.clear_session(free_memory=False)
    data, model = models.mlp.data(96), models.mlp()
    optimizer = tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA)
    model.compile(optimizer, models.LOSS, steps_per_execution=3)
    history = model.fit(
        *elastic_share(data), batch_size=BATCH, epochs=2, verbose=0, shuffle=False
    ).history
    same_on_all_ranks(elastic_state(model), wire)
    assert int(optimizer.iterations) == step_count(96, 2)
    if is_server():
        assert history["exchanges"][-1] == tp.workers().size * step_count(96, 2) // 2


def test_moving_statistics_are_exchanged_with_augmentation_and_adam(wire):
    """MobileNetV2, whose trace takes a minute, was tested by hand."""
    x, y = models.normalized.data(4 * tp.workers().size)
    model = models.normalized()
    optimizer = tp.ElasticAveraging(keras.optimizers.Adam(1e-3), sync_every=1)
    model.compile(optimizer, models.LOSS)
    start = model.get_weights()
    model.fit(*elastic_share((x, y)), batch_size=2, epochs=1, verbose=0)
    same_on_all_ranks(elastic_state(model), wire)
    assert int(optimizer.iterations) == 2
    exchanged = {id(v) for v in optimizer.exchanged_variables}
    assert {id(v) for v in model.variables if "seed" not in v.path} == exchanged
    # The server receives the weights and statistics that only workers train.
    moved = [np.abs(a - b).max() > 0 for a, b in zip(model.get_weights(), start, strict=True)]
    assert np.mean(moved) > 0.9
