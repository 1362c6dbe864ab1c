"""What `DistributedOptimizer` refuses, with the rule, what was received and the remedy."""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.coordinator import Plan
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer
from tfposeidon.policies import Policy

# Rules that update each element by itself.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adam,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


HOROVODS = {
    "compression": 'the scheme says what is sent: scheme="asa16" halves the bytes, "hitopk" sends the largest elements',
    "backward_passes_per_step": "write gradient_accumulation_steps",
    "average_aggregated_gradients": "accumulated gradients are averaged",
    "op": "gradients are averaged over ranks",
    "gradient_predivide_factor": "gradients are averaged over ranks; 16-bit schemes scale before they cast",
    "sparse_as_dense": 'rows of embeddings are summed and sent densely, or as rows with scheme="hybcomm"',
    "num_groups": "write bucket_bytes, the size up to which gradients are fused",
    "groups": "write bucket_bytes, the size up to which gradients are fused",
    "process_set": "all ranks of the job take part",
    "device_dense": "gradients are exchanged where they are",
    "device_sparse": "gradients are exchanged where they are",
}
"""Arguments of `horovod.tensorflow.keras.DistributedOptimizer`, and what there is in their place."""


def check_inner(inner: Any, wrapper: type) -> None:
    """Refuses what is not a Keras optimizer, and one that `wrapper` holds already."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`inner_optimizer` must be a Keras 3 optimizer. Received: {inner!r} of type {type(inner).__name__}. "
            "Pass for example keras.optimizers.SGD(0.1)."
        )
    if isinstance(inner, wrapper) or isinstance(innermost(inner), wrapper):
        raise ValueError(
            "An optimizer must be wrapped in DistributedOptimizer once. Received: one that is already. "
            "Use it as it is, or wrap its inner_optimizer."
        )


def check_no_more_arguments(others: dict[str, Any]) -> None:
    """Refuses arguments that there are not, those of Horovod's optimizer with what does the same here."""
    for name in others:
        if name in HOROVODS:
            raise TypeError(
                f"`{name}` is an argument of Horovod's DistributedOptimizer. Received: {name}={others[name]!r}. "
                f"Here {HOROVODS[name]}."
            )
        raise TypeError(
            f"DistributedOptimizer has no argument `{name}`. Received: {name}={others[name]!r}. Leave it out."
        )


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Refuses sizes that are not whole numbers from 0."""
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 0:
        raise ValueError(f"`bucket_bytes` must be a whole number from 0. Received: bucket_bytes={bucket_bytes!r}")


def check_sample_count(sample_count: Any) -> None:
    """Refuses what is no function: the number itself belongs into `apply`."""
    if sample_count is not None and not callable(sample_count):
        raise TypeError(
            "`sample_count` must be a function from a batch to a number. Received: "
            f"sample_count={sample_count!r}. In a hand-written loop give the number to apply."
        )


def check_server_update(policy: Policy, inner: Any) -> None:
    """Refuses to let servers update by a rule that needs whole variables, or may need them."""
    if not policy.updates_at_servers:
        return
    optimizer = innermost(inner)
    rule = next(cls for cls in type(optimizer).__mro__ if "update_step" in vars(cls))
    completed = isinstance(optimizer, LayerWiseOptimizer)
    if rule not in ELEMENTWISE and not completed and not getattr(optimizer, "updates_elementwise", False):
        names = ", ".join([*(cls.__name__ for cls in ELEMENTWISE), "LARS", "LAMB"])
        raise ValueError(
            f'update="server" gives the optimizer parts of variables, which {names} can work on. Received: '
            f"{type(optimizer).__name__}, whose rule needs whole variables, or is not known not to. Use "
            'ShardedServer(update="worker"), or, if each element is updated by itself, set updates_elementwise = True '
            "on the optimizer."
        )


def check_not_built(inner: Any) -> None:
    """Refuses an optimizer that has state already, which servers would have to cut."""
    if inner.built:
        raise ValueError(
            'With update="server" the optimizer\'s state is made by DistributedOptimizer. Received: '
            f"{type(innermost(inner)).__name__}, built already. Pass a new one."
        )


def check_all_variables(given: list[Any], built: list[Any], served: bool) -> None:
    """Refuses updates of some variables only where each server's part was cut for all."""
    if served and [id(v) for v in given] != [id(v) for v in built]:
        raise ValueError(
            'With update="server" all variables are updated together. Received: gradients for '
            f"{len(given)} of {len(built)} variables, or in another order. Use an optimizer for each list, or "
            'update="worker".'
        )


def check_callbacks(policy: Policy, callbacks: list[Any]) -> None:
    """Refuses callbacks that reach for variables of the inner optimizer, where these are parts."""
    if policy.updates_at_servers and any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks):
        raise ValueError(
            'With update="server" averages of weights lie with the servers. Received: SwapEMAWeights. Leave it out (at '
            'the end of fit the weights become their averages), or use update="worker".'
        )


def check_change(old: Policy, new: Policy) -> None:
    """Refuses a change of schemes to or from servers that update."""
    if old != new and (old.updates_at_servers or new.updates_at_servers):
        raise ValueError(
            f'Schemes with update="server" stay for the whole training: the optimizer\'s state lies with the servers. '
            f'Received: a change from {old} to {new}. Use update="worker".'
        )


def check_surroundings() -> None:
    """Refuses other backends than TensorFlow's, and `tf.distribute`."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"tfposeidon works with Keras's TensorFlow backend. Received: backend {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "DistributedOptimizer replaces tf.distribute. Received: use under "
            f"{type(tf.distribute.get_strategy()).__name__}. Leave the strategy's scope, and start one process per GPU "
            "with horovodrun."
        )


def check_graph() -> None:
    """Refuses, while a step is traced, surroundings in which collectives cannot run."""
    check_surroundings()
    if native.in_xla():
        raise ValueError(
            "Collectives cannot be compiled by XLA. Received: a train step with jit_compile=True. "
            "Leave jit_compile out of model.compile (or pass False): tfposeidon keeps XLA off for that step."
        )


def innermost(optimizer: Any) -> Any:
    """The optimizer inside wrappers that have an `inner_optimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def is_asked_by_compile() -> bool:
    """Whether the caller's caller is Keras's own `compile`."""
    asking = sys._getframe(2)
    return asking.f_code.co_name == "compile" and str(asking.f_globals.get("__name__")).startswith("keras.")


def check_momentum(plan: Plan, inner: Any) -> None:
    """Refuses momentum both before selection and after it."""
    corrected = {bucket.scheme.name for bucket in plan.buckets if bucket.scheme.corrects_momentum}
    afterwards = getattr(innermost(inner), "momentum", 0.0)
    if corrected and afterwards:
        raise ValueError(
            "Momentum correction takes the place of the optimizer's momentum. Received: momentum in "
            f"{', '.join(sorted(corrected))} and in {type(innermost(inner)).__name__}. Use SGD(momentum=0.0)."
        )


def processor_advice(plan: Plan) -> str:
    """Says so where native ops copy what lies on a GPU to the processor and back."""
    schemes = {bucket.scheme.name: bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)}
    if not schemes or not tf.config.list_physical_devices("GPU"):
        return ""
    built = native.has_gpu_kernels()
    names = ", ".join(sorted(name for name, scheme in schemes.items() if not (built and scheme.has_gpu_kernels)))
    if not names:
        return ""
    why = "there is no GPU kernel" if built else "tfposeidon was built without nvcc: install CUDA and build again"
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
