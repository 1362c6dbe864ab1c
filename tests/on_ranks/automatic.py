"""`auto` on real ranks: it measures, plans, and trains as one process would."""

import contextlib
import dataclasses
import time

import keras
import numpy as np
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.callbacks import shared_folder
from tests.on_ranks.checkpoints import check_resumes_everywhere
from tests.on_ranks.checks import LogLines, Raises
from tests.on_ranks.models import same_on_all_ranks
from tests.on_ranks.training import BATCH, check_equal, sgd, train_alone, train_together
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.planner import Planner
from tfposeidon.gradients.description import Description
from tfposeidon.training import plan_again

WIDTH, LAYERS = 400, 6
"""Kernels of 640 kB: several share a bucket of the default size, and none a smaller one."""


@contextlib.contextmanager
def links(found):
    """Sets the links of the job; "measure" makes the next step measure them."""
    before = runtime.links()
    runtime.set_links(found)
    try:
        yield
    finally:
        runtime.set_links(before)


@contextlib.contextmanager
def planning(**constants):
    """Sets constants by which running jobs plan again, within this context.

    Args:
      **constants: Values, by the names in `tfposeidon.training.plan_again`.
    """
    before = {name: getattr(plan_again, name) for name in constants}
    vars(plan_again).update(constants)
    try:
        yield
    finally:
        vars(plan_again).update(before)


def given(wire, rate, **options):
    """Returns links with a rate between nodes, or within the node where there is only one."""
    per_node = max(len(node) for node in wire.topology.nodes)
    return tp.Links.of(rate, ranks_per_node=per_node, **options)


def ideal(wire, bytes_per_s):
    """Returns links whose bytes alone take time."""
    known = given(wire, "1gbit")
    link = tp.Link(latency_s=0.0, bytes_per_s=bytes_per_s)
    return dataclasses.replace(
        known, collective_s=0.0, node=known.node and link, across=known.across and link
    )


@keras.saving.register_keras_serializable()
class SlowBackward(keras.layers.Layer):
    """Returns its input, and takes a time in the backward pass that no load of the machine hides.

    Args:
      seconds: Seconds that its part of the backward pass takes.
    """

    def __init__(self, seconds, **options):
        super().__init__(**options)
        self.seconds = seconds

    def call(self, inputs):
        def sleep(gradient):
            time.sleep(self.seconds)
            return gradient

        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda g: tf.ensure_shape(
                tf.numpy_function(sleep, [g], g.dtype), g.shape
            )

        return identity(inputs)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}


def wide(steps=30, backward_s=0.0):
    """A model whose exchange and computation take about as long as each other."""
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    if backward_s:
        layers = [one for layer in layers for one in (layer, SlowBackward(backward_s))]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCH * steps, WIDTH)).astype("float32")
    return model, (x, rng.integers(0, 10, BATCH * steps))


def copied(model):
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


def small():
    return models.mlp(), models.mlp.data(BATCH * 10)


def case_links_are_measured_at_the_first_step(wire):
    model, data = small()
    reference = train_alone(models.copy(models.mlp, model), data, sgd())
    optimizer = tp.DistributedOptimizer(sgd())
    with links("measure"), LogLines() as lines:
        check_equal(train_together(model, data, optimizer, wire), reference)
        found = runtime.links()
    same_on_all_ranks(model.get_weights(), wire)
    assert len(set(exchange_objects(found.to_json(), wire, "links"))) == 1
    assert found.measured_at
    found.check_fits(wire.topology)
    if wire.topology.rank == 0:
        assert any(f"links: {found}" in line for line in lines), lines
    text = str(optimizer.plan)
    assert "auto: shortest predicted step" in text
    assert f"links: {found}" in text
    # On a busy machine rates scatter so much that only all-reduce is considered.
    assert "next best: " in text or found.is_uncertain


def case_sparse_where_it_is_allowed(wire):
    model, data = wide(steps=12)
    policy = tp.policies.Auto(density=0.01)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=policy)
    with links(given(wire, "10mbit")):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    names = {bucket.scheme.name for bucket in optimizer.plan.buckets}
    # On one node there is no slow link, and dense may be as fast.
    assert names & {"hitopk", "topk"} or len(wire.topology.nodes) == 1, names


