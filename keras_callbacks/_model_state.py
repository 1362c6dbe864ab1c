"""Trained variables of an optimizer."""

from __future__ import annotations

from typing import Any


def trained_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer trains."""
    # Keras has no public name for them.
    return list(optimizer._trainable_variables)
