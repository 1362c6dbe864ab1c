"""Validation of optimizer arguments other than numbers, which `ranges` validates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfposeidon.optimizers.wrapping import innermost, leaves

HOROVODS = {
    "compression": "the scheme says what is sent: "
    'scheme=tp.schemes.AllToAll(wire_dtype="float16") halves the bytes, "hitopk" sends the largest '
    "elements",
    "backward_passes_per_step": "write gradient_accumulation_steps for 2 or more, and nothing for "
    "1; calls are averaged, so for sums multiply the rate by it",
    "average_aggregated_gradients": "leave it out: accumulated gradients are averaged; for sums "
    "multiply the rate by gradient_accumulation_steps",
    "op": "leave it out: gradients are averaged over ranks",
    "gradient_predivide_factor": "leave it out: gradients are averaged over ranks, and 16-bit "
    "schemes scale before they cast",
    "sparse_as_dense": "leave it out: rows of embeddings are summed and sent densely, or as rows "
    'with scheme="hybcomm"',
    "num_groups": "write bucket_bytes, the size up to which gradients are fused",
    "groups": "write bucket_bytes, the size up to which gradients are fused",
    "process_set": "leave it out: all ranks of the job take part",
    "device_dense": "leave it out: gradients are exchanged where they are",
    "device_sparse": "leave it out: gradients are exchanged where they are",
    "scale_local_gradients": "leave it out: all gradients are averaged over ranks",
}
"""Arguments of Horovod's `DistributedOptimizer` for Keras, and their replacements."""

CALLBACKS = {
    "initial_lr": "write initial_learning_rate",
    "verbose": "leave it out; optimizer.learning_rate holds the rate",
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
            "An optimizer must be wrapped once, in DistributedOptimizer, LocalUpdates or "
            "ElasticAveraging. Received: one that is already. Use it as it is, or wrap its "
            "inner_optimizer."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "A loss scale must be around the optimizer that communicates, for gradients are "
            f"averaged before it asks whether they are finite. Received: {type(inner).__name__} as "
            f"the inner optimizer. Write LossScaleOptimizer({owner}(optimizer)), or leave it to "
            "compile, which does so under mixed_float16."
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
    than = " than Horovod's" if any(name in horovods for name in others) else ""
    raise TypeError(f"{owner} has other arguments{than}. Received: " + "; ".join(lines) + ".")


def check_sample_count(sample_count: Any) -> None:
    """Refuses a `sample_count` that is not a function; numbers are passed to `apply`."""
    if sample_count is not None and not callable(sample_count):
        raise TypeError(
            "`sample_count` must be a function from a batch to a number. Received: "
            f"sample_count={sample_count!r}. In a hand-written loop give the number to apply."
        )


def check_no_averages(optimizer: str, inner: Any) -> None:
    """Refuses averages over steps of weights that differ between ranks."""
    if any(leaf.use_ema for leaf in leaves(inner)):
        raise ValueError(
            f"{optimizer} cannot average weights over steps, as these differ from rank to rank. "
            "Received: an inner optimizer with use_ema=True. Leave it out."
        )


def check_all_variables(optimizer: str, given: Sequence[Any], known: Sequence[Any]) -> None:
    """Refuses a call that does not update all variables of an optimizer, in their order."""
    if [id(variable) for variable in given] != [id(variable) for variable in known]:
        raise ValueError(
            f"{optimizer} updates all its variables in each call. Received: gradients for "
            f"{len(given)} of {len(known)} variables, or in another order. Use an optimizer for "
            "each list."
        )
