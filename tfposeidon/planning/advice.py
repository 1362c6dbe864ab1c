"""Advice about plans that work, but not as well as they could."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.optimizers.wrapping import leaves
from tfposeidon.planning.plan import Plan


def cpu_advice(plan: Plan) -> str:
    """Returns a line if native ops copy GPU tensors to the CPU and back, else an empty string."""
    # Schemes with state select elements, by native ops.
    names = {bucket.scheme.name for bucket in plan.buckets if bucket.slots(plan.topology)}
    if not names or not tf.config.list_physical_devices("GPU") or native.has_gpu_kernels():
        return ""
    return (
        f"{', '.join(sorted(names))}: what is sent is made on the CPU, as tfposeidon was built "
        "without nvcc: install CUDA and build again"
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
            f"{type(optimizer).__name__} is not linear in the gradient: what {name} has not sent "
            "yet, it takes for zeros; SGD, or a dense scheme, fits better"
        )
    if len({bucket.scheme.corrects_momentum for bucket in plan.buckets}) > 1:
        return (
            "momentum is corrected for some variables only; the others have none, as the "
            "optimizer's must be 0"
        )
    # 1-bit SGD has no momentum correction to recommend.
    if optimizer.momentum and not hasattr(sparse[0], "momentum"):
        return f"momentum after {name} acts on what is sent late"
    if optimizer.momentum:
        return (
            f"momentum after {name} acts on what is sent late: better SGD(momentum=0.0) with "
            f"{type(sparse[0]).__name__}(momentum={optimizer.momentum}), "
            "which applies it before selection"
        )
    return ""
