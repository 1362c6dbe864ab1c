"""Statistics that layers keep of the batches they have seen."""

from __future__ import annotations

from typing import Any

import keras


def moving_statistics(model: Any) -> list[Any]:
    """Returns the moving means and variances of a model's `BatchNormalization` layers.

    Args:
      model: A Keras model; layers that are not built yet are left out.
    """
    # Keras's public `layers` does not look into layers and models inside the model.
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
    ]
    return [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]


def state_of_layers(model: Any) -> list[Any]:
    """Returns all floating-point variables of a model's layers that no gradient moves.

    They are moving statistics, and what layers of one's own keep; neither weights that are frozen,
    nor seeds.

    Args:
      model: A Keras model; layers that are not built yet are left out.
    """
    # Keras's public `non_trainable_variables` has frozen weights, too.
    found = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    # Layers may share a variable.
    return list({id(v): v for v in found if keras.backend.is_float_dtype(v.dtype)}.values())
