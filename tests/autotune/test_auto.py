"""On real ranks, `auto` measures the network, plans, and trains as one process does."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import (
    Watching,
    copied,
    given,
    ideal,
    large,
    links,
    planning,
    small,
    wide,
)
from tests.helpers.callbacks import shared_folder
from tests.helpers.checkpoints import check_resumes
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import BATCH, check_equal, sgd, train_alone, train_together
from tfposeidon.autotune import measurement
from tfposeidon.autotune.choose_plan import StepTimes
from tfposeidon.autotune.planner import AutoPlanner
from tfposeidon.communication import runtime
from tfposeidon.gradients import Description

pytestmark = pytest.mark.ranks("2x1")


def test_the_network_is_measured_at_the_first_step(wire):
    model, data = small()
    reference = train_alone(models.copy(models.mlp, model), data, sgd())
    optimizer = tp.DistributedOptimizer(sgd())
    with links("measure"), LogLines() as lines:
        check_equal(train_together(model, data, optimizer, wire), reference)
        found = runtime.network_profile()
    same_on_all_ranks(model.get_weights(), wire)
    assert len(set(exchange_objects(found.to_json(), wire, "links"))) == 1
    assert found.measured_at
    found.check_fits(wire.topology)
    if wire.topology.rank == 0:
        assert any(f"network: {found}" in line for line in lines), lines
    text = str(optimizer.plan)
    assert "auto: shortest predicted step" in text
    assert f"network: {found}" in text
    assert "next best: " in text


def test_allowed_sparse_schemes_are_used(wire):
    model, data = wide(steps=12)
    policy = tp.policies.Auto(compression=("topk",), density=0.01)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=policy)
    with links(given(wire, "10mbit")):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    names = {bucket.scheme.name for bucket in optimizer.plan.buckets}
    # Within one node no link is slow, and a dense scheme may be as fast.
    assert names & {"hitopk", "topk"} or len(wire.topology.nodes) == 1, names


def test_accumulated_updates_are_timed_over_several_fits(wire):
    """The second `fit` retains the measurements of the first."""
    model, data = models.mlp(), models.mlp.data(BATCH * 40)
    optimizer = tp.DistributedOptimizer(sgd(), gradient_accumulation_steps=3)
    with links(given(wire, "1gbit")):
        for _ in range(2):
            train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


def test_a_schedule_replaces_auto(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "alltoall", 1: "torus2d"})
    with links("measure"):
        train_together(model, data, optimizer, wire, callbacks=[schedule], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"torus2d"}


def test_exhausted_input_checks_do_not_prevent_timing(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    with links(given(wire, "1gbit")):
        train_together(model, data, optimizer, wire, callbacks=[Watching()], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


def test_resumed_runs_equal_uninterrupted_runs(wire):
    with links(given(wire, "1mbit")):
        check_resumes(wire, large, sgd, scheme=tp.policies.Auto(compression=("topk",), density=0.1))


def test_a_resumed_run_uses_the_network_profile_of_the_snapshot(wire):
    folder, seen = shared_folder(wire), []
    for known, epochs in (("measure", 1), ("measure", 2), (given(wire, "123mbit"), 3)):
        keras.utils.clear_session(free_memory=False)
        model, data = small()
        optimizer = tp.DistributedOptimizer(sgd())
        checkpoint = keras_callbacks.Checkpoint(folder)
        with links(known), LogLines() as lines:
            train_together(model, data, optimizer, wire, callbacks=[checkpoint], epochs=epochs)
            seen.append(runtime.network_profile())
        assert f"network: {seen[-1]}" in str(optimizer.plan)
        assert optimizer.plan.forecasts[0].knows_computation
        others = [line for line in lines if "differs from the snapshot" in line]
        assert bool(others) == (epochs == 3 and wire.topology.rank == 0), lines
    assert seen[0] == seen[1]
    assert len(seen[0].hosts) == len(wire.topology.nodes)
    assert seen[2] == given(wire, "123mbit")


def test_residuals_survive_recomputed_plans(wire):
    """On other hosts, a resumed run measures another network, and first sends its residuals."""
    folder = shared_folder(wire)
    for epochs in (1, 2):
        keras.utils.clear_session(free_memory=False)
        scheme = tp.policies.Auto(compression=("topk",), density=0.1)
        model, optimizer = large(), tp.DistributedOptimizer(sgd(), scheme)
        checkpoint = keras_callbacks.Checkpoint(folder)
        rate = {1: "1mbit", 2: "2mbit"}[epochs]
        with (
            mock.patch.object(measurement, "measure", return_value=given(wire, rate)),
            links("measure"),
            LogLines() as lines,
        ):
            data = models.mlp.data(2 * BATCH)
            train_together(model, data, optimizer, wire, callbacks=[checkpoint], epochs=epochs)
        others = [line for line in lines if "differs from the snapshot" in line]
        assert bool(others) == (epochs == 2 and wire.topology.rank == 0), lines
        assert all("with residuals are retained until steps are timed" in line for line in others)
        assert any(one.scheme.name != "allreduce" for one in optimizer.plan.buckets)
        same_on_all_ranks(model.get_weights(), wire)


def test_sizes_are_means_over_all_timed_steps():
    """The recorded size is a mean, because the last step of an epoch may have fewer samples."""
    seen = iter([[64.0], [32.0], [8.0]])
    reader = SimpleNamespace(sizes=lambda *_: tf.constant(next(seen)))
    times, gradient = StepTimes(1, reader), tf.ones([4])
    for _ in range(3):
        times.ready([], [gradient], [gradient], [])([gradient])
    # The first step is not timed, because it has no start time.
    assert times.measured.sizes == [20.0]


def _slowdowns(plan):
    (forecast,) = plan.forecasts
    return [one.slowdown for one in (forecast.chosen, *forecast.others)]


def test_without_timed_steps_exchanges_are_timed(wire):
    """A custom loop has no timed steps. In `fit`, a timed trial follows the timed steps."""
    descriptions = [Description(f"kernel_{n}", (400, 400), "float32") for n in range(4)]
    planner = AutoPlanner(tp.policies.Auto(margin=0.0), 2**22)
    with links(ideal(wire, bytes_per_s=1e8)):
        found = _slowdowns(planner.plan_step(descriptions))
        planner.is_watching = True
        assert set(_slowdowns(planner.plan_step(descriptions))) == {1.0}
    assert set(found) != {1.0}
    assert all(other == found for other in exchange_objects(found, wire, "slowdowns"))


def test_with_factors_the_plan_is_chosen_after_rows_are_known(wire):
    for scheme in ("factors", "hybcomm"):
        model, data = wide(steps=10)
        reference = train_alone(copied(model), data, sgd())
        rules = [("dense(_[0-9]+)?/bias", "alltoall"), ("dense_[0-9]*[02468]/kernel", scheme)]
        optimizer = tp.DistributedOptimizer(sgd(), scheme=[*rules, (".", "auto")])
        with links(ideal(wire, bytes_per_s=1e8)):
            check_equal(train_together(model, data, optimizer, wire), reference)
        same_on_all_ranks(model.get_weights(), wire)
        assert optimizer.plan.forecasts, optimizer.plan


def test_few_known_rows_are_sent_as_factors(wire):
    model, data = wide(steps=12)
    reference = train_alone(copied(model), data, sgd())
    optimizer = tp.DistributedOptimizer(sgd())
    with planning(LEAST_GAIN=0.0, LONGEST_TRIAL_S=0.0), links(ideal(wire, bytes_per_s=1e7)):
        check_equal(train_together(model, data, optimizer, wire), reference)
    same_on_all_ranks(model.get_weights(), wire)
    names = {bucket.scheme.name for bucket in optimizer.plan.buckets if bucket.structures}
    assert names == {"factors"}, optimizer.plan


def test_a_schedule_switches_to_auto(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "alltoall", 1: "auto"})
    with links(given(wire, "1gbit")):
        train_together(model, data, optimizer, wire, callbacks=[schedule], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


class Decorated(keras.Sequential):
    """A model whose train step is already a `tf.function` when Keras compiles it."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_schemes_change_in_a_train_step_that_is_compiled_twice(wire):
    """The check for exhausted input at the end of an epoch takes effect, too."""
    model = models.mlp()
    data = models.mlp.data(BATCH * 10)
    reference = train_alone(models.copy(models.mlp, model), data, sgd(), epochs=2)
    decorated = Decorated(model.layers)
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "alltoall", 1: "torus2d"})
    callbacks = [schedule, Watching()]
    trained = train_together(decorated, data, optimizer, wire, callbacks=callbacks, epochs=2)
    check_equal(trained, reference)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"torus2d"}


