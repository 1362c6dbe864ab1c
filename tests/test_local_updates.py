"""Tests `LocalUpdates` on one rank, and the state that is saved with a model."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers import models


def _trained(optimizer):
    keras.utils.set_random_seed(3)
    model = models.mlp()
    model.compile(optimizer, models.LOSS)
    model.fit(*models.mlp.data(24), batch_size=6, shuffle=False, verbose=0)
    return model


def test_one_rank_trains_as_the_inner_optimizer():
    expected = _trained(keras.optimizers.Adam(0.01)).get_weights()
    model = _trained(
        tp.LocalUpdates(keras.optimizers.Adam(0.01), sync_every=2, outer_optimizer="outer")
    )
    for one, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "one rank: no data is sent" in str(model.optimizer.plan)


@pytest.mark.parametrize(
    "rule",
    [
        tp.local.Average(),
        tp.local.Elastic(0.5),
        tp.local.SlowMomentum(0.6, rate=0.9),
        tp.local.Outer(keras.optimizers.SGD(0.3, momentum=0.2)),
    ],
)
def test_the_optimizer_is_saved_with_the_model(rule, tmp_path):
    optimizer = tp.LocalUpdates(
        keras.optimizers.SGD(0.1),
        7,
        rule,
        tp.schemes.AllToAll(wire_dtype="float16"),
        hierarchical=True,
        overlap_steps=3,
        warmup_steps=2,
        name="mine",
    )
    model = _trained(optimizer)
    # Simulate the state after three synchronizations on several ranks.
    optimizer.variables[0].assign(3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.variables[0].numpy()) == 3
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert loaded.optimizer.agreed_settings() == optimizer.agreed_settings()
    assert type(loaded.optimizer) is tp.LocalUpdates


def test_defaults_of_outer_optimizers_equal_their_sources():
    assert tp.local.Elastic().get_config() == {"beta": 0.9}
    assert tp.local.SlowMomentum().get_config() == {"momentum": 0.7, "rate": 1.0}
    config = tp.local.Outer().optimizer.get_config()
    assert config["learning_rate"] == pytest.approx(0.7)
    assert (config["momentum"], config["nesterov"]) == (0.9, True)


def test_global_weights_are_available_on_one_rank():
    model = _trained(tp.LocalUpdates(keras.optimizers.SGD(0.1)))
    before = model.get_weights()
    with model.optimizer.global_weights():
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_change_to_a_scheme_with_residuals_is_refused():
    optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.1), outer_optimizer="elastic")
    optimizer.change_scheme(tp.schemes.AllToAll(wire_dtype="float16"))
    with pytest.raises(ValueError, match="would otherwise count twice"):
        optimizer.change_scheme("topk")
    with pytest.raises(ValueError, match=r"must support pseudo-gradients.*scheme=Auto"):
        optimizer.change_scheme("auto")
