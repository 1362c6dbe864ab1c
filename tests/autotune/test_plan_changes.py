"""Plans change once during training on real ranks, and the result stays exact."""

import contextlib
import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import (
    WIDTH,
    Watching,
    copied,
    given,
    ideal,
    links,
    parallel_layers,
    planning,
    small,
    wide,
)
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import on_one_rank
from tests.helpers.training import BATCH, check_equal, sgd, train_alone, train_together
from tfposeidon.autotune import comparison
from tfposeidon.autotune.planner import AutoPlanner
from tfposeidon.autotune.search import Tunable
from tfposeidon.communication import runtime

pytestmark = pytest.mark.ranks("2x1")


def test_the_plan_is_updated_from_measured_times(wire):
    """The new plan has smaller buckets, which overlap more of the exchange."""
    per_layer_s = 0.01
    model, data = wide(steps=12, backward_s=per_layer_s)
    reference = train_alone(copied(model), data, sgd())
    optimizer = tp.DistributedOptimizer(sgd())
    known = ideal(wire, 4 * WIDTH**2 / per_layer_s)
    with planning(LEAST_GAIN=0.0), links(known), LogLines() as lines:
        check_equal(train_together(model, data, optimizer, wire), reference)
    same_on_all_ranks(model.get_weights(), wire)
    forecast = optimizer.plan.forecasts[0]
    assert forecast.knows_computation
    assert forecast.chosen.compute_s > 0
    assert "predicted step: " in str(optimizer.plan)
    changed = [line for line in lines if "updated from measured times" in line]
    assert len(changed) == (1 if wire.topology.rank == 0 else 0), lines
    assert len(optimizer.plan.buckets) > 2


