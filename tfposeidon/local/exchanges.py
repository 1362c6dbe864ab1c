"""The two exchanges of `LocalUpdates`: differences between replicas, and gradients in a node.

With `hierarchical=True`, ranks of a node average gradients at every step, and nodes synchronize.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.exchange.step import Step
from tfposeidon.sample_counts import SampleCount

_FEW = 1e-6
"""Samples of a rank that took part without any: positive, and no weight beside others."""


class Adding:
    """Stand-in optimizer for plans of differences: linear, as rules are."""

    gradient_accumulation_steps = None

    def __init__(self) -> None:
        self.inner_optimizer = self.updater = keras.optimizers.SGD(1.0)


class Node:
    """Updates weights with the mean gradients of the ranks on this node."""

    def __init__(
        self,
        optimizer: Any,
        rounds: Step,
        bucket_bytes: int | None,
        sample_count: SampleCount | None,
    ) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self.exchange = Step(
            optimizer,
            policies.parse("allreduce"),
            bucket_bytes,
            sample_count,
            runtime.node_wire,
            # Nodes of one rank run no exchange that would use up a number.
            prefix=lambda: f"{rounds.exchangers[-1].prefix}.node",
            settings=optimizer.agreed_settings,
        )
        # The exchange within the node detects an absent rank first.
        self.exchange.absence = rounds.absence

    def update(self, grads: list[Any], variables: list[Any], count: Any) -> Any:
        """Updates the weights; returns the sample count, or 0 if a rank is absent."""
        updater = self._optimizer.updater
        self.exchange.is_timed = self._rounds.is_timed
        with self.exchange.call(grads, variables, count):
            means = self.exchange.means(grads, variables, count)
            means.update(lambda found: updater.apply(found, variables))
        # Without counted samples, a rank has made the update of its node, too, and moves with it.
        own = tf.maximum(tf.cast(1.0 if count is None else count, tf.float32), _FEW)
        # If a rank of the node has exhausted its input, all of its ranks have dropped the update.
        return own if means.everybody is None else tf.where(means.everybody, own, 0.0)


def check_policy(policy: policies.Policy) -> None:
    """Refuses schemes with requirements that differences of weights do not meet."""
    reasons = {
        "it chooses by steps that exchange gradients": not policy.is_fixed,
        "it reads the graph of gradients": policy.reader is not None,
        "pseudo-gradients have no velocity": policy.corrects_momentum,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(
                "`scheme` must support pseudo-gradients, which are differences of weights. "
                f'Received: scheme={policy}: {reason}. Use "torus2d" (the default), "allreduce", '
                'tp.schemes.AllToAll(wire_dtype="float16"), "topk" or "hitopk".'
            )
