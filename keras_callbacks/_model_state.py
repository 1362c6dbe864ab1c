"""Trained variables of an optimizer, and samples seen by a model in training."""

from __future__ import annotations

from typing import Any

import keras


def trained_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer trains."""
    # Keras has no public name for them.
    return list(optimizer._trainable_variables)


def samples_seen(model: keras.Model) -> float | None:
    """Returns the samples since Keras last reset its loss tracker, or `None` without a tracker."""
    # Keras weights each batch's loss by its samples, so the sum of weights is their number.
    tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return None if tracker is None else float(tracker.count.numpy())
