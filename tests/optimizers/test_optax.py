"""Compares LARS and LAMB with the independent implementations of optax."""

import jax
import optax
import pytest
import tensorflow as tf

from tests.optimizers.layer_wise import (
    BY_DEFAULT,
    STEPS,
    apply,
    assert_close,
    gradients,
    starts,
    trained,
    variables,
)
from tfposeidon.optimizers import LAMB, LARS

MASK = {path: path not in BY_DEFAULT for path in starts()}


def trained_by_optax(rule):
    weights = {path: jax.numpy.asarray(value, "float32") for path, value in starts().items()}
    state = rule.init(weights)
    for step in range(STEPS):
        given = {
            path: jax.numpy.asarray(value, "float32") for path, value in gradients(step).items()
        }
        updates, state = rule.update(given, state, weights)
        weights = optax.apply_updates(weights, updates)
    return list(weights.values())


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_equals_that_of_optax(nesterov, decay):
    rule = optax.lars(
        3.0,
        weight_decay=decay,
        weight_decay_mask=MASK,
        trust_coefficient=0.02,
        eps=1e-3,
        trust_ratio_mask=MASK,
        momentum=0.9,
        nesterov=nesterov,
    )
    options = {
        "trust_coefficient": 0.02,
        "weight_decay": decay,
        "ratio": "norm_of_sum",
        "epsilon": 1e-3,
    }
    assert_close(trained(LARS(3.0, 0.9, nesterov, **options)), trained_by_optax(rule))


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lamb_equals_that_of_optax(decay):
    rule = optax.lamb(0.02, weight_decay=decay, mask=MASK)
    # optax applies the ratio to all variables, and only the decay has exclusions.
    ours = LAMB(0.02, weight_decay=decay, exclude=[])
    ours.exclude_from_weight_decay(var_names=["bias", "gamma", "scale"])
    assert_close(trained(ours), trained_by_optax(rule), rtol=2e-4, atol=1e-5)


def test_lars_equals_that_of_optax_if_a_norm_is_0():
    rule = optax.lars(3.0, trust_coefficient=0.02)
    weights = {path: jax.numpy.zeros_like(value, "float32") for path, value in starts().items()}
    given = {path: jax.numpy.asarray(value, "float32") for path, value in gradients(0).items()}
    updates, _ = rule.update(given, rule.init(weights), weights)
    made = variables()
    for variable in made:
        variable.assign(tf.zeros(variable.shape))
    apply(LARS(3.0, trust_coefficient=0.02, ratio="norm_of_sum", exclude=[]), made, 0)
    assert_close([variable.numpy() for variable in made], updates.values())
