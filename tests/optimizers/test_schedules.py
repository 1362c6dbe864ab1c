"""Tests learning rates by step and by epoch, at every boundary."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.optimizers import LARS, schedules
from tfposeidon.optimizers.schedules import PolynomialDecayWithWarmup


def expected_rate(step, peak, warmup, decay, start, end, power):
    if step < warmup:
        return start + (peak - start) * step / warmup
    return end + (peak - end) * (1 - min(step - warmup, decay) / decay) ** power


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("decay", [1, 8])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_schedule_equals_its_formula_at_every_step(warmup, decay, power):
    schedule = PolynomialDecayWithWarmup(
        2.0, warmup, decay, initial_learning_rate=0.5, end_learning_rate=0.1, power=power
    )
    steps = np.arange(warmup + decay + 4)
    rates = schedule(tf.constant(steps))
    np.testing.assert_allclose(
        rates, [expected_rate(s, 2.0, warmup, decay, 0.5, 0.1, power) for s in steps], rtol=1e-6
    )
    # At the boundaries, the rate is exact.
    assert float(schedule(warmup)) == 2.0
    assert float(schedule(warmup + decay)) == float(schedule(10**9)) == np.float32(0.1)
    assert warmup == 0 or float(schedule(0)) == 0.5


def test_decay_and_warmup_equal_those_of_the_schedules_of_keras():
    ours = PolynomialDecayWithWarmup(
        1.0, 4, 10, initial_learning_rate=0.2, end_learning_rate=0.05, power=3.0
    )
    falling = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.05, 3.0)
    rising = keras.optimizers.schedules.CosineDecay(0.2, 10, warmup_target=1.0, warmup_steps=4)
    np.testing.assert_allclose(
        [ours(s) for s in range(4, 20)], [falling(s) for s in range(16)], rtol=1e-5
    )
    np.testing.assert_allclose(
        [ours(s) for s in range(5)], [rising(s) for s in range(5)], rtol=1e-6
    )


def test_the_schedule_by_epochs_equals_that_by_steps():
    by_epochs = PolynomialDecayWithWarmup.by_epochs(4.0, 2.5, 10, steps_per_epoch=7, power=1.0)
    assert by_epochs.get_config() == PolynomialDecayWithWarmup(4.0, 18, 70, power=1.0).get_config()


@pytest.mark.parametrize("warmup", [0, 2.5])
def test_the_cosine_by_epochs_equals_its_formula(warmup):
    schedule = schedules.cosine_decay_by_epochs(4.0, warmup, 10, steps_per_epoch=8, alpha=0.25)
    steps = np.arange(120)
    rise = 8 * warmup
    done = np.clip((steps - rise) / 80, 0, 1)
    fall = 4.0 * (0.25 + 0.75 * (1 + np.cos(np.pi * done)) / 2)
    expected = np.where(steps < rise, 4.0 * steps / max(rise, 1), fall)
    # As in Keras, alpha is a share of the peak.
    np.testing.assert_allclose(
        [float(schedule(step)) for step in steps], expected, rtol=1e-5, atol=1e-6
    )
    assert float(schedule(int(rise))) == 4.0
    with pytest.raises(ValueError, match="`steps_per_epoch` must be an integer >= 1"):
        schedules.cosine_decay_by_epochs(4.0, warmup, 10, steps_per_epoch=0)


def test_an_optimizer_uses_the_rates_of_the_schedule():
    optimizer, w = (
        LARS(PolynomialDecayWithWarmup(1.0, 2, 2), momentum=0.0),
        keras.Variable(np.zeros(2, "float32"), name="bias"),
    )
    for _ in range(5):
        optimizer.apply([tf.ones([2])], [w])
    # The rates are 0, 0.5, 1, 0.25 and 0.
    np.testing.assert_allclose(w, [-1.75, -1.75], rtol=1e-6)


def test_the_schedule_is_restored_from_its_config():
    schedule = PolynomialDecayWithWarmup(
        2, 5, 9, initial_learning_rate=0.1, end_learning_rate=0.2, power=1, name="x"
    )
    config = json.loads(json.dumps(keras.optimizers.schedules.serialize(schedule)))
    restored = keras.optimizers.schedules.deserialize(config)
    assert type(restored) is PolynomialDecayWithWarmup
    assert restored.get_config() == schedule.get_config()
    steps = range(16)
    assert [float(restored(step)) for step in steps] == [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"peak_learning_rate": 0.0},
            "`peak_learning_rate` must be a finite number > 0. Received: peak_learning_r",
        ),
        (
            {"warmup_steps": -1},
            "`warmup_steps` must be an integer >= 0. Received: warmup_steps=-1. Use 0",
        ),
        ({"warmup_steps": 1.5}, r"Received: warmup_steps=1\.5\. .*by_epochs"),
        (
            {"decay_steps": 0},
            "`decay_steps` must be an integer >= 1. Received: decay_steps=0",
        ),
        (
            {"initial_learning_rate": 2.0},
            r"in \[0, peak_learning_rate=1\.0\]\. Received: initial_learning_rate=2\.0",
        ),
        (
            {"end_learning_rate": -0.1},
            r"Received: end_learning_rate=-0\.1\. Use 0\.0, or a higher peak",
        ),
        ({"power": 0}, r"`power` must be a finite number > 0\. Received: power=0\. Use 1"),
    ],
)
def test_the_schedule_refuses_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        PolynomialDecayWithWarmup(
            **{"peak_learning_rate": 1.0, "warmup_steps": 2, "decay_steps": 3, **options}
        )


def test_invalid_epochs_are_refused():
    for given, name in (
        ((-1, 2, 5), "warmup_epochs"),
        ((1, 0, 5), "decay_epochs"),
        ((1, 2, 0.5), "steps_per_epoch"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be .* Received: {name}="):
            PolynomialDecayWithWarmup.by_epochs(1.0, *given)
