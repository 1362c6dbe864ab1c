"""Tests optimizers that contain several others: Keras's `MultiOptimizer` and custom ones."""

import functools

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.local_updates import fitted
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, STEPS, check_equal, train_alone, train_together
from tfposeidon.optimizers.wrapper import leaves, rates, settings, slots

SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam


class Composite(keras.optimizers.Optimizer):
    """Custom optimizer with one inner optimizer for kernels, and one for other variables."""

    def __init__(self, **options):
        super().__init__(learning_rate=0.0, name="composite")
        self.parts = {"kernel": SGD(0.05, momentum=0.9, **options), "other": ADAM(0.01, **options)}

    def _of(self, variable):
        return "kernel" if "kernel" in variable.path else "other"

    def build(self, variables):
        for name, part in self.parts.items():
            part.build([v for v in variables if self._of(v) == name])
        super().build(variables)

    @property
    def variables(self):
        return [*self._variables, *(v for part in self.parts.values() for v in part.variables)]

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for name, part in self.parts.items():
            pairs = [
                (g, v)
                for g, v in zip(grads, trainable_variables, strict=True)
                if self._of(v) == name
            ]
            part.apply(*map(list, zip(*pairs, strict=True)))
        self.iterations.assign_add(1)

    def finalize_variable_values(self, variables):
        for name, part in self.parts.items():
            part.finalize_variable_values([v for v in variables if self._of(v) == name])


def multi(**options):
    rules = keras.optimizers.OptimizerMap(default_optimizer=ADAM(0.01, **options))
    rules[".*kernel"] = SGD(0.05, momentum=0.9, **options)
    return keras.optimizers.MultiOptimizer(rules)


KINDS = {"multi": multi, "composite": Composite}


@pytest.mark.parametrize("kind", KINDS)
def test_inner_optimizers_are_found(kind):
    optimizer = KINDS[kind]()
    scaled = keras.optimizers.LossScaleOptimizer(optimizer)
    assert [type(leaf) for leaf in leaves(scaled)] == [SGD, ADAM]
    assert leaves(leaves(scaled)[0]) == [leaves(scaled)[0]]
    optimizer.build(models.mlp().trainable_variables)
    assert [float(rate) for rate in rates(optimizer)] == pytest.approx([0.05, 0.01])
    # Two kernels have velocities, and two biases have means of gradients and of squares.
    assert len(slots(optimizer)) == 2 + 2 * 2
    other = KINDS[kind]()
    assert settings(optimizer) == settings(other)
    leaves(other)[1].beta_1 = 0.8
    assert settings(optimizer) != settings(other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"use_ema": True, "ema_momentum": 0.5}])
def test_training_on_one_rank_equals_training_by_keras(kind, options):
    start, data = models.mlp(), models.mlp.data(STEPS * BATCH)
    reference = train_alone(models.copy(models.mlp, start), data, KINDS[kind](**options))
    model = models.copy(models.mlp, start)
    model.compile(tp.DistributedOptimizer(KINDS[kind](**options)), models.LOSS)
    model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
    check_equal(model.get_weights(), reference)


def test_callbacks_of_keras_set_each_learning_rate():
    """The model has no loss scale, because with one, these callbacks find only a single rate."""
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(multi()), models.LOSS)
    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    tenths = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=100.0)
    model.fit(*models.mlp.data(8), epochs=2, verbose=0, callbacks=[halves, tenths])
    rates = [float(one.learning_rate) for one in model.optimizer.optimizers]
    # The plateau is detected in the second epoch.
    assert rates == pytest.approx([0.05 / 40, 0.01 / 40])
    assert not hasattr(tp.DistributedOptimizer(SGD(0.1)), "optimizers")


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_with_a_sparse_scheme(kind):
    model = models.mlp()
    scheme = tp.schemes.TopK(density=0.1, min_elements=0)
    model.compile(tp.DistributedOptimizer(KINDS[kind](), scheme), models.LOSS)
    before = model.get_weights()
    model.fit(*models.mlp.data(16), batch_size=4, verbose=0)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0


@pytest.mark.ranks("2")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_process(wire, kind):
    start, data = models.mlp(), models.mlp.data(STEPS * BATCH)
    make = functools.partial(KINDS[kind], use_ema=True, ema_momentum=0.5)
    reference = train_alone(models.copy(models.mlp, start), data, make())
    optimizer = tp.DistributedOptimizer(make(), "allreduce")
    weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
    check_equal(weights, reference)
    same_on_all_ranks([*weights, *(v.numpy() for v in optimizer.variables)], wire)


@pytest.mark.ranks("2")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_with_a_sparse_scheme_and_local_updates(wire, kind):
    start, data = models.mlp(), models.mlp.data(STEPS * BATCH)
    sparse = tp.schemes.TopK(density=0.1, min_elements=0)
    for optimizer in (
        tp.DistributedOptimizer(KINDS[kind](), sparse),
        tp.LocalUpdates(KINDS[kind](), sync_every=2),
    ):
        model = fitted(models.mlp, start, data, wire, optimizer)
        same_on_all_ranks(model.get_weights(), wire)
        assert np.abs(model.get_weights()[0] - start.get_weights()[0]).max() > 0


def test_a_callback_that_sets_one_rate_is_refused():
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(multi()), models.LOSS)
    schedule = keras_callbacks.LearningRateSchedule(0.1, lambda epoch: 1.0)
    with pytest.raises(ValueError, match="an optimizer that contains 2 others"):
        model.fit(*models.mlp.data(8), verbose=0, callbacks=[schedule])
