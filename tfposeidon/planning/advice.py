"""What a user should know of a plan that works."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.planning.plan import Plan


def cpu_advice(plan: Plan) -> str:
    """Says so where native ops copy what lies on a GPU to the processor and back."""
    schemes = {
        bucket.scheme.name: bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)
    }
    if not schemes or not tf.config.list_physical_devices("GPU"):
        return ""
    built = native.has_gpu_kernels()
    names = ", ".join(
        sorted(name for name, scheme in schemes.items() if not (built and scheme.has_gpu_kernels))
    )
    if not names:
        return ""
    why = (
        "there is no GPU kernel"
        if built
        else "tfposeidon was built without nvcc: install CUDA and build again"
    )
    return f"{names}: what is sent is made on the processor, as {why}"


def sparsity_advice(plan: Plan, inner: Any) -> str:
    """What to know of an optimizer that is fed with sparse gradients; mostly nothing."""
    sparse = [bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)]
    optimizer = innermost(inner)
    if not sparse:
        return ""
    if not isinstance(optimizer, keras.optimizers.SGD):
        return (
            f"{type(optimizer).__name__} is not linear in the gradient: what {sparse[0].name} has not sent yet, it "
            "takes for zeros; SGD, or a dense scheme, fits better"
        )
    if len({bucket.scheme.corrects_momentum for bucket in plan.buckets}) > 1:
        return "momentum is corrected for some variables only; the others have none, as the optimizer's must be 0"
    if optimizer.momentum and not hasattr(sparse[0], "momentum"):
        return f"momentum after {sparse[0].name} acts on what is sent late"
    if optimizer.momentum:
        return (
            f"momentum after {sparse[0].name} acts on what is sent late: better SGD(momentum=0.0) with "
            f"{type(sparse[0]).__name__}(momentum={optimizer.momentum}), which applies it before selection"
        )
    return ""
