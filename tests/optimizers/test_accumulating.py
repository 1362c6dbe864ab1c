"""Keras accumulates gradients: the inner optimizer receives every call, as without a wrapper."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp

STEPS, CALLS = 3, 8
optimizers = keras.optimizers
SCHEDULE = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
RULES = {
    "SGD": lambda **more: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **more),
    "Adam": lambda **more: optimizers.Adam(0.05, **more),
    "AdamW by a schedule": lambda **more: optimizers.AdamW(SCHEDULE, weight_decay=0.1, **more),
    "RMSprop": lambda **more: optimizers.RMSprop(0.05, momentum=0.5, **more),
    "Adagrad": lambda **more: optimizers.Adagrad(0.1, **more),
    "Adadelta": lambda **more: optimizers.Adadelta(0.5, **more),
    "Adamax": lambda **more: optimizers.Adamax(0.05, **more),
    "Nadam": lambda **more: optimizers.Nadam(0.05, **more),
    "Ftrl": lambda **more: optimizers.Ftrl(0.05, **more),
    "Lion": lambda **more: optimizers.Lion(0.01, **more),
    "Adafactor": lambda **more: optimizers.Adafactor(0.05, **more),
    "Lamb": lambda **more: optimizers.Lamb(0.05, **more),
    "clipped": lambda **more: optimizers.SGD(SCHEDULE, global_clipnorm=0.5, **more),
    "averaged": lambda **more: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2, **more),
    "LARS": lambda **more: tp.optimizers.LARS(0.1, **more),
}


def _gradients(call):
    draw = np.random.default_rng(call)
    return [tf.constant(draw.normal(size=shape), "float32") for shape in ((4, 3), (3,))]


def _variables():
    draw = np.random.default_rng(99)
    return [
        keras.Variable(draw.normal(size=shape), dtype="float32", name=name)
        for shape, name in (((4, 3), "kernel"), ((3,), "bias"))
    ]


def _apply(optimizer, variables, call):
    scaled = [gradient * optimizer.scale_loss(1.0) for gradient in _gradients(call)]
    optimizer.apply(scaled, variables)


def _check_same(ours, others):
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def _scaled(optimizer):
    return optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)


@pytest.mark.parametrize(
    ("rule", "around"), [*((rule, lambda inner: inner) for rule in RULES), ("Adam", _scaled)]
)
def test_each_call_equals_a_call_of_keras(rule, around):
    mine, others = _variables(), _variables()
    plain = around(RULES[rule](gradient_accumulation_steps=STEPS))
    # The scheme has state, so that one rank uses our accumulators, too.
    sparse = tp.schemes.TopK(density=1.0, min_elements=0)
    inside = tp.DistributedOptimizer(RULES[rule](gradient_accumulation_steps=STEPS), sparse)
    wrapped = around(inside)
    plain.build(others)
    for call in range(CALLS):
        _apply(plain, others, call)
        _apply(wrapped, mine, call)
        _check_same(mine, others)
        assert int(wrapped.iterations) == int(plain.iterations)
        assert float(wrapped.learning_rate) == pytest.approx(float(plain.learning_rate))


def test_an_optimizer_may_be_wrapped_within_an_update():
    """The wrapper continues an accumulation that the inner optimizer has begun."""
    mine, others = _variables(), _variables()
    plain, inner = (RULES["Adam"](gradient_accumulation_steps=STEPS) for _ in range(2))
    for optimizer, variables in ((plain, others), (inner, mine)):
        optimizer.build(variables)
        for call in range(4):
            _apply(optimizer, variables, call)
    wrapped = tp.DistributedOptimizer(inner)
    for call in range(4, CALLS):
        _apply(plain, others, call)
        _apply(wrapped, mine, call)
        _check_same(mine, others)


def test_calls_are_weighted_by_their_sample_counts():
    """All samples of an update have equal weight, whichever call they belong to."""
    (variable,) = variables = [keras.Variable([0.0], name="w")]
    optimizer = tp.DistributedOptimizer(optimizers.SGD(1.0, gradient_accumulation_steps=2))
    for gradient, count in ((1.0, 3), (5.0, 1)):
        optimizer.apply([tf.constant([gradient])], variables, sample_count=count)
    assert float(variable.numpy()[0]) == pytest.approx(-2.0)


def test_outer_accumulation_steps_set_the_inner_ones():
    inner = optimizers.SGD(0.1)
    assert tp.DistributedOptimizer(inner, gradient_accumulation_steps=2).gradient_accumulation_steps
    assert inner.gradient_accumulation_steps == 2
    built = optimizers.SGD(0.1)
    built.build(_variables())
    with pytest.raises(
        ValueError, match="must be set before the inner optimizer is built, and only once"
    ):
        tp.DistributedOptimizer(built, gradient_accumulation_steps=2)
    made_late = optimizers.MultiOptimizer(lambda variable: optimizers.SGD(0.1))
    wrapped = tp.DistributedOptimizer(made_late, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="an inner optimizer that was created later without"):
        wrapped.build(_variables())
