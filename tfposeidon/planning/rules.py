"""Checks that refuse optimizers that do not fit the schemes of a plan."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.optimizers.wrapping import leaves
from tfposeidon.planning.plan import Plan


def check_momentum(plan: Plan, inner: Any) -> None:
    """Refuses momentum both before selection, by the scheme, and after it, by the optimizer."""
    corrected = {bucket.scheme.name for bucket in plan.buckets if bucket.scheme.corrects_momentum}
    moved = [leaf for leaf in leaves(inner) if getattr(leaf, "momentum", 0.0)]
    if corrected and moved:
        raise ValueError(
            "Momentum correction takes the place of the optimizer's momentum. Received: momentum "
            f"in {', '.join(sorted(corrected))} and in {type(moved[0]).__name__}. "
            "Use SGD(momentum=0.0)."
        )


def check_sparse_updates(plan: Plan, inner: Any) -> None:
    """Refuses Adafactor with sparse schemes: its means over rows may be zero."""
    sparse = {b.scheme.name for b in plan.buckets if getattr(b.scheme, "density", 1.0) < 1.0}
    if sparse and any(isinstance(leaf, keras.optimizers.Adafactor) for leaf in leaves(inner)):
        raise ValueError(
            "Adafactor divides by means over rows and columns, which are zero where nothing was "
            f"sent: weights become NaN. Received: Adafactor with {', '.join(sorted(sparse))}. Use "
            'Adam, or a scheme that sends everything, such as "alltoall".'
        )
