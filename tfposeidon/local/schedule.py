"""Determines the steps at which ranks synchronize, and runs exchanges in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import NamedTuple

import tensorflow as tf

from tfposeidon import checks
from tfposeidon.exchange.plan import Plan
from tfposeidon.local.outer_optimizers import Rule
from tfposeidon.text import readable_size


@dataclass(frozen=True)
class Schedule:
    """Steps at which ranks with local weights synchronize.

    An exchange starts every `sync_every` steps. Its result is applied `overlap_steps` steps later;
    with 0, the step waits for the result. The first `warmup_steps` synchronizations follow one step
    each, without overlap.
    """

    sync_every: int
    overlap_steps: int
    warmup_steps: int

    def __post_init__(self) -> None:
        checks.check_integer("sync_every", self.sync_every, 1)
        checks.check_integer("overlap_steps", self.overlap_steps, 0)
        checks.check_integer("warmup_steps", self.warmup_steps, 0)
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                "`overlap_steps` must be less than `sync_every`, so that each synchronization "
                f"ends before the next one starts. Received: overlap_steps={self.overlap_steps}, "
                f"sync_every={self.sync_every}. Use at most {self.sync_every - 1}."
            )

    def check_steps_per_execution(self, steps: int) -> None:
        """Refuses `steps_per_execution` if synchronizations would fall within an execution."""
        for name, value in asdict(self).items():
            # Ranks synchronize after each step of the warm-up.
            if (min(value, 1) if name == "warmup_steps" else value) % steps:
                raise ValueError(
                    "`sync_every` and `overlap_steps` must be multiples of steps_per_execution, "
                    "and `warmup_steps` requires steps_per_execution=1, because ranks synchronize "
                    f"between executions. Received: {name}={value}, steps_per_execution={steps}. "
                    "Use steps_per_execution=1, or multiples of it and no `warmup_steps`."
                )


def notes_of_plan(plan: Plan, schedule: Schedule, outer: Rule, in_node: Plan | None) -> list[str]:
    """Returns remarks on bytes per step, memory and exactness; `in_node` is the plan in a node."""
    every, overlaps = schedule.sync_every, bool(schedule.overlap_steps)
    length = readable_size(sum(description.bytes for description in plan.descriptions))
    copies = (
        f"3 x {length} of memory for an exchange and" if overlaps else f"{length} of memory for"
    )
    notes = [
        f"pseudo-gradients, once in {every} steps: {readable_size(plan.cost.bytes / every)} per "
        f"step; outer optimizer {outer}",
        f"{copies} the global weights, and the state of the outer optimizer",
    ]
    if in_node is not None:
        during = ", which waits for at most one bucket of pseudo-gradients" if overlaps else ""
        size = readable_size(in_node.cost.bytes)
        notes.append(f"gradients: all-reduce within the node at every step, {size}{during}")
    is_exact = all(bucket.scheme.exact for bucket in plan.buckets)
    rounding = "" if is_exact else "; the scheme rounds or selects"
    return [*notes, f"replicas are equal only in their global weights{rounding}"]


# ------------------------------------------------------------------ exchange


class Contribution(NamedTuple):
    """Contribution of this rank to a synchronization.

    `count` is the rank's weight, a float32 scalar: 0 without samples or with non-finite
    differences. `finite` is a bool scalar, equal on all ranks of a replica: True if all differences
    are finite. `values` are the local minus global weights of trained variables, followed by layer
    state to average.
    """

    count: tf.Tensor
    finite: tf.Tensor
    values: list[tf.Tensor]


class ExchangeResult(NamedTuple):
    """Result of an exchange, the same on all ranks except for `states`, the new scheme states.

    `absent` is the number of ranks that have exhausted their input, a float32 scalar. `counts` is a
    bool scalar: True if any rank contributed and the means of differences are finite. `means` are
    the means of `Contribution.values`.
    """

    absent: tf.Tensor
    counts: tf.Tensor
    means: list[tf.Tensor]
    states: list[tf.Tensor]


def in_background(exchange: Callable[[], ExchangeResult]) -> Future[ExchangeResult]:
    future: Future[ExchangeResult] = Future()

    def run() -> None:
        try:
            future.set_result(exchange())
        except BaseException as error:  # noqa: BLE001 (the reader of the result raises it)
            future.set_exception(error)

    # Use a daemon thread, because a failing job must not wait for ranks that have exited.
    threading.Thread(target=run, daemon=True, name="tfposeidon-exchange").start()
    return future
