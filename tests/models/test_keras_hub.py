"""Small models of keras-hub with random weights train as in one process.

`tests/helpers/hub.py` lists the features of these models.
"""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.hub import (
    DECODER,
    bert,
    gemma_with_lora,
    make_texts,
    text_model,
)
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, SERVED, adam, check_equal, distributed, sgd, train_alone

keras_hub = pytest.importorskip("keras_hub")

pytestmark = pytest.mark.ranks("2x1")

STEPS = 3
SIDE = 16
SPARSE = tp.schemes.HiTopK(density=0.05, min_elements=0)


def _vit():
    backbone = keras_hub.models.ViTBackbone(
        (SIDE, SIDE, 3), 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return keras.Model(backbone.input, keras.layers.Dense(models.CLASSES)(backbone.output[:, 0]))


def _mixture_of_experts():
    width = {"moe_intermediate_dim": 16, "shared_expert_intermediate_dim": 16}
    # The auxiliary loss is a product of means over the batch, so it depends on the split of
    # samples.
    experts = {"num_experts": 4, "top_k": 2, "router_aux_loss_coefficient": 0.0}
    return text_model(keras_hub.models.QwenMoeBackbone(**DECODER, **width, **experts))


def _images(count):
    generator = np.random.default_rng(0)
    images = generator.normal(size=(count, SIDE, SIDE, 3)).astype("float32")
    return images, generator.integers(0, models.CLASSES, count)


def _check(wire, build, data, make_optimizer, schemes, **options):
    """Checks that ranks are equal, and that exact schemes give the weights of one process."""
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "training must change the reference"
    mine = models.of_any_length(
        *models.share(data, BATCH, wire.topology), BATCH // wire.topology.size
    )
    for scheme in schemes:
        model = models.copy(build, start)
        model.compile(optimizer=distributed(make_optimizer(), scheme, **options), loss=models.LOSS)
        model.fit(mine, shuffle=False, verbose=0)
        same_on_all_ranks(
            [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)], wire
        )
        if scheme is not SPARSE:
            check_equal(model.get_weights(), reference)


def test_bert_trains_as_in_one_process(wire):
    _check(wire, bert, make_texts(STEPS * BATCH), sgd, ("hybcomm", "factors"))


@pytest.mark.parametrize("build", [bert, gemma_with_lora])
def test_models_compiled_by_xla_train_as_in_one_process(wire, build):
    _check(wire, build, make_texts(STEPS * BATCH), sgd, ("allreduce",), xla_segments=2)


def test_vit_trains_as_in_one_process(wire):
    _check(wire, _vit, _images(STEPS * BATCH), sgd, (SERVED,))


def test_gemma_with_lora_trains_as_in_one_process(wire):
    _check(wire, gemma_with_lora, make_texts(STEPS * BATCH), adam, ("hybcomm",))


def test_a_mixture_of_experts_trains_as_in_one_process(wire):
    _check(wire, _mixture_of_experts, make_texts(STEPS * BATCH), sgd, ("hybcomm", SPARSE))
