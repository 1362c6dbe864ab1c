"""Creates the two exchanges of `LocalUpdates`: of pseudo-gradients, and of gradients in a node.

Replicas exchange pseudo-gradients in each synchronization. With `hierarchical=True`, each node is a
replica, whose ranks average gradients at every step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.exchange.step import Step

_LEAST_SAMPLES = 1e-6
"""Weight of a rank without samples, positive but negligible compared with other weights."""


def of_differences(optimizer: Any) -> Step:
    """Returns the exchange of pseudo-gradients in a synchronization."""
    # Averaged differences are added to weights, so plans do not depend on the inner optimizer.
    sgd = keras.optimizers.SGD(1.0)
    adding = SimpleNamespace(
        inner_optimizer=sgd, updater=sgd, gradient_accumulation_steps=None, xla_functions=0
    )
    return _like(optimizer, adding, optimizer.policy)


def of_gradients_in_node(optimizer: Any) -> Step:
    """Returns the exchange of gradients among the ranks of a node."""
    differences = optimizer.exchange
    # Do not number the prefix: a rank alone on its node requests none, so numbers would differ.
    node = _like(
        optimizer,
        optimizer,
        policies.parse("allreduce"),
        wire=runtime.node_wire,
        prefix=lambda: f"{differences.exchangers[-1].prefix}.node",
    )
    # Share the number of absent ranks, because the exchange within the node detects them first.
    node.absence = differences.absence
    return node


def _like(optimizer: Any, updating: Any, policy: policies.Policy, **ways: Any) -> Step:
    own = optimizer.exchange
    counts, settings = own.batch.function, optimizer.agreed_settings
    return Step(updating, policy, own.plans.bucket_bytes, counts, settings=settings, **ways)


def update_in_node(
    node: Step, updater: Any, grads: list[Any], variables: list[Any], count: Any
) -> Any:
    """Updates weights with the node's averaged gradients; returns this rank's sample count."""
    with node.call(grads, variables, count):
        exchange, averaged = node.prepare(grads, variables, count)
        means = averaged(*exchange())
        means.update(lambda found: updater.apply(found, variables))
    # A rank without samples applies the update of its node, too, so it needs a positive weight.
    own = tf.maximum(tf.cast(1.0 if count is None else count, tf.float32), _LEAST_SAMPLES)
    # If any rank of the node has exhausted its input, all ranks of the node drop the update.
    return own if means.everybody is None else tf.where(means.everybody, own, 0.0)


def check_policy(policy: policies.Policy) -> None:
    """Refuses schemes with requirements that pseudo-gradients do not meet."""
    reasons = {
        "which depends on the times of steps that exchange gradients": not policy.is_fixed,
        "which reads the graph of gradients": policy.reader is not None,
        "which corrects momentum, but pseudo-gradients have no velocity": policy.corrects_momentum,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise ValueError(
            "`scheme` must support pseudo-gradients, which are differences of weights. Received: "
            f'scheme={policy}, {reason}. Use "torus2d" (the default), "allreduce", '
            'tp.schemes.AllToAll(wire_dtype="float16"), "topk" or "hitopk".'
        )
