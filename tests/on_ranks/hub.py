"""Models of keras-hub, small and with random weights, train as in one process.

They have what small examples lack: positions cut to a batch's length and class tokens tiled to the
batch, so that gradients have no static shape; variables without a gradient; frozen layers beside
LoRA's; experts as one array.
"""

import keras
import keras_hub
import numpy as np

import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.models import same_on_all_ranks
from tests.on_ranks.optimizer_features import SERVED
from tests.on_ranks.training import BATCH, adam, check_equal, sgd, train_alone

STEPS = 3
TOKENS = 30
SIDE = 16
ENCODER = {"vocabulary_size": TOKENS, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
DECODER = {**ENCODER, "num_query_heads": 2, "num_key_value_heads": 1}
SPARSE = tp.schemes.HierarchicalTopK(density=0.05, min_elements=0)


def _bert():
    backbone = keras_hub.models.BertBackbone(**ENCODER, num_heads=2, dropout=0.0)
    return _of_text(backbone, segment_ids=keras.ops.zeros_like)


def _vit():
    backbone = keras_hub.models.ViTBackbone(
        (SIDE, SIDE, 3), 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return keras.Model(backbone.input, keras.layers.Dense(models.CLASSES)(backbone.output[:, 0]))


def _gemma_with_lora():
    backbone = keras_hub.models.GemmaBackbone(**DECODER, head_dim=8)
    backbone.enable_lora(2)
    return _of_text(backbone)


def _mixture_of_experts():
    width = {"moe_intermediate_dim": 16, "shared_expert_intermediate_dim": 16}
    # The loss for balance is a product of means over the batch, and no mean over samples.
    experts = {"num_experts": 4, "top_k": 2, "router_aux_loss_coefficient": 0.0}
    return _of_text(keras_hub.models.QwenMoeBackbone(**DECODER, **width, **experts))


def _of_text(backbone, **more):
    """A classifier of texts of any length, padded by token 0."""
    tokens = keras.Input((None,), dtype="int32")
    padding = keras.ops.cast(keras.ops.not_equal(tokens, 0), "int32")
    given = {name: make(tokens) for name, make in more.items()}
    output = backbone({"token_ids": tokens, "padding_mask": padding, **given})
    pooled = (
        output["pooled_output"]
        if isinstance(output, dict)
        else keras.layers.GlobalAveragePooling1D()(output)
    )
    return keras.Model(tokens, keras.layers.Dense(models.CLASSES)(pooled))


def _texts(count):
    generator = np.random.default_rng(0)
    tokens, lengths = (
        generator.integers(1, TOKENS, (count, 8)),
        generator.integers(3, 9, (count, 1)),
    )
    return np.where(np.arange(8) < lengths, tokens, 0), generator.integers(0, models.CLASSES, count)


def _images(count):
    generator = np.random.default_rng(0)
    images = generator.normal(size=(count, SIDE, SIDE, 3)).astype("float32")
    return images, generator.integers(0, models.CLASSES, count)


def _check(wire, build, data, make_optimizer, schemes):
    """Exact schemes end where one process ends, and all schemes with the same bits on all ranks."""
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "nothing was learnt, so nothing was compared"
    mine = models.of_any_length(
        *models.share(data, BATCH, wire.topology), BATCH // wire.topology.size
    )
    for scheme in schemes:
        model = models.copy(build, start)
        model.compile(
            optimizer=tp.DistributedOptimizer(make_optimizer(), scheme=scheme), loss=models.LOSS
        )
        model.fit(mine, shuffle=False, verbose=0)
        same_on_all_ranks(
            [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)], wire
        )
        if scheme is not SPARSE:
            check_equal(model.get_weights(), reference)


def case_bert(wire):
    _check(wire, _bert, _texts(STEPS * BATCH), sgd, ("allreduce", "ps", "hybcomm", "sfb"))


def case_vit(wire):
    _check(wire, _vit, _images(STEPS * BATCH), sgd, ("asa", "sfb", SERVED))


def case_gemma_with_lora(wire):
    _check(wire, _gemma_with_lora, _texts(STEPS * BATCH), adam, ("2dtar", "hybcomm", SERVED))


def case_mixture_of_experts(wire):
    _check(wire, _mixture_of_experts, _texts(STEPS * BATCH), sgd, ("ps", "hybcomm", SPARSE))
