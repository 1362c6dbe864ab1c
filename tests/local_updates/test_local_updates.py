"""Tests that ranks with `LocalUpdates` equal replicas in one process."""

import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.local_updates import (
    EVERY,
    RULES,
    SPARSE,
    STEPS,
    Reference,
    batch_norm,
    check_resumes,
    fitted,
    own_weights,
    sgd,
)
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects, on_one_rank
from tests.helpers.several_optimizers import Gan, gan_batches, gan_data
from tests.helpers.training import BATCH, check_equal, dense_rows

pytestmark = pytest.mark.ranks("2", job="local")


def in_one_process(build, start, data, wire, rule="average", delay=0, make=sgd):
    """Trains one replica per rank, and returns the final reference."""
    replicas = []
    for _ in range(wire.topology.size):
        replica = models.copy(build, start)
        replica.compile(dense_rows(make()), models.LOSS, run_eagerly=True)
        replicas.append(replica)
    reference, local = Reference(rule, replicas), BATCH // wire.topology.size
    sent, since = None, 0
    for step in range(len(data[0]) // BATCH):
        for rank, replica in enumerate(replicas):
            begin = step * BATCH + rank * local
            replica.train_on_batch(*(part[begin : begin + local] for part in data))
        since += 1
        if sent is not None and since == delay:
            reference.apply(sent)
            sent = None
        if since == EVERY:
            sent, since = reference.sent(), 0
            if not delay:
                reference.apply(sent)
                sent = None
    return reference


def ended(reference):
    """Returns the global weights, and the weights of each replica."""
    return reference.global_weights, [replica.get_weights() for replica in reference.replicas]


def test_outer_optimizers_equal_replicas_in_one_process(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    cases = [(rule, 2) for rule in RULES] + [("outer", 0)]
    for rule, delay in cases:
        global_weights, replicas = on_one_rank(
            lambda rule=rule, delay=delay: ended(
                in_one_process(models.mlp, start, data, wire, rule, delay)
            )
        )
        optimizer = tp.LocalUpdates(
            sgd(), EVERY, RULES[rule](), overlap_steps=delay, bucket_bytes=512
        )
        model = fitted(models.mlp, start, data, wire, optimizer)
        # `fit` leaves the global weights in the variables.
        check_equal(model.get_weights(), global_weights)
        same_on_all_ranks(model.get_weights(), wire)
        own = own_weights(model)
        check_equal(own, replicas[wire.topology.rank])
        apart = len({models.digest(own)} | set(exchange_objects(models.digest(own), wire, "own")))
        assert apart > 1, "local weights must differ after the last synchronization"


def test_a_synchronization_in_each_step_equals_all_reduce(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    plain = keras.optimizers.SGD(0.05)
    dense = fitted(models.mlp, start, data, wire, tp.DistributedOptimizer(plain, "allreduce"))
    for options in ({"sync_every": 1}, {"sync_every": 50, "warmup_steps": STEPS}):
        optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.05), scheme="allreduce", **options)
        check_equal(
            fitted(models.mlp, start, data, wire, optimizer).get_weights(), dense.get_weights()
        )


def test_two_fits_equal_one_fit(wire):
    """`fit` ends with the global weights, and each rank continues from its local weights."""
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()

    def optimizer():
        return tp.LocalUpdates(sgd(), EVERY, tp.local.Elastic(0.8), overlap_steps=1)

    one = fitted(models.mlp, start, data, wire, optimizer(), epochs=2)
    two = fitted(models.mlp, start, data, wire, optimizer())
    local = BATCH // wire.topology.size
    again = {"batch_size": local, "shuffle": False, "verbose": 0}
    two.fit(*models.share(data, BATCH, wire.topology), **again)
    assert models.digest(one.get_weights()) == models.digest(two.get_weights())
    assert models.digest(own_weights(one)) == models.digest(own_weights(two))


def test_samples_weight_unequal_ranks_and_no_step_is_lost(wire):
    """A rank that has exhausted its data contributes its steps, and receives the result."""
    rank, size = wire.topology.rank, wire.topology.size
    x, y = models.mlp.data(40)
    start = models.mlp()
    batches = [5, 3] + [4] * (size - 2)
    pieces = [slice(4 * sum(batches[:r]), 4 * sum(batches[: r + 1])) for r in range(size)]
    for delay in (0, 1):
        keras.utils.clear_session(free_memory=False)
        model = models.copy(models.mlp, start)
        optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.05), sync_every=4, overlap_steps=delay)
        model.compile(optimizer, models.LOSS)
        data = tf.data.Dataset.from_tensor_slices((x[pieces[rank]], y[pieces[rank]])).batch(4)
        model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
        same_on_all_ranks(model.get_weights(), wire)
        # With overlap, ranks detect the end later: global weights agree, and no rank hangs.
        if not delay:
            mean = on_one_rank(lambda: _unequal_in_one_process(start, (x, y), pieces, batches))
            check_equal(model.get_weights(), mean)


