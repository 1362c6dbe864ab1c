"""The two exchanges of `LocalUpdates`: of differences between replicas, of gradients in a node."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.exchange.step import Step
from tfposeidon.optimizers.wrapping import settings
from tfposeidon.sample_counts import SampleCount


class Adding:
    """Stand-in optimizer for plans of differences: it is linear, as rules are."""

    gradient_accumulation_steps = None

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.inner_optimizer = self.updater = keras.optimizers.SGD(1.0)

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Settings that have to be the same on all ranks, for JSON."""
        inner = settings(self._optimizer.inner_optimizer, "inner optimizer")
        return inner | self._optimizer.agreed_settings


class Node:
    """Updates weights by the mean gradients of the ranks of this rank's node.

    Args:
      optimizer: The `LocalUpdates`; its inner optimizer updates.
      rounds: Exchange of the rounds between nodes.
      bucket_bytes: Bytes up to which small gradients are fused.
      sample_count: Function from a batch to the number that ranks weigh by.

    Attributes:
      exchange: Exchange of the gradients.
    """

    def __init__(
        self, optimizer: Any, rounds: Step, bucket_bytes: int, sample_count: SampleCount | None
    ) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self.exchange = Step(
            optimizer,
            policies.parse("allreduce"),
            bucket_bytes,
            sample_count,
            runtime.node_wire,
            # Nodes of one rank have no exchange that would take a number.
            prefix=lambda: f"{rounds.exchangers[-1].prefix}.node",
        )
        # A rank that is out of data is missed in the node first.
        self.exchange.absence = rounds.absence

    def update(self, grads: list[Any], variables: list[Any], count: Any) -> Any:
        """Updates the weights, and returns the samples that count.

        Args:
          grads: Gradients of this rank, one per variable.
          variables: Variables of the gradients, in the same order.
          count: Number of samples behind the gradients, a scalar; `None` for equal weights.
        """
        updater = self._optimizer.updater
        self.exchange.is_timed = self._rounds.is_timed
        with self.exchange.call(grads, variables, count) as sent:
            means = self.exchange.means(sent, variables, count)
            means.update(lambda found: updater.apply(found, variables))
        if means.everybody is None:
            return count
        # Where a rank of the node is out of data, all of them have dropped the update.
        own = tf.cast(1.0 if count is None else count, tf.float32)
        return tf.where(means.everybody, own, 0.0)


def check_policy(policy: policies.Policy) -> None:
    """Refuses schemes that need what differences of weights do not have."""
    reasons = {
        "it is chosen by steps that exchange gradients": policy.leaves_open,
        "differences of weights have no factors": policy.reads_factors,
        "differences of weights have no velocity": policy.corrects_momentum,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(
                "`scheme` must be one that can carry differences of weights. Received: "
                f'scheme={policy}: {reason}. Use "torus2d" (the default), "allreduce", '
                'tp.schemes.AllToAll(wire_dtype="float16"), "topk" or "hitopk".'
            )
