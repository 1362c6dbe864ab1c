"""Tests `auto` with data of unknown length, several optimizers and mixed precision."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import hub, models, several_optimizers, uneven
from tests.helpers.automatic import given, ideal, large, links, planning
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, check_equal, sgd, train_alone
from tfposeidon.training.session import optimizers_of

pytestmark = pytest.mark.ranks("2x1")


def plans_are_changed():
    """Lets plans change for the smallest gain."""
    return planning(LEAST_GAIN=0.0)


def _check_planned(optimizer):
    assert optimizer.plan.forecasts
    assert all(forecast.knows_computation for forecast in optimizer.plan.forecasts)


def test_bert_trains_exactly_on_texts_of_any_length(wire):
    """BERT's gradients have no static shapes, and rows of its embedding may be sent by index."""
    steps = 10
    data, start = hub.make_texts(steps * BATCH), hub.bert()
    reference = train_alone(models.copy(hub.bert, start), data, sgd())
    mine = models.of_any_length(
        *models.share(data, BATCH, wire.topology), BATCH // wire.topology.size
    )
    model = models.copy(hub.bert, start)
    optimizer = tp.DistributedOptimizer(sgd())
    model.compile(optimizer=optimizer, loss=models.LOSS)
    with links(given(wire, "10mbit")), plans_are_changed():
        model.fit(mine, shuffle=False, verbose=0)
    check_equal(model.get_weights(), reference)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts


def test_two_optimizers_of_a_custom_train_step_have_plans(wire):
    noise, real = several_optimizers.gan_data(80)
    mine = slice(wire.topology.rank, None, wire.topology.size)
    model = several_optimizers.make_gan(True, scheme="auto")
    with links("measure"), plans_are_changed():
        model.fit(noise[mine], real[mine], batch_size=4, epochs=3, verbose=0)
    same_on_all_ranks(several_optimizers.gan_state(model), wire)
    for optimizer in optimizers_of(model):
        _check_planned(optimizer)


def test_ranks_with_different_numbers_of_batches_stay_equal(wire):
    model, optimizer = uneven.compiled_for_lengths("auto")
    data = uneven.of_unknown_length(10 + wire.topology.rank)
    with links("measure"), plans_are_changed():
        model.fit(data, epochs=3, verbose=0)
    uneven.check_together(model, optimizer, wire, 30)
    _check_planned(optimizer)


def test_ranks_with_different_numbers_of_executions_stay_equal(wire):
    """In the last execution of an epoch, ranks send the residuals of the old plan."""
    model = large()
    optimizer = tp.DistributedOptimizer(
        sgd(), scheme=tp.policies.Auto(compression=("topk",), density=0.05)
    )
    model.compile(optimizer=optimizer, loss=models.LOSS, steps_per_execution=3)
    x, y = models.mlp.data(4 * (12 + 3 * wire.topology.rank))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *_: True)
    with links(given(wire, "1mbit")), plans_are_changed():
        model.fit(data, epochs=5, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert int(optimizer.iterations) == 60
    _check_planned(optimizer)


def test_replicas_stay_equal_in_mixed_precision_on_a_pydataset(wire):
    keras.config.set_dtype_policy("mixed_float16")
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(sgd())
    model.compile(optimizer=optimizer, loss=models.LOSS)
    with links("measure"), plans_are_changed():
        model.fit(
            models.Batches(*models.mlp.data(12 * BATCH), BATCH, workers=2), epochs=2, verbose=0
        )
    same_on_all_ranks(model.get_weights(), wire)
    _check_planned(optimizer)


def test_each_list_of_variables_of_an_optimizer_has_a_plan(wire):
    """The optimizer updates the two lists alternately."""
    kernels = [keras.Variable(np.ones((64, 64), "float32"), name=f"kernel_{i}") for i in range(2)]
    optimizer = tp.DistributedOptimizer(sgd())
    optimizer.build(kernels)
    with links(ideal(wire, bytes_per_s=1e6)):
        for turn in range(4):
            kernel = kernels[turn % 2]
            optimizer.apply([keras.ops.ones((64, 64)) * (wire.topology.rank + turn)], [kernel])
    same_on_all_ranks([kernel.numpy() for kernel in kernels], wire)
    assert len(optimizer.plan.forecasts) == 2
