"""`fit` accumulates gradients across the ends of epochs like one process, for all kinds of data."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import LogLines
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import on_one_rank
from tests.helpers.training import BATCH, check_equal, train_alone

pytestmark = pytest.mark.ranks("2")

BATCHES, STEPS, EPOCHS = 6, 4, 2
"""There are three updates in two epochs, and the second update begins in the first epoch."""


def _inner():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
    return keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=STEPS)


class Watching(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def _unknown(x, y, batch):
    return (tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).filter(lambda *_: True),)


def _known(x, y, batch):
    return (tf.data.Dataset.from_tensor_slices((x, y)).batch(batch),)


FITS = {
    "known": (_known, [], {}),
    "watched": (_known, [Watching], {}),
    "stoppable": (_known, [keras.callbacks.TerminateOnNaN], {}),
    "unknown": (_unknown, [], {}),
    "executions": (_unknown, [], {"steps_per_execution": 3}),
    "eager": (_unknown, [Watching], {"run_eagerly": True}),
}


@functools.cache
def _alone():
    """Returns the initial and the final weights of one process."""
    data, model = models.mlp.data(BATCHES * BATCH), models.mlp()
    start = model.get_weights()
    return start, train_alone(model, data, _inner(), epochs=EPOCHS)


@pytest.mark.parametrize("kind", FITS)
def test_fits_equal_one_process(wire, kind):
    data, model = models.mlp.data(BATCHES * BATCH), models.mlp()
    start, reference = _alone()
    model.set_weights(start)
    dataset, callbacks, compiled = FITS[kind]
    model.compile(tp.DistributedOptimizer(_inner()), models.LOSS, **compiled)
    share = models.share(data, BATCH, wire.topology)
    model.fit(
        *dataset(*share, BATCH // wire.topology.size),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[make() for make in callbacks],
    )
    same_on_all_ranks(model.get_weights(), wire)
    check_equal(model.get_weights(), reference)
    assert int(model.optimizer.iterations) == EPOCHS * BATCHES // STEPS


def test_equal_batches_send_nothing_between_updates(wire):
    """With unequal batches, ranks exchange their numbers of samples in each call."""
    x, y = models.mlp.data(2 * BATCH)
    for batch, told in ((BATCH, 0), (BATCH - 1, 1)):
        model = models.mlp()
        model.compile(tp.DistributedOptimizer(_inner(), "allreduce"), models.LOSS)
        with mock.patch.object(wire, "all_reduce", wraps=wire.all_reduce) as spy:
            model.fit(x, y, batch_size=batch, verbose=0)
        names = [call.args[2] for call in spy.call_args_list]
        assert sum(name.endswith(".calls") for name in names) == told, names


def test_calls_have_equal_weights_and_ranks_are_weighted_by_samples(wire):
    """As in Keras, a call with a smaller batch counts as much as others."""
    sizes = ([3, 1], [5, 2])
    x, y = models.mlp.data(sum(map(sum, sizes)))
    bounds = np.cumsum([0, *(size for pair in sizes for size in pair)])
    start = models.mlp()
    plain, model = (models.copy(models.mlp, start) for _ in range(2))
    inner = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    plain.compile(inner(), models.LOSS)
    model.compile(tp.DistributedOptimizer(inner()), models.LOSS)

    def alone():
        for call in range(2):
            whole = slice(bounds[2 * call], bounds[2 * call + 2])
            plain.train_on_batch(x[whole], y[whole])
        return plain.get_weights()

    reference = on_one_rank(alone)
    for call in range(2):
        place = 2 * call + wire.topology.rank
        mine = slice(bounds[place], bounds[place + 1])
        model.train_on_batch(x[mine], y[mine])
    same_on_all_ranks(model.get_weights(), wire)
    check_equal(model.get_weights(), reference)


def test_exhausted_input_within_an_update_is_logged(wire):
    x, y = models.mlp.data(4 * (5 + wire.topology.rank))
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(_inner()), models.LOSS)
    with LogLines() as lines:
        model.fit(*_unknown(x, y, 4), epochs=2, verbose=0)
    told = [line for line in lines if "exhausted its input in the middle of an update" in line]
    assert len(told) == (2 if wire.topology.rank == 0 else 0), lines
    # An update accumulates four calls, so the five calls of an epoch yield one update.
    assert int(model.optimizer.iterations) == 2
    same_on_all_ranks(model.get_weights(), wire)


def test_a_non_finite_call_is_skipped_on_all_ranks(wire):
    model = models.mlp()
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    scaled = keras.optimizers.LossScaleOptimizer(tp.DistributedOptimizer(inner), initial_scale=8.0)
    model.compile(scaled, models.LOSS)
    x, y = models.mlp.data(4)
    broken = np.full_like(x, np.inf) if wire.topology.rank else x
    for batch in (x, broken, x, broken, x, x):
        model.train_on_batch(batch, y)
    assert int(model.optimizer.iterations) == 2
    assert float(scaled.dynamic_scale) == 2.0
    same_on_all_ranks(model.get_weights(), wire)
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_an_update_that_overflows_in_float16_is_retried(wire):
    """The loss scale skips only the update; the next call retries it with the same gradients."""
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(
        tp.DistributedOptimizer(inner, scheme=tp.schemes.AllToAll(wire_dtype="float16")),
        initial_scale=2.0**17,
    )
    weight = keras.Variable([0.0], name="weight")
    # float16 represents values up to 65504, so the scale halves until the mean fits.
    for _ in range(2 + 2):
        optimizer.apply([tf.constant([1.0]) * optimizer.scale_loss(1.0)], [weight])
    assert float(optimizer.dynamic_scale) < 2.0**17
    assert int(optimizer.iterations) == 1
    np.testing.assert_allclose(weight.numpy(), [-1.0], rtol=1e-3)


def test_single_batches_after_a_fit_are_weighted_by_samples(wire):
    x, y = models.mlp.data(BATCH + 4)
    start = models.mlp()
    plain, model = (models.copy(models.mlp, start) for _ in range(2))
    inner = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    plain.compile(inner(), models.LOSS)
    model.compile(tp.DistributedOptimizer(inner()), models.LOSS)
    part = slice(4 * wire.topology.rank, 4 * wire.topology.rank + 4)

    def alone():
        for _ in range(2):
            plain.fit(x[:8], y[:8], batch_size=8, shuffle=False, verbose=0)
            plain.train_on_batch(x[8:12], y[8:12])
        return plain.get_weights()

    reference = on_one_rank(alone)
    for _ in range(2):
        model.fit(x[part], y[part], batch_size=4, verbose=0)
        mine = slice(8, 9) if wire.topology.rank else slice(9, 12)
        model.train_on_batch(x[mine], y[mine])
    check_equal(model.get_weights(), reference)
