"""Ranks with different numbers of batches end their epochs together."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects, on_one_rank
from tests.helpers.training import SERVED, check_equal
from tests.helpers.uneven import check_together, compiled_for_lengths, of_unknown_length
from tfposeidon.training.equal_steps import has_batch_hooks

pytestmark = pytest.mark.ranks("3")


def test_epochs_of_known_lengths_end_after_the_fewest_batches(wire):
    model, optimizer = compiled_for_lengths()
    x, y = models.mlp.data(4 * (3 + wire.topology.rank))
    with LogLines() as lines:
        history = model.fit(
            x, y, batch_size=4, epochs=2, verbose=0, callbacks=[keras_callbacks.MetricAverage()]
        )
    check_together(model, optimizer, wire, 6)
    losses = exchange_objects(history.history["loss"], wire, "losses")
    assert losses[0] == losses[1] == losses[2]
    said = [line for line in lines if "different or unknown numbers of batches (3, 4, 5)" in line]
    assert len(said) == (1 if wire.topology.rank == 0 else 0)


def test_epochs_of_unknown_lengths_end_together_before_validation(wire):
    model, optimizer = compiled_for_lengths()
    validation = models.mlp.data(4 + 4 * wire.topology.rank)
    history = model.fit(
        of_unknown_length(5 - wire.topology.rank),
        epochs=3,
        verbose=0,
        validation_data=validation,
        callbacks=[keras_callbacks.MetricAverage()],
    )
    check_together(model, optimizer, wire, 9)
    values = exchange_objects(history.history["val_loss"], wire, "losses")
    assert values[0] == values[1] == values[2]


def test_unknown_equal_lengths_run_every_step(wire):
    model, optimizer = compiled_for_lengths()
    model.fit(of_unknown_length(3), epochs=2, verbose=0)
    check_together(model, optimizer, wire, 6)


def test_ranks_without_data_have_no_rows(wire):
    """Ranks without data run the other ranks' branch; the plan shows the last step with data."""
    for static_batches in (False, True):
        _check_rows(wire, static_batches)


def _check_rows(wire, static_batches):
    model, optimizer = compiled_for_lengths("hybcomm")
    model.fit(of_unknown_length(2, static_batches), verbose=0)
    assert "K=4, P=3" in str(optimizer.plan)
    model.fit(of_unknown_length(3 + wire.topology.rank, static_batches), epochs=2, verbose=0)
    check_together(model, optimizer, wire, 8)
    reasons = [choice.reason for bucket in optimizer.plan.buckets for choice in bucket.choices]
    everybody = exchange_objects(reasons, wire, "reasons")
    assert everybody == [reasons] * wire.topology.size


def test_epochs_with_several_steps_per_execution_end_together(wire):
    model, optimizer = compiled_for_lengths(steps_per_execution=2)
    x, y = models.mlp.data(4 * (3 + 2 * wire.topology.rank))
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    check_together(model, optimizer, wire, 6)


def test_callbacks_may_communicate_despite_several_steps_per_execution(wire):
    model, optimizer = compiled_for_lengths(steps_per_execution=2)
    x, y = models.mlp.data(4 * (3 + 2 * wire.topology.rank))
    model.fit(
        x, y, batch_size=4, verbose=0, callbacks=[keras_callbacks.ReplicaCheck(every_n_steps=1)]
    )
    check_together(model, optimizer, wire, 3)


def test_sharded_updates_stay_equal_on_unequal_ranks(wire):
    """Ranks without data contribute zeros, and take part in norms and in all-gathers."""
    scaled = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=8.0)
    for given in ({"inner": keras.optimizers.SGD(0.1, global_clipnorm=0.1)}, {"around": scaled}):
        model, optimizer = compiled_for_lengths(SERVED, **given)
        model.fit(of_unknown_length(3 + wire.topology.rank), epochs=2, verbose=0)
        check_together(model, optimizer, wire, 6)
    # Remove the loss scale, and add it again: only with it, owners agree whether gradients are
    # finite.
    inside = tp.unwrap(optimizer)
    for optimizer, updates in ((inside, 12), (scaled(inside), 18)):
        model.compile(optimizer=optimizer, loss=models.LOSS)
        model.fit(of_unknown_length(3 + wire.topology.rank), epochs=2, verbose=0)
        check_together(model, optimizer, wire, updates)


