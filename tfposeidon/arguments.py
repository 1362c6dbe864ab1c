"""Validation of optimizer arguments other than numbers, which `checks` validates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfposeidon.optimizers.wrapper import innermost, leaves

HOROVODS = {
    "compression": "the scheme defines the compression: "
    'scheme=tp.schemes.AllToAll(wire_dtype="float16") halves the bytes, "hitopk" sends only '
    "the largest elements",
    "backward_passes_per_step": "use gradient_accumulation_steps for 2 or more, and leave it out "
    "for 1; gradients of the calls are averaged, so multiply the learning rate by it for sums",
    "average_aggregated_gradients": "leave it out: accumulated gradients are averaged; for sums, "
    "multiply the learning rate by gradient_accumulation_steps",
    "op": "leave it out: gradients are averaged over ranks",
    "gradient_predivide_factor": "leave it out: gradients are averaged over ranks, and 16-bit "
    "schemes scale gradients before the cast",
    "sparse_as_dense": "leave it out: embedding gradients are summed by row and sent as a dense "
    'tensor, or as rows with scheme="hybcomm"',
    "num_groups": "use bucket_bytes, the size up to which gradients are fused",
    "groups": "use bucket_bytes, the size up to which gradients are fused",
    "process_set": "leave it out: all ranks of the job take part",
    "device_dense": "leave it out: gradients are exchanged on the device that holds them",
    "device_sparse": "leave it out: gradients are exchanged on the device that holds them",
    "scale_local_gradients": "leave it out: all gradients are averaged over ranks",
}
"""Arguments of Horovod's `DistributedOptimizer` for Keras, and their replacements."""

CALLBACKS = {
    "initial_lr": "use initial_learning_rate",
    "verbose": "leave it out; read the rate from optimizer.learning_rate",
}
"""Arguments of Horovod's learning rate callbacks, and their replacements."""


def check_inner(owner: str, inner: Any, base: type) -> None:
    """Refuses inner optimizers that are not Keras optimizers, or already wrapped or scaled."""
    # `base` is `CommunicatingOptimizer`, which this module must not import: imports point down.
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`inner_optimizer` must be a Keras 3 optimizer. Received: {inner!r} of type "
            f"{type(inner).__name__}. Pass for example keras.optimizers.SGD(0.1)."
        )
    if isinstance(inner, base) or isinstance(innermost(inner), base):
        raise ValueError(
            "An optimizer must be wrapped only once, in DistributedOptimizer, LocalUpdates or "
            "ElasticAveraging. Received: an optimizer that is already wrapped. Use it unchanged, "
            "or wrap its inner_optimizer."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer must wrap the communicating optimizer: it must check the "
            f"averaged gradients for infinities and NaN. Received: {type(inner).__name__} as the "
            f"inner optimizer. Write LossScaleOptimizer({owner}(optimizer)), or compile the model "
            "under mixed_float16, which adds the loss scale."
        )


def check_no_more_arguments(
    owner: str, others: dict[str, Any], horovods: dict[str, str] = HOROVODS
) -> None:
    """Refuses all unknown arguments in one error, with the replacement for those of Horovod."""
    if not others:
        return
    lines = [
        f"{name}={value!r}: {horovods.get(name, f'{owner} has no argument `{name}`, leave it out')}"
        for name, value in others.items()
    ]
    than = (
        " (its arguments differ from Horovod's)" if any(name in horovods for name in others) else ""
    )
    raise TypeError(
        f"{owner} does not support these arguments{than}. Received: " + "; ".join(lines) + "."
    )


def check_sample_count(sample_count: Any) -> None:
    """Refuses a `sample_count` that is not a function; numbers are passed to `apply`."""
    if sample_count is not None and not callable(sample_count):
        raise TypeError(
            "`sample_count` must be a function that maps a batch to a number. Received: "
            f"sample_count={sample_count!r}. In a custom training loop, pass the number to apply."
        )


def check_no_averages(optimizer: str, inner: Any) -> None:
    """Refuses averages over steps of weights that differ between ranks."""
    if any(leaf.use_ema for leaf in leaves(inner)):
        raise ValueError(
            f"{optimizer} does not support use_ema, because weights differ between ranks. "
            "Received: an inner optimizer with use_ema=True. Remove use_ema from the inner "
            "optimizer."
        )


def check_all_variables(optimizer: str, given: Sequence[Any], known: Sequence[Any]) -> None:
    """Refuses a call that does not update all variables of an optimizer, in their order."""
    if [id(variable) for variable in given] != [id(variable) for variable in known]:
        raise ValueError(
            f"{optimizer} must update all its variables in each call, in their order. Received: "
            f"gradients for {len(given)} of {len(known)} variables, or in another order. Use a "
            "separate optimizer for each list of variables."
        )


def check_saves_weights_only(name: str, callbacks: Sequence[Any]) -> None:
    """Refuses Orbax for optimizers whose state is not all in `variables`, which it saves."""
    for one in callbacks:
        if isinstance(one, keras.callbacks.OrbaxCheckpoint) and not one.save_weights_only:
            raise ValueError(
                f"With {name}, OrbaxCheckpoint must save weights only, because ranks hold "
                "different state of the optimizer. Received: OrbaxCheckpoint with "
                "save_weights_only=False. Set it to True, or use keras_callbacks.Checkpoint."
            )