def test_elastic_global_weights_ignore_a_rank_without_samples(wire):
    """A share of beta / ranks of the other rank's difference moves to the global weights."""
    weight = keras.Variable([0.0, 0.0], name="weight")
    optimizer = tp.LocalUpdates(keras.optimizers.SGD(1.0), 1, tp.local.Elastic(0.8))
    is_empty = wire.topology.rank == 1
    optimizer.apply([tf.ones([2])], [weight], sample_count=0.0 if is_empty else 1.0)
    optimizer.end_step()
    np.testing.assert_allclose(weight.numpy(), [-1.0 if is_empty else -0.6] * 2, rtol=1e-5)
    with optimizer.global_weights():
        np.testing.assert_allclose(weight.numpy(), [-0.4] * 2, rtol=1e-5)


def test_constraints_apply_to_the_global_weights(wire):
    """Without the constraint, the mean of weights of unit norm has a smaller norm."""
    weight = keras.Variable([1.0, 0.0], name="weight")
    weight.constraint = keras.constraints.UnitNorm()
    optimizer = tp.LocalUpdates(keras.optimizers.SGD(1.0), 1)
    optimizer.apply([tf.constant([0.0, 1.0 - 2.0 * wire.topology.rank])], [weight])
    optimizer.end_step()
    np.testing.assert_allclose(weight.numpy(), [1.0, 0.0], atol=1e-5)


def _unequal_in_one_process(start, data, pieces, batches):
    """Trains replicas with unequal batches, and returns their mean after two synchronizations."""
    replicas = []
    for part in pieces:
        replica = models.copy(models.mlp, start)
        replica.compile(keras.optimizers.SGD(0.05), models.LOSS)
        replicas.append((replica, part))
    for _ in range(2):
        # Replicas with more than three batches train a fourth batch before the synchronization.
        done = [min(n, 4) for n in batches]
        for (replica, part), n in zip(replicas, done, strict=True):
            for i in range(n):
                at = part.start + 4 * i
                replica.train_on_batch(*(array[at : at + 4] for array in data))
        weights = [r.get_weights() for r, _ in replicas]
        mean = [np.average(w, axis=0, weights=done) for w in zip(*weights, strict=True)]
        for replica, _ in replicas:
            replica.set_weights(mean)
    return mean


