"""Advice about plans that work, but not as well as they might."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.optimizers.wrapping import leaves
from tfposeidon.planning.plan import Plan


def cpu_advice(plan: Plan) -> str:
    """Tells whether native ops copy what lies on a GPU to the CPU and back.

    Args:
      plan: The plan that steps follow.

    Returns:
      One line that names the schemes and the remedy; empty where there is nothing to say.
    """
    # Schemes with slots are those that select or code, by native ops.
    schemes = {
        bucket.scheme.name: bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)
    }
    if not schemes or not tf.config.list_physical_devices("GPU"):
        return ""
    is_built_for_gpus = native.has_gpu_kernels()
    on_cpu = [
        name
        for name, scheme in schemes.items()
        if not (is_built_for_gpus and scheme.has_gpu_kernels)
    ]
    if not on_cpu:
        return ""
    why = (
        "there is no GPU kernel"
        if is_built_for_gpus
        else "tfposeidon was built without nvcc: install CUDA and build again"
    )
    return f"{', '.join(sorted(on_cpu))}: what is sent is made on the CPU, as {why}"


def sparsity_advice(plan: Plan, inner: Any) -> str:
    """Tells whether an optimizer suits the sparse gradients that it is given.

    Args:
      plan: The plan that steps follow.
      inner: The optimizer inside `DistributedOptimizer`.

    Returns:
      One line; empty where there is nothing to say.
    """
    sparse = [bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)]
    if not sparse:
        return ""
    name = sparse[0].name
    # What fits worst, of several.
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
    # 1-bit SGD has no momentum correction that could be advised.
    if optimizer.momentum and not hasattr(sparse[0], "momentum"):
        return f"momentum after {name} acts on what is sent late"
    if optimizer.momentum:
        return (
            f"momentum after {name} acts on what is sent late: better SGD(momentum=0.0) with "
            f"{type(sparse[0]).__name__}(momentum={optimizer.momentum}), "
            "which applies it before selection"
        )
    return ""
