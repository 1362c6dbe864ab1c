"""Keras optimizers that hold another one."""

from __future__ import annotations

from typing import Any


def innermost(optimizer: Any) -> Any:
    """The optimizer inside wrappers that have an `inner_optimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
