"""Trains phases of growing images on ranks: exactly, in half precision, and with unequal data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import check_equal

keras_hub = pytest.importorskip("keras_hub")

pytestmark = pytest.mark.ranks("2x1")

CLASSES, BATCHES = 5, 4
SIZES = ((8, 4), (12, 4), (16, 2))
"""Side of the images, and batch of each rank, by phase."""
SPARSE = tp.schemes.HiTopK(density=0.1, min_elements=0)


def _model():
    """Returns a model for images of any size that treats the samples of a batch separately."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((None, None, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.GroupNormalization(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def _hub_model():
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        use_pre_activation=False,
        image_shape=(None, None, 3),
    )
    pooled = keras.layers.GlobalAveragePooling2D()(backbone.output)
    return keras.Model(backbone.input, keras.layers.Dense(CLASSES, dtype="float32")(pooled))


def _phases(schemes):
    rates = (0.1, 0.05, 0.02)
    return [
        keras_callbacks.Phase(epochs=2, size=size, batch=batch, scheme=scheme, learning_rate=rate)
        for (size, batch), scheme, rate in zip(SIZES, schemes, rates, strict=True)
    ]


def _images(size, count):
    generator = np.random.default_rng(size)
    images = generator.normal(size=(count, size, size, 3)).astype("float32")
    return images, generator.integers(0, CLASSES, count)


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _train(model, schemes, data_of, scaled=None):
    """Trains all phases on the results of `data_of`, and returns the optimizer."""
    optimizer = scaled or tp.DistributedOptimizer(_sgd(), scheme=schemes[0])
    model.compile(optimizer=optimizer, loss=models.LOSS)
    resize = keras_callbacks.ProgressiveResize(_phases(schemes), momentum_correction=False)
    for phase in resize.remaining():
        model.fit(
            data_of(phase),
            initial_epoch=phase.first_epoch,
            epochs=phase.end_epoch,
            shuffle=False,
            verbose=0,
            callbacks=[keras_callbacks.BroadcastVariables(), resize],
        )
    return optimizer


def _shares(wire, batches=BATCHES):
    """Returns a function that returns this rank's part of all global batches of a phase."""

    def of(phase):
        together = phase.batch * wire.topology.size
        data = _images(phase.size, batches * together)
        share = models.share(data, together, wire.topology)
        return tf.data.Dataset.from_tensor_slices(share).batch(phase.batch)

    return of


def test_dense_phases_equal_one_process(wire):
    start = _model()
    alone = models.copy(_model, start)
    alone.compile(optimizer=_sgd(), loss=models.LOSS)
    for phase in _phases(("alltoall", "torus2d", "ps")):
        together = phase.batch * wire.topology.size
        data = _images(phase.size, BATCHES * together)
        alone.optimizer.learning_rate = phase.learning_rate
        alone.fit(*data, batch_size=together, epochs=phase.epochs, shuffle=False, verbose=0)
    model = models.copy(_model, start)
    _train(model, ("alltoall", "torus2d", "ps"), _shares(wire))
    same_on_all_ranks(model.get_weights(), wire)
    check_equal(model.get_weights(), alone.get_weights())


def test_the_loss_scale_continues_over_phases(wire):
    """An overflow on one rank is skipped on all ranks."""
    keras.config.set_dtype_policy("mixed_float16")
    model, scales, shares = _model(), [], _shares(wire)
    schemes = (SPARSE, "torus2d", "torus2d")
    inside = tp.DistributedOptimizer(_sgd(), scheme=schemes[0])
    scaled = keras.optimizers.LossScaleOptimizer(inside, initial_scale=1024.0)
    scaled.build(model.trainable_variables)

    def overflowing(phase):
        scales.append(float(scaled.dynamic_scale))
        if phase.size != SIZES[1][0]:
            return shares(phase)
        # Scale the first batch of the second phase on the last rank.
        factor = 1e30 if wire.topology.rank == wire.topology.size - 1 else 1.0
        return (
            shares(phase)
            .enumerate()
            .map(lambda n, pair: (pair[0] * tf.where(n == 0, factor, 1.0), pair[1]))
        )

    optimizer = _train(model, schemes, overflowing, scaled)
    same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in optimizer.variables)], wire)
    assert np.isfinite(model.layers[-1].kernel.numpy()).all()
    # This batch overflows in each of the two epochs of the phase.
    assert scales == [1024.0, 1024.0, 256.0], scales
    assert int(optimizer.iterations) == 2 * 3 * BATCHES - 2


def test_ranks_with_unequal_data_train_phases_together(wire):
    """Lengths are known, then unknown. In each phase, a different rank exhausts its data first."""
    model = _model()

    def unequal(phase):
        parity = (wire.topology.rank + phase.size // 4) % 2
        data = _images(phase.size + wire.topology.rank, phase.batch * (BATCHES + parity))
        batches = tf.data.Dataset.from_tensor_slices(data).batch(phase.batch)
        return batches if phase.size == SIZES[0][0] else batches.filter(lambda *_: True)

    optimizer = _train(model, (SPARSE, "torus2d", "torus2d"), unequal)
    same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in optimizer.variables)], wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"torus2d"}
    counts = exchange_objects(int(optimizer.iterations), wire, "phases")
    assert len(set(counts)) == 1
    assert counts[0] >= 2 * 3 * BATCHES


def test_a_model_of_keras_hub_trains_in_phases(wire):
    model = _hub_model()
    before = model.layers[-1].kernel.numpy()
    _train(model, (SPARSE, "torus2d", "auto"), _shares(wire))
    same_on_all_ranks([variable.numpy() for variable in model.trainable_variables], wire)
    assert np.abs(model.layers[-1].kernel.numpy() - before).max() > 0
