"""Ranks of a node that train as one, by mean gradients at every step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.exchange.step import Step
from tfposeidon.sample_counts import SampleCount


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
        self._optimizer = optimizer
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
        inner = self._optimizer.inner_optimizer
        with self.exchange.call(grads, variables, count) as sent:
            means = self.exchange.means(sent, variables, count)
            means.update(lambda found: inner.apply(found, variables))
        if means.everybody is None:
            return count
        # Where a rank of the node is out of data, all of them have dropped the update.
        own = tf.cast(1.0 if count is None else count, tf.float32)
        return tf.where(means.everybody, own, 0.0)
