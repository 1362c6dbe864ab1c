"""Small models of keras-hub with random weights.

They have features that simple models lack: gradients without static shapes, because positions are
sliced to the length of a batch and class tokens are tiled to its size; variables without gradients;
frozen layers with LoRA; and experts in one array.
"""

import keras
import numpy as np
import pytest

from tests.helpers import models

keras_hub = pytest.importorskip("keras_hub")

TOKENS = 30
ENCODER = {"vocabulary_size": TOKENS, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
DECODER = {**ENCODER, "num_query_heads": 2, "num_key_value_heads": 1}


def bert():
    backbone = keras_hub.models.BertBackbone(**ENCODER, num_heads=2, dropout=0.0)
    return text_model(backbone, segment_ids=keras.ops.zeros_like)


def gemma_with_lora():
    backbone = keras_hub.models.GemmaBackbone(**DECODER, head_dim=8)
    backbone.enable_lora(2)
    return text_model(backbone)


def text_model(backbone, **more):
    """Returns a classifier of texts of any length, which are padded with token 0."""
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


def make_texts(count):
    generator = np.random.default_rng(0)
    tokens, lengths = (
        generator.integers(1, TOKENS, (count, 8)),
        generator.integers(3, 9, (count, 1)),
    )
    return np.where(np.arange(8) < lengths, tokens, 0), generator.integers(0, models.CLASSES, count)