def test_a_saved_model_holds_the_policy_without_the_network_profile(wire):
    """Loading the model measures nothing. The plan before the first step has no profile."""
    model, data = large(), models.mlp.data(BATCH * 10)
    policy = tp.policies.Auto(compression=("fp16", "topk"), density=0.01, margin=0.0)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=policy)
    with links("measure"):
        train_together(model, data, optimizer, wire)
        same_on_all_ranks(model.get_weights(), wire)
        assert optimizer.plan.forecasts
        path = f"{shared_folder(wire)}/model.keras"
        if wire.topology.rank == 0:
            model.save(path)
        exchange_objects(None, wire, "saved")
    with links("measure"):
        loaded = keras.saving.load_model(path)
        assert runtime.network_profile() is None
    assert loaded.optimizer.policy == policy
    assert "bytes_per_s" not in str(loaded.optimizer.get_config())


def test_auto_trains_eagerly_and_with_several_steps_per_execution(wire):
    for compile in ({"run_eagerly": True}, {"steps_per_execution": 3}):
        model, data = small()
        reference = train_alone(models.copy(models.mlp, model), data, sgd())
        optimizer = tp.DistributedOptimizer(sgd())
        with links("measure"):
            check_equal(train_together(model, data, optimizer, wire, compile=compile), reference)
        same_on_all_ranks(model.get_weights(), wire)
        assert optimizer.plan.forecasts, compile