def test_a_gain_smaller_than_its_cost_changes_nothing(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    with links(given(wire, "1gbit")), LogLines() as lines:
        train_together(model, data, optimizer, wire)
    assert not [line for line in lines if "updated from measured times" in line]
    # The forecast still includes the computation of steps.
    assert optimizer.plan.forecasts[0].knows_computation


def test_steps_are_not_timed_after_the_decision(wire):
    """Steps that are slower than predicted are logged once, and nothing is measured again."""
    model, data = wide(steps=30)
    optimizer = tp.DistributedOptimizer(sgd())
    rosy = ideal(wire, bytes_per_s=1e12)
    with planning(LEAST_GAIN=0.0, LONGEST_TRIAL_S=0.0), links("measure"), LogLines() as lines:
        runtime.set_network_profile(rosy, measures=True)
        train_together(model, data, optimizer, wire)
        assert runtime.network_profile() == rosy
        measured_s = optimizer.plan.forecasts[0].measured_s
        exposed_s = optimizer.exposed_s
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation
    assert optimizer.plan.forecasts[0].measured_s == measured_s
    assert optimizer.exposed_s == exposed_s > 0.0
    wrong = [line for line in lines if "instead of the predicted" in line]
    assert len(wrong) == (wire.topology.rank == 0), lines


def test_the_exposed_time_of_untimed_steps_is_refused(wire):
    """Reading `exposed_s` raises an error with a fixed scheme and in a custom loop."""
    weight = keras.Variable(np.zeros(4, "float32"), name="weight")
    for scheme in ("allreduce", "auto"):
        optimizer = tp.DistributedOptimizer(sgd(), scheme)
        with links(given(wire, "1gbit")):
            optimizer.apply([keras.ops.ones(4)], [weight])
        with Raises(RuntimeError, "Timing of steps must be enabled"):
            _ = optimizer.exposed_s


SPARSE = tp.schemes.TopK(density=0.9, min_elements=0)
TURNING = []
"""Scheme that `Turning` chooses."""


@dataclasses.dataclass(frozen=True)
class Turning(Tunable):
    """Policy that chooses the scheme in `TURNING`, which the tests replace."""

    margin: float = 1.0

    def choose(self, description, topology):
        return tp.policies.Choice(TURNING[0], "turning")

    def candidates(self, topology):
        return {str(scheme): tp.policies.Uniform(scheme) for scheme in [*TURNING, SPARSE]}

    @property
    def planner(self):
        return AutoPlanner

    @property
    def keeps_state(self):
        return True


def _fit(model, data, wire, **arguments):
    own = models.share(data, BATCH, wire.topology)
    local = BATCH // wire.topology.size
    model.fit(*own, batch_size=local, shuffle=False, verbose=0, **arguments)


def _compiled(model, **options):
    model.compile(
        tp.DistributedOptimizer(sgd(), scheme=Turning()),
        lambda _, outputs: keras.ops.mean(outputs, axis=-1),
        **options,
    )
    return model


@contextlib.contextmanager
def _turning(wire):
    """Makes plans change from a sparse scheme to a faster dense scheme."""
    TURNING[:] = [SPARSE]
    known = ideal(wire, bytes_per_s=1e8)
    with planning(LEAST_GAIN=0.0), links(known), LogLines() as lines:
        yield lines


def _turning_data(steps):
    x = np.random.default_rng(5).normal(size=(steps * BATCH, WIDTH)).astype("float32")
    return x, np.zeros(len(x))


def _trained_alone(model, *fits):
    alone = parallel_layers()
    alone.set_weights(model.get_weights())
    alone.compile(sgd(), lambda _, outputs: keras.ops.mean(outputs, axis=-1))

    def trained():
        for data in fits:
            alone.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
        return alone.get_weights()

    return on_one_rank(trained)


def _check_turned(model, expected, wire):
    names = {bucket.scheme.name for bucket in model.optimizer.plan.buckets}
    assert names == {"allreduce"}, names
    check_equal(model.get_weights(), expected)
    same_on_all_ranks(model.get_weights(), wire)


def test_a_change_of_plan_loses_no_residuals(wire):
    """The sparse scheme sends its residuals before the dense scheme replaces it."""
    begin, end = _turning_data(2), _turning_data(12)
    model = _compiled(parallel_layers())
    expected = _trained_alone(model, begin, end)
    with _turning(wire) as lines:
        _fit(model, begin, wire)
        TURNING[:] = [tp.schemes.AllReduce()]
        _fit(model, end, wire)
    changed = [line for line in lines if "updated from measured times" in line]
    assert bool(changed) == (wire.topology.rank == 0), lines
    _check_turned(model, expected, wire)


class Sleeping:
    """Scheme whose exchange sleeps in each bucket, which no prediction includes."""

    def exchange(self, *arguments):
        means, state = super().exchange(*arguments)

        def sleep(values):
            time.sleep(0.02)
            return values

        slept = tf.numpy_function(sleep, [means], means.dtype)
        return tf.ensure_shape(slept, means.shape), state


@dataclasses.dataclass(frozen=True)
class SleepingAllToAll(Sleeping, tp.schemes.AllToAll):
    pass


@dataclasses.dataclass(frozen=True)
class SleepingTopK(Sleeping, tp.schemes.TopK):
    pass


SLEEPING = [SleepingAllToAll(), SleepingTopK(density=0.9, min_elements=0)]


@pytest.mark.parametrize(
    ("slower", "is_updated", "watches"),
    [(0, True, False), (0, False, True), (1, True, True), (1, False, False)],
)
def test_the_plan_with_shorter_steps_is_used(slower, is_updated, watches, wire):
    """After an update, both plans run in turn, and no residual is lost."""
    begin, end = _turning_data(2), _turning_data(9 if watches else 60)
    epochs = 12 if watches else 1
    model = _compiled(parallel_layers())
    expected = _trained_alone(model, begin, *[end] * epochs)
    first, second = [SLEEPING[slower], tp.schemes.AllReduce()][:: -1 if is_updated else 1]
    with _turning(wire) as lines, planning(TURN_S=0.0, PAIRS=2):
        TURNING[:] = [first]
        _fit(model, begin, wire)
        TURNING[:] = [second]
        _fit(model, end, wire, epochs=epochs, callbacks=[Watching()] if watches else [])
    compared = [line for line in lines if "timed steps are" in line]
    assert len(compared) == (wire.topology.rank == 0), lines
    assert "timed steps are" in str(model.optimizer.plan)
    _check_turned(model, expected, wire)


def test_updates_of_several_steps_are_compared_as_a_whole(wire):
    """With gradient accumulation, most executions contain no exchange."""
    model = parallel_layers()
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), scheme=Turning()
    )
    model.compile(optimizer, lambda _, outputs: keras.ops.mean(outputs, axis=-1))
    with _turning(wire) as lines, planning(TURN_S=0.0, PAIRS=2):
        TURNING[:] = [tp.schemes.AllReduce()]
        _fit(model, _turning_data(8), wire)
        TURNING[:] = [SLEEPING[0]]
        _fit(model, _turning_data(160), wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"allreduce"}, lines
    same_on_all_ranks(model.get_weights(), wire)


class Stop(keras.callbacks.Callback):
    """Ends training after an epoch, by default the first."""

    def __init__(self, epoch=0):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epoch