def test_accumulated_updates_stay_equal_on_unequal_ranks(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.compile(optimizer=optimizer, loss=models.LOSS)
    model.fit(of_unknown_length(4 + wire.topology.rank), epochs=2, verbose=0)
    check_together(model, optimizer, wire, 4)
    assert all(not np.any(v.numpy()) for v in rank_variables(optimizer))


def test_equal_lengths_log_nothing(wire):
    model, _ = compiled_for_lengths()
    with LogLines() as lines:
        model.fit(*models.mlp.data(12), batch_size=4, verbose=0)
    assert not [line for line in lines if "batches" in line]


class _Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def test_rates_follow_the_agreed_steps(wire):
    model, optimizer = compiled_for_lengths()
    x, y = models.mlp.data(4 * (3 + wire.topology.rank))
    warmup, rates = keras_callbacks.LearningRateWarmup(0.3, warmup_epochs=2), _Rates()
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[warmup, rates])
    check_together(model, optimizer, wire, 9)
    expected = np.interp(np.arange(9) / 3, [0, 2], [0.1, 0.3])
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-5)


class _Part(keras.callbacks.Callback):
    """Makes the last rank differ from the others in the second epoch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and tp.rank() == tp.size() - 1:
            self.change(self.model)


def test_diverging_settings_are_reported(wire):
    def freeze(model):
        model.layers[0].trainable = False

    def setting(name, value):
        return lambda model: setattr(model.optimizer.inner_optimizer, name, value)

    for change, what in (
        (setting("learning_rate", 0.25), r"learning rate 0\.05.* on rank 0, 0\.25"),
        (setting("weight_decay", 0.5), "weight decay None on rank 0, 0.5"),
        (freeze, r"trainable variables 4 \(including .*kernel.*\) on rank 0, 2 on rank 2"),
    ):
        model, optimizer = compiled_for_lengths()
        with Raises(RuntimeError, f"All ranks must train with the same settings. Received: {what}"):
            model.fit(
                *models.mlp.data(8), batch_size=4, epochs=4, verbose=0, callbacks=[_Part(change)]
            )
        assert int(optimizer.iterations) == 4


def test_another_first_epoch_is_refused(wire):
    model, _ = compiled_for_lengths()
    with Raises(
        RuntimeError,
        "All ranks must train with the same settings. Received: epoch 0 on rank 0, 1 on rank 1",
    ):
        model.fit(
            *models.mlp.data(8), epochs=3, initial_epoch=min(wire.topology.rank, 1), verbose=0
        )


class _StopOnRank1(keras.callbacks.Callback):
    """Stops in the second epoch, in one of the hooks outside of batches."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self._stop)

    def _stop(self, epoch, logs=None):
        if tp.rank() == 1 and epoch == 1:
            self.model.stop_training = True


def test_a_stop_on_one_rank_stops_all_ranks(wire):
    model, optimizer = compiled_for_lengths()
    history = model.fit(
        *models.mlp.data(8),
        batch_size=4,
        epochs=5,
        verbose=0,
        callbacks=[_StopOnRank1("on_epoch_end")],
    )
    assert len(history.epoch) == 2
    check_together(model, optimizer, wire, 4)


def test_an_unexpected_stop_takes_effect_at_the_end_of_the_epoch(wire):
    model, optimizer = compiled_for_lengths()
    history = model.fit(
        *models.mlp.data(16),
        batch_size=4,
        epochs=5,
        verbose=0,
        callbacks=[_StopOnRank1("on_epoch_begin")],
    )
    assert len(history.epoch) == 2
    check_together(model, optimizer, wire, 8)