def test_close_plans_are_timed(wire):
    model, data = wide(steps=12)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=tp.policies.Auto(margin=0.0))
    # The ring and the all-to-all send equally many bytes, so their predictions are close.
    with planning(LEAST_GAIN=0.0), links(ideal(wire, bytes_per_s=1e8)):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    found = _slowdowns(optimizer.plan)
    assert all(other == found for other in exchange_objects(found, wire, "slowdowns"))
    assert "timed exchanges, relative to the predicted ones" in str(optimizer.plan)


def test_without_a_network_profile_auto_is_all_reduce(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    with links(None):
        train_together(model, data, optimizer, wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"allreduce"}
    assert "auto: the network profile is unknown" in str(optimizer.plan)
    assert not optimizer.plan.forecasts


def test_a_fixed_scheme_has_a_prediction_with_a_network_profile(wire):
    for known in (None, given(wire, "1gbit")):
        model, data = small()
        optimizer = tp.DistributedOptimizer(sgd(), "alltoall")
        with links(known):
            throughput = keras_callbacks.Throughput()
            train_together(model, data, optimizer, wire, callbacks=[throughput], epochs=2)
        text = str(optimizer.plan)
        assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"alltoall"}
        for line in ("predicted exchange: ", "measured step: ", f"network: {known}"):
            assert (line in text) == (known is not None), text
        assert optimizer.exposed_s > 0.0


def test_custom_loops_plan_without_computation_times(wire):
    weight = keras.Variable(np.zeros((64, 64), "float32"), name="weight")
    optimizer = tp.DistributedOptimizer(sgd())
    step = tf.function(lambda x: optimizer.apply([x], [weight]))
    with links(given(wire, "1gbit")):
        for turn in range(3):
            step(tf.fill((64, 64), float(turn + wire.topology.rank)))
    same_on_all_ranks([weight.numpy()], wire)
    assert not optimizer.plan.forecasts[0].knows_computation


def test_ranks_must_receive_the_same_network_profile(wire):
    rate = "1gbit" if wire.topology.rank == 0 else "2gbit"
    model, data = small()
    with (
        links(given(wire, rate)),
        Raises(RuntimeError, "All ranks must use the same exchange settings. Received: network"),
    ):
        train_together(model, data, tp.DistributedOptimizer(sgd()), wire)


def test_a_network_profile_on_only_some_ranks_is_refused(wire):
    model, data = small()
    known = links(given(wire, "1gbit")) if wire.topology.rank == 0 else contextlib.nullcontext()
    with (
        known,
        Raises(RuntimeError, "choose plans by the network, or none. Received: 1 on rank 0, 0 on"),
    ):
        train_together(model, data, tp.DistributedOptimizer(sgd()), wire)