def test_a_stopped_comparison_leaves_no_dense_scheme(wire):
    """The sparse scheme that flushed for a switch is sparse again in the next `fit`."""
    data, model = _turning_data(9), _compiled(parallel_layers())
    with _turning(wire), planning(TURN_S=0.0):
        TURNING[:] = [tp.schemes.AllReduce()]
        _fit(model, _turning_data(2), wire)
        TURNING[:] = [SPARSE]
        # Epochs: timing, the turn of the sparse scheme, the flush before the next turn.
        _fit(model, data, wire, epochs=40, callbacks=[Watching(), Stop(2)])
        assert model.optimizer.exchange.has_flushed
        _fit(model, data, wire)
    assert {bucket.scheme.name for bucket in model.optimizer.plan.buckets} == {"topk"}
    assert not model.optimizer.exchange.has_flushed
    same_on_all_ranks(model.get_weights(), wire)


def test_a_pending_change_of_plan_continues_in_the_next_fit(wire):
    """A later `fit` and a resumed run first send the residuals."""
    begin = _turning_data(2)
    end = _turning_data(comparison.UNTIMED_STEPS + comparison.TIMED_STEPS)
    model = _compiled(parallel_layers())
    expected, folder = _trained_alone(model, begin, end, end), shared_folder(wire)
    keras.utils.clear_session(free_memory=False)
    resumed = _compiled(parallel_layers())
    with _turning(wire) as lines:
        _fit(model, begin, wire)
        TURNING[:] = [tp.schemes.AllReduce()]
        _fit(model, end, wire, epochs=2, callbacks=[Stop(), keras_callbacks.Checkpoint(folder)])
        names = {bucket.scheme.name for bucket in model.optimizer.plan.buckets}
        assert names == {"topk"}, names
        _fit(model, end, wire)
        _fit(resumed, end, wire, epochs=2, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert not [line for line in lines if "computed again" in line], lines
    _check_turned(model, expected, wire)
    _check_turned(resumed, expected, wire)


class WatchingFlushes(Watching):
    """Records after each batch whether schemes have sent all residuals."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.optimizer.exchange.has_flushed)


def test_with_exhausted_input_checks_one_execution_sends_residuals(wire):
    """The change of plans makes only the last execution of an epoch dense."""
    executions, steps = comparison.UNTIMED_STEPS + comparison.TIMED_STEPS, 2
    begin, end = _turning_data(2), _turning_data(steps * executions)
    model = _compiled(parallel_layers(), steps_per_execution=steps)
    expected, watching = _trained_alone(model, begin, end, end, end), WatchingFlushes()
    with _turning(wire):
        _fit(model, begin, wire)
        TURNING[:] = [tp.schemes.AllReduce()]
        _fit(model, end, wire, callbacks=[watching], epochs=3)
    sparse = [False] * (2 * executions - 1)
    assert watching.seen == [*sparse, *[True] * (1 + executions)], watching.seen
    _check_turned(model, expected, wire)


def test_a_plan_changes_with_epochs_of_unknown_length(wire):
    executions = comparison.UNTIMED_STEPS + comparison.TIMED_STEPS
    begin, end = _turning_data(2), _turning_data(executions)
    model = _compiled(parallel_layers())
    expected = _trained_alone(model, begin, end, end, end)
    own = models.share(end, BATCH, wire.topology)
    batches = tf.data.Dataset.from_tensor_slices(own).batch(BATCH // wire.topology.size)
    with _turning(wire):
        _fit(model, begin, wire)
        TURNING[:] = [tp.schemes.AllReduce()]
        model.fit(batches.filter(lambda *_: True), epochs=3, verbose=0)
    _check_turned(model, expected, wire)


def test_a_resumed_run_follows_the_retained_plan(wire):
    """The run retains the saved plan, although another plan is predicted to be faster."""
    folder, steps = shared_folder(wire), comparison.UNTIMED_STEPS + comparison.TIMED_STEPS
    known = ideal(wire, 4 * WIDTH**2 / 0.004)
    plans = []
    for epochs in (1, 2):
        keras.utils.clear_session(free_memory=False)
        model, data = wide(steps)
        optimizer = tp.DistributedOptimizer(sgd())
        with links(known):
            train_together(
                model,
                data,
                optimizer,
                wire,
                epochs=epochs,
                callbacks=[keras_callbacks.Checkpoint(folder)],
            )
        plans.append([(bucket.scheme, bucket.members) for bucket in optimizer.plan.buckets])
        assert optimizer.plan.forecasts
    assert plans[0] == plans[1]
    assert len(plans[0]) <= 2, "the first run must retain its plan of large buckets"
