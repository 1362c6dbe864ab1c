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