def case_sparse_over_measured_links(wire):
    """The plan before the first step knows no links, and keeps nothing."""
    model, data = large(), models.mlp.data(BATCH * 10)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=tp.policies.Auto(density=0.01, margin=0.0))
    with links("measure"):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts


def case_accumulation_and_several_fits(wire):
    """Updates are timed, and what one `fit` has learnt the next one keeps."""
    model, data = models.mlp(), models.mlp.data(BATCH * 40)
    optimizer = tp.DistributedOptimizer(sgd(), gradient_accumulation_steps=3)
    with links(given(wire, "1gbit")):
        for _ in range(2):
            train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


def case_a_schedule_away_from_auto(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "asa", 1: "2dtar"})
    with links("measure"):
        train_together(model, data, optimizer, wire, callbacks=[schedule], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"2dtar"}


class Watching(keras.callbacks.Callback):
    """As users write them: nobody knows whether it stops training within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.batch = batch


def case_absence_is_watched(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    with links(given(wire, "1gbit")):
        train_together(model, data, optimizer, wire, callbacks=[Watching()], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


def large():
    """As the small one, with a kernel that a sparse scheme takes."""
    return keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(300), keras.layers.Dense(models.CLASSES)]
    )


def case_resume_at_every_step(wire):
    with links(given(wire, "1mbit")):
        check_resumes_everywhere(wire, large, sgd, scheme=tp.policies.Auto(density=0.1))


def case_a_resumed_run_takes_the_links_of_the_snapshot(wire):
    folder, seen = shared_folder(wire), []
    for known, epochs in (("measure", 1), ("measure", 2), (given(wire, "123mbit"), 3)):
        keras.utils.clear_session(free_memory=False)
        model, data = small()
        optimizer = tp.DistributedOptimizer(sgd())
        checkpoint = keras_callbacks.Checkpoint(folder)
        with links(known), LogLines() as lines:
            train_together(model, data, optimizer, wire, callbacks=[checkpoint], epochs=epochs)
            seen.append(runtime.links())
        assert f"links: {seen[-1]}" in str(optimizer.plan)
        assert optimizer.plan.forecasts[0].knows_computation
        others = [line for line in lines if "not those of the snapshot" in line]
        assert bool(others) == (epochs == 3 and wire.topology.rank == 0), lines
    assert seen[0] == seen[1]
    assert len(seen[0].hosts) == len(wire.topology.nodes)
    assert seen[2] == given(wire, "123mbit")


def case_times_of_a_race_are_those_of_its_links(wire):
    descriptions = [Description(f"kernel_{n}", (400, 400), "float32") for n in range(4)]
    planner = Planner(tp.policies.Auto(margin=0.0), 2**22)
    with links(ideal(wire, bytes_per_s=1e8)):
        planner.plan(descriptions, together=True)
        raced = planner.to_dict()["raced"]
        assert raced
        raced.update(dict.fromkeys(raced, 1e9))
        planner.plan(descriptions, together=True)
        assert planner.to_dict()["raced"] is raced
    with links(ideal(wire, bytes_per_s=2e8)):
        planner.plan(descriptions, together=True)
        assert max(planner.to_dict()["raced"].values()) < 1e8
    assert planner.spent_s > 0.0


def case_beside_factors_it_decides_once_there_are_rows(wire):
    for scheme in ("sfb", "hybcomm"):
        model, data = wide(steps=10)
        reference = train_alone(copied(model), data, sgd())
        rules = [("dense(_[0-9]+)?/bias", "asa"), ("dense_[0-9]*[02468]/kernel", scheme)]
        optimizer = tp.DistributedOptimizer(sgd(), scheme=[*rules, (".", "auto")])
        with links(ideal(wire, bytes_per_s=1e8)):
            check_equal(train_together(model, data, optimizer, wire), reference)
        same_on_all_ranks(model.get_weights(), wire)
        assert optimizer.plan.forecasts, optimizer.plan


def case_a_schedule_to_auto(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "asa", 1: "auto"})
    with links(given(wire, "1gbit")):
        train_together(model, data, optimizer, wire, callbacks=[schedule], epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


class Decorated(keras.Sequential):
    """A model with a compiled train step, though Keras compiles it anyway."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def case_a_train_step_that_is_compiled_twice(wire):
    """A change of schemes reaches it, and so does the end of an epoch."""
    model = models.mlp()
    data = models.mlp.data(BATCH * 10)
    reference = train_alone(models.copy(models.mlp, model), data, sgd(), epochs=2)
    decorated = Decorated(model.layers)
    optimizer = tp.DistributedOptimizer(sgd())
    schedule = keras_callbacks.SchemeSchedule({0: "asa", 1: "2dtar"})
    callbacks = [schedule, Watching()]
    trained = train_together(decorated, data, optimizer, wire, callbacks=callbacks, epochs=2)
    check_equal(trained, reference)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"2dtar"}