def test_an_overflow_on_one_rank_keeps_ranks_equal(wire):
    keras.config.set_dtype_policy("mixed_float16")
    start = models.mlp()
    x, y = models.mlp.data(8 * BATCH)
    local = BATCH // wire.topology.size
    share = models.share((x, y), BATCH, wire.topology)
    if wire.topology.rank == 0:
        share[0][2 * local : 3 * local] = 6e4
    model = models.copy(models.mlp, start)
    model.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS)
    model.fit(*share, batch_size=local, shuffle=False, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    updates = exchange_objects(int(model.optimizer.iterations.numpy()), wire, "updates")
    assert updates[0] < updates[1] == 8, updates


def test_global_weights_stay_finite(wire):
    data, start = models.mlp.data(7 * BATCH), models.mlp()
    x, y = data[0].copy(), data[1]
    local = BATCH // wire.topology.size
    # The second batch of rank 1 is NaN.
    x[BATCH + local : BATCH + 2 * local] = np.nan
    for rule in ("average", "elastic"):
        with LogLines() as lines:
            model = fitted(models.mlp, start, (x, y), wire, tp.LocalUpdates(sgd(), EVERY, rule))
        same_on_all_ranks(model.get_weights(), wire)
        assert all(np.isfinite(w).all() for w in [*model.get_weights(), *own_weights(model)])
        said = [line for line in lines if "weights of rank 1 are not finite" in line]
        assert len(said) == (1 if wire.topology.rank == 1 else 0), lines


def test_moving_statistics_are_synchronized(wire):
    data, start = models.mlp.data(9 * BATCH), batch_norm()
    model = fitted(batch_norm, start, data, wire, tp.LocalUpdates(sgd(), EVERY))
    same_on_all_ranks([v.numpy() for v in model.variables], wire)
    global_weights, _ = on_one_rank(lambda: ended(in_one_process(batch_norm, start, data, wire)))
    check_equal(model.get_weights(), global_weights)


RESUMED = {
    "elastic": lambda: tp.LocalUpdates(sgd(), EVERY, "elastic"),
    "average and top k": lambda: tp.LocalUpdates(
        keras.optimizers.Adam(0.01), EVERY, "average", "topk"
    ),
    "outer, sparse, late": lambda: tp.LocalUpdates(sgd(), EVERY, "outer", SPARSE, overlap_steps=2),
}


def test_runs_resume_between_synchronizations(wire):
    """A resumed run has the bits of an uninterrupted run."""
    for name, make in RESUMED.items():
        # The run with an overlapped exchange has the most state, so it resumes at each step of two
        # synchronizations. The other runs resume at one step.
        check_resumes(wire, make, slice(0, 2 * EVERY) if "late" in name else slice(1, 2), name)


def test_two_optimizers_of_a_model_synchronize_independently(wire):
    keras.utils.set_random_seed(11)
    model = Gan()
    adam = keras.optimizers.Adam
    model.compile(tp.LocalUpdates(adam(0.01), 2), tp.LocalUpdates(adam(0.02), 3, overlap_steps=1))
    random = np.random.default_rng(wire.topology.rank)
    noise, real = random.normal(size=(28, 3)), random.normal(2, 1, (28, 4))
    data = noise.astype("float32"), real.astype("float32")
    model.fit(*data, batch_size=4, epochs=2, verbose=0)
    same_on_all_ranks([v.numpy() for v in model.variables], wire)
    rounds = [
        int(o.variables[0].numpy()) for o in (model.d_optimizer, model.optimizers["generator"])
    ]
    assert rounds == [7, 4]


def test_custom_loops_and_long_executions_equal_fit(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    expected = fitted(models.mlp, start, data, wire, tp.LocalUpdates(sgd(), EVERY))
    model = models.copy(models.mlp, start)
    optimizer = tp.LocalUpdates(sgd(), EVERY)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, model(x, training=True)) + tf.add_n(model.losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    share, local = models.share(data, BATCH, wire.topology), BATCH // wire.topology.size
    for begin in range(0, len(share[0]), local):
        step(*(part[begin : begin + local] for part in share))
        if not begin:
            with Raises(RuntimeError, r"must call LocalUpdates.end_step\(\) after each step"):
                optimizer.global_weights().__enter__()
        optimizer.end_step()
    with Raises(RuntimeError, "must be saved with its global weights"):
        optimizer.save_own_variables({})
    with optimizer.global_weights():
        check_equal(model.get_weights(), expected.get_weights())
        same_on_all_ranks(model.get_weights(), wire)
    assert len(set(exchange_objects(models.digest(model.get_weights()), wire, "own"))) > 1
    with Raises(RuntimeError, "must begin with the same weights"):
        optimizer.restart_from_weights()
    with Raises(RuntimeError, "a call within a tf.function"):
        tf.function(optimizer.end_step)()
    # The step is already traced when the weights change.
    model.set_weights(start.get_weights())
    optimizer.restart_from_weights()
    step(*(part[:local] for part in share))
    optimizer.end_step()
    with optimizer.global_weights():
        check_equal(model.get_weights(), start.get_weights())
        with Raises(tf.errors.InvalidArgumentError, "while the variables hold the global weights"):
            step(*(part[:local] for part in share))

    # Eleven steps run in executions of three.
    unrolled = models.copy(models.mlp, start)
    unrolled.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS, steps_per_execution=EVERY)
    unrolled.fit(*share, batch_size=local, shuffle=False, verbose=0)
    check_equal(unrolled.get_weights(), expected.get_weights())
    eager = models.copy(models.mlp, start)
    eager.compile(tp.LocalUpdates(sgd(), EVERY, overlap_steps=1), models.LOSS, run_eagerly=True)
    eager.fit(*share, batch_size=local, shuffle=False, verbose=0)
    same_on_all_ranks(eager.get_weights(), wire)


def test_executions_that_do_not_end_at_synchronizations_are_refused(wire):
    for options, received in (
        ({"sync_every": 3}, "sync_every=3"),
        ({"sync_every": 4, "overlap_steps": 1}, "overlap_steps=1"),
        ({"sync_every": 4, "warmup_steps": 2}, "warmup_steps=2"),
    ):
        model = models.mlp()
        model.compile(tp.LocalUpdates(sgd(), **options), models.LOSS, steps_per_execution=2)
        with Raises(ValueError, f"Received: {received}, steps_per_execution=2"):
            model.fit(*models.mlp.data(8), batch_size=4, verbose=0)


def _gan(make, d_steps=1):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    model = Gan(d_steps)
    model.compile(make(), make())
    return model


def test_a_gan_resumes_with_both_optimizers(wire):
    """The optimizers receive their variables in the first step."""

    def make():
        return tp.LocalUpdates(keras.optimizers.SGD(0.01), EVERY, "elastic", overlap_steps=1)

    def run(folder, every_n_steps=None, model=None):
        model = model or _gan(make)
        checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=every_n_steps, keep=100)
        data = [part[wire.topology.rank :: wire.topology.size] for part in gan_data(32)]
        model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[checkpoint])
        optimizers = (model.d_optimizer, model.optimizers["generator"])
        variables = [v for o in optimizers for v in (*o.variables, *rank_variables(o))]
        return model, [v.numpy() for v in (*model.variables, *variables)]

    folder, model = shared_folder(wire), None
    _, whole = run(os.path.join(folder, "whole"), every_n_steps=1)
    for snapshot in sorted(os.listdir(os.path.join(folder, "whole")))[2:7:3]:
        target = os.path.join(folder, f"from-{snapshot}")
        if wire.topology.rank == 0:
            source = os.path.join(folder, "whole", snapshot)
            shutil.copytree(source, os.path.join(target, snapshot))
        exchange_objects(None, wire, "copied")
        # The model of the first resumed run also resumes the second run.
        model, resumed = run(target, model=model)
        for a, b in zip(resumed, whole, strict=True):
            np.testing.assert_array_equal(a, b, f"resumed from {snapshot}")


def test_input_may_end_in_a_step_with_several_optimizer_calls(wire):
    """The discriminator may synchronize after the first or the second call of a step."""
    model = _gan(lambda: tp.LocalUpdates(keras.optimizers.SGD(0.01), 3, overlap_steps=1), d_steps=2)
    pieces = [4, 4, 4, 4, 3] if wire.topology.rank else [4, 4]
    model.fit(gan_batches(pieces), epochs=2, verbose=0)
    same_on_all_ranks([v.numpy() for v in model.variables], wire)


def test_different_settings_on_ranks_are_refused(wire):
    other = models.mlp()
    other.compile(tp.LocalUpdates(sgd(), sync_every=2 + wire.topology.rank), models.LOSS)
    with Raises(
        RuntimeError, "All ranks must use the same exchange settings. Received: sync_every 2"
    ):
        other.fit(*models.mlp.data(8), verbose=0, callbacks=[keras_callbacks.BroadcastVariables()])
