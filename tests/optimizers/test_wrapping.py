"""An optimizer resumes with the state and the number of steps of another."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tfposeidon.communication.wire import pack
from tfposeidon.elastic_averaging import job
from tfposeidon.optimizers.wrapper import rates, settings, slots, step_counter

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AMSGrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.9, centered=True),
    "Muon": lambda: keras.optimizers.Muon(0.1),
    "LARS": lambda: tp.optimizers.LARS(0.1),
    "LAMB": lambda: tp.optimizers.LAMB(0.1),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "by a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    ),
    "with a loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
}


def _weights():
    values = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    return [keras.Variable(values, name="kernel"), keras.Variable(values[0], name="bias")]


def _step(optimizer, weights, seed):
    generator = np.random.default_rng(seed)
    scale = float(optimizer.scale_loss(1.0))
    optimizer.apply(
        [scale * generator.normal(size=w.shape).astype("float32") for w in weights], weights
    )


def _state(optimizer):
    return [*slots(optimizer), *rates(optimizer), step_counter(optimizer)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_resumes_with_state_and_step_count(name):
    first, other = OPTIMIZERS[name](), OPTIMIZERS[name]()
    weights, copies = _weights(), _weights()
    first.build(weights)
    other.build(copies)
    for seed in range(5):
        _step(first, weights, seed)
    for weight, copy in zip(weights, copies, strict=True):
        copy.assign(weight)
    job.assign_parts(_state(other), pack(_state(first)))
    for seed in range(5, 8):
        _step(first, weights, seed)
        _step(other, copies, seed)
        for weight, copy in zip(weights, copies, strict=True):
            np.testing.assert_array_equal(weight.numpy(), copy.numpy())


def test_learning_rates_and_loss_scales_are_not_optimizer_state():
    optimizer = OPTIMIZERS["with a loss scale"]()
    optimizer.build(_weights())
    names = {variable.name for variable in slots(optimizer)}
    assert names == {f"{w}_{slot}" for slot in ("momentum", "velocity") for w in ("kernel", "bias")}


def _changed(value):
    if isinstance(value, bool) or value is None:
        return not value
    return 0.75 * value + 0.01 if isinstance(value, float) else value + 1


SETTINGS = [
    (name, setting)
    for name, make in OPTIMIZERS.items()
    if name not in ("accumulated", "by a schedule", "with a loss scale")
    for setting in make().get_config()
    # These settings are checked elsewhere, or set by a method.
    if setting not in ("name", "exclude", "loss_scale_factor") and "clip" not in setting
]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_each_setting_is_compared(name, setting):
    """The settings are those that Keras saves with an optimizer."""
    one = OPTIMIZERS[name]()
    config = one.get_config()
    value = config[setting]
    other = type(one).from_config(config)
    assert settings(other) == settings(one)
    if isinstance(value, None | bool | int | float):
        setattr(other, setting, _changed(value))
        assert settings(other) != settings(one)
        assert settings(keras.optimizers.LossScaleOptimizer(other)) != settings(
            keras.optimizers.LossScaleOptimizer(one)
        )


def test_settings_of_schedules_and_functions_are_compared_without_names():
    sgd, decay = keras.optimizers.SGD, keras.optimizers.schedules.ExponentialDecay

    def rate():
        return 0.1

    assert settings(sgd(0.1, name="one")) == settings(sgd(0.1, name="other"))
    assert settings(sgd(decay(0.1, 2, 0.5))) != settings(sgd(decay(0.1, 3, 0.5)))
    assert settings(sgd(rate)) == settings(sgd(rate))
    assert settings(sgd(rate)) != settings(sgd(0.1))
    # Functions that Keras cannot serialize are compared by their attributes.
    assert settings(sgd(lambda: 0.1, momentum=0.9)) != settings(sgd(lambda: 0.1, momentum=0.8))