class Follows(keras.Model):
    """Model with a moving average of its trained network, and a count of steps."""

    def __init__(self):
        super().__init__()
        self.trained, self.follower = models.mlp(), models.mlp()
        self.steps = self.add_weight(shape=(), dtype="int64", trainable=False)

    def call(self, x, training=False):
        return self.trained(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, self(x, training=True))
        variables = self.trained.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for copy, variable in zip(self.follower.trainable_variables, variables, strict=True):
            copy.assign(0.9 * copy + 0.1 * variable)
        self.steps.assign_add(1)
        return {"loss": loss}


class _BuiltInTheFirstStep(keras.Model):
    """Model with a network that only the train step calls, and thereby builds."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(models.CLASSES)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, self.inner(x))
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(("steps_per_execution", "batches"), [(1, 1), (4, 3)])
def test_weights_of_a_first_step_that_ends_the_epoch_are_equal(wire, steps_per_execution, batches):
    keras.utils.set_random_seed(wire.topology.rank)
    model = _BuiltInTheFirstStep()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, steps_per_execution=steps_per_execution)
    model.fit(of_unknown_length(batches), epochs=2, verbose=0)
    check_together(model, optimizer, wire, 2 * batches)


def test_inherited_hooks_for_batches_stop_no_epoch():
    inherited = type("Mine", (keras_callbacks.MetricAverage,), {})
    own = type("Mine", (inherited,), {"on_train_batch_end": lambda self, batch, logs=None: None})
    assert [has_batch_hooks(kind()) for kind in (inherited, own)] == [False, True]


def test_dropped_steps_change_no_state(wire):
    model = Follows()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(of_unknown_length(2 + wire.topology.rank), epochs=2, verbose=0)
    assert int(model.steps.numpy()) == 4
    same_on_all_ranks(model.get_weights(), wire)


def test_eager_steps_count_arrays(wire):
    """`train_on_batch` passes NumPy arrays on without converting them to tensors."""
    x, y = models.mlp.data(9)
    begin, end = [(0, 1), (1, 4), (4, 9)][wire.topology.rank]
    start = models.mlp()
    alone, model = (models.copy(models.mlp, start) for _ in range(2))
    for one, wrap in ((alone, lambda inner: inner), (model, tp.DistributedOptimizer)):
        one.compile(wrap(keras.optimizers.SGD(0.1)), models.LOSS, run_eagerly=True)
    on_one_rank(lambda: alone.train_on_batch(x, y))
    model.train_on_batch(x[begin:end], y[begin:end])
    if wire.topology.rank == 0:
        check_equal(model.get_weights(), alone.get_weights())
    same_on_all_ranks(model.get_weights(), wire)


class _Bag(keras.Model):
    """Model of means over rows of a table, for batches that are one ragged or sparse tensor."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(9, 3), initializer="glorot_uniform", name="table")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            if isinstance(data, tf.RaggedTensor):
                rows = tf.gather(self.table.value, data)
                means = tf.reduce_mean(rows, axis=1)
            else:
                means = tf.sparse.sparse_dense_matmul(data, self.table.value)
            loss = tf.reduce_mean((means - 1.0) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, self.table.value))
        self.optimizer.apply([gradient], [self.table])
        return {"loss": loss}


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_single_ragged_or_sparse_tensors_are_weighted_by_rows(wire, kind):
    drawn = np.random.default_rng(0)
    counts = [4 * (1 + rank) for rank in range(wire.topology.size)]
    if kind == "ragged":
        rows = [drawn.integers(0, 9, drawn.integers(1, 5)).tolist() for _ in range(sum(counts))]
        make = tf.ragged.constant
    else:
        rows = drawn.normal(size=(sum(counts), 9)).astype("float32")
        rows *= drawn.random(rows.shape) < 0.5
        make = tf.sparse.from_dense
    end = sum(counts[: wire.topology.rank + 1])
    results = []
    for optimizer, mine in (
        (keras.optimizers.SGD(0.1), rows),
        (tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), rows[end - counts[tp.rank()] : end]),
    ):
        keras.utils.set_random_seed(2)
        model = _Bag()
        model.compile(optimizer)
        model.built = True
        model.fit(tf.data.Dataset.from_tensors(make(mine)), epochs=2, verbose=0)
        results.append(model.table.numpy())
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
