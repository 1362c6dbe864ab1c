"""Compatibility of a plan with the inner optimizer: refusals, and advice about slower training."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.exchange.plan import Plan
from tfposeidon.optimizers.wrapping import leaves


def cpu_advice(plan: Plan) -> str:
    """Returns a line if native ops copy GPU tensors to the CPU and back, else an empty string."""
    # Schemes with state select elements, by native ops.
    names = {bucket.scheme.name for bucket in plan.buckets if bucket.slots(plan.topology)}
    if not names or not tf.config.list_physical_devices("GPU") or native.has_gpu_kernels():
        return ""
    return (
        f"{', '.join(sorted(names))}: messages are computed on the CPU, because tfposeidon was "
        "built without nvcc: install CUDA and build tfposeidon again"
    )


def sparsity_advice(plan: Plan, inner: Any) -> str:
    """Returns a line if the optimizer does not suit sparse gradients, else an empty string."""
    sparse = [bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)]
    if not sparse:
        return ""
    name = sparse[0].name
    # Of several optimizers, check the least suitable one.
    optimizer = min(leaves(inner), key=lambda leaf: isinstance(leaf, keras.optimizers.SGD))
    if not isinstance(optimizer, keras.optimizers.SGD):
        return (
            f"{type(optimizer).__name__} is not linear in the gradient: it treats gradients that "
            f"{name} has not sent yet as zeros; SGD, or a dense scheme, is more suitable"
        )
    if len({bucket.scheme.corrects_momentum for bucket in plan.buckets}) > 1:
        return (
            "momentum correction applies to some variables only; the others have no momentum, "
            "because the optimizer's momentum must be 0"
        )
    # 1-bit SGD has no momentum correction to recommend.
    if optimizer.momentum and not hasattr(sparse[0], "momentum"):
        return f"momentum after {name} acts on delayed gradients"
    if optimizer.momentum:
        return (
            f"momentum after {name} acts on delayed gradients: use SGD(momentum=0.0) with "
            f"{type(sparse[0]).__name__}(momentum={optimizer.momentum}) instead, which applies "
            "momentum before selection"
        )
    return ""


def check_optimizer(plan: Plan, inner: Any) -> None:
    """Refuses schemes that the inner optimizer does not support."""
    _check_momentum(plan, inner)
    _check_sparse_updates(plan, inner)


def _check_momentum(plan: Plan, inner: Any) -> None:
    """Refuses momentum both before selection, by the scheme, and after it, by the optimizer."""
    corrected = {bucket.scheme.name for bucket in plan.buckets if bucket.scheme.corrects_momentum}
    moved = [leaf for leaf in leaves(inner) if getattr(leaf, "momentum", 0.0)]
    if corrected and moved:
        raise ValueError(
            "Momentum correction replaces the optimizer's momentum. Received: momentum in "
            f"{', '.join(sorted(corrected))} and in {type(moved[0]).__name__}. Use "
            "SGD(momentum=0.0)."
        )


def _check_sparse_updates(plan: Plan, inner: Any) -> None:
    """Refuses Adafactor with sparse schemes: its means over rows may be zero."""
    sparse = {b.scheme.name for b in plan.buckets if getattr(b.scheme, "density", 1.0) < 1.0}
    if sparse and any(isinstance(leaf, keras.optimizers.Adafactor) for leaf in leaves(inner)):
        raise ValueError(
            "Adafactor requires a scheme that sends all elements: its means over rows and "
            "columns are zero if no element was sent, and weights become NaN. Received: "
            f"Adafactor with {', '.join(sorted(sparse))}. Use Adam, or a scheme that sends all "
            'elements, such as "alltoall".'
        )