def case_a_saved_model_holds_the_policy_and_no_links(wire):
    """Loading it measures nothing."""
    model, data = small()
    policy = tp.policies.Auto(halves=True, density=0.01)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=policy)
    with links("measure"):
        train_together(model, data, optimizer, wire)
        path = f"{shared_folder(wire)}/model.keras"
        if wire.topology.rank == 0:
            model.save(path)
        exchange_objects(None, wire, "saved")
    with links("measure"):
        loaded = keras.saving.load_model(path)
        assert runtime.links() is None
    assert loaded.optimizer.policy == policy
    assert "bytes_per_s" not in str(loaded.optimizer.get_config())


def case_eagerly_and_several_steps_in_one_execution(wire):
    for compile in ({"run_eagerly": True}, {"steps_per_execution": 3}):
        model, data = small()
        reference = train_alone(models.copy(models.mlp, model), data, sgd())
        optimizer = tp.DistributedOptimizer(sgd())
        with links("measure"):
            check_equal(train_together(model, data, optimizer, wire, compile=compile), reference)
        same_on_all_ranks(model.get_weights(), wire)
        assert optimizer.plan.forecasts, compile


def case_close_plans_are_raced(wire):
    model, data = wide(steps=12)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=tp.policies.Auto(margin=0.0))
    # The ring and the all-to-all send as many bytes.
    with links(ideal(wire, bytes_per_s=1e8)):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    raced = optimizer.exchange.plans.to_dict()["raced"]
    assert all(other == raced for other in exchange_objects(raced, wire, "raced"))
    assert len(raced) >= 2, optimizer.plan
    assert "timed exchanges, as multiples of the predicted ones" in str(optimizer.plan)


def case_without_links_it_is_all_reduce(wire):
    model, data = small()
    optimizer = tp.DistributedOptimizer(sgd())
    with links(None):
        train_together(model, data, optimizer, wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"allreduce"}
    assert "auto: the links are not known" in str(optimizer.plan)
    assert not optimizer.plan.forecasts


def case_loops_of_ones_own(wire):
    weight = keras.Variable(np.zeros((64, 64), "float32"), name="weight")
    optimizer = tp.DistributedOptimizer(sgd())
    step = tf.function(lambda x: optimizer.apply([x], [weight]))
    with links(given(wire, "1gbit")):
        for turn in range(3):
            step(tf.fill((64, 64), float(turn + wire.topology.rank)))
    same_on_all_ranks([weight.numpy()], wire)
    assert not optimizer.plan.forecasts[0].knows_computation


def case_beside_servers_it_needs_given_links(wire):
    served = tp.schemes.ShardedServer(update="server", pair_bytes=256)
    rules = [("kernel", served), (".", "auto")]
    for found in (None, given(wire, "1gbit")):
        model, data = small()
        optimizer = tp.DistributedOptimizer(sgd(), scheme=rules)
        with links(found):
            train_together(model, data, optimizer, wire)
            assert runtime.links() is found, "nothing may be measured after the cut"
        assert bool(optimizer.plan.forecasts) == (found is not None)
        assert ("the links are not known" in str(optimizer.plan)) == (found is None)


def case_ranks_must_be_given_the_same_links(wire):
    rate = "1gbit" if wire.topology.rank == 0 else "2gbit"
    model, data = small()
    with (
        links(given(wire, rate)),
        Raises(RuntimeError, "All ranks must exchange alike.*links"),
    ):
        train_together(model, data, tp.DistributedOptimizer(sgd()), wire)
