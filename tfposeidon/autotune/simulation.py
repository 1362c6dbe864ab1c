"""Simulates one training step: computes when gradients are ready, and when their means are.

Think of it as a discrete-event simulation with two resources, Horovod's thread and the rank's
processor. Each bucket passes its stages in turn.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfposeidon import ranges
from tfposeidon.autotune.seconds import StageTime

FUSION_THRESHOLD, FUSION_BYTES = "HOROVOD_FUSION_THRESHOLD", 128 * 2**20
"""Horovod's variable for the size up to which it fuses all-reduces of a cycle, and its default."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of a step's computation on the slowest rank, in seconds from its start.

    `ready_s` has the time of each variable's gradient, in the order of the variables.

    Example:
      >>> Timeline.even(variables=3, first_s=1.0, compute_s=3.0).ready_s
      (3.0, 2.0, 1.0)
    """

    ready_s: tuple[float, ...]
    compute_s: float

    def __post_init__(self) -> None:
        ranges.check_number("compute_s", self.compute_s, ranges.NOT_NEGATIVE)
        for ready_s in self.ready_s:
            ranges.check_number("ready_s", ready_s, ranges.NOT_NEGATIVE)
        if max(self.ready_s, default=0.0) > self.compute_s:
            raise ValueError(
                "`compute_s` must not be less than `ready_s`, because the backward pass ends "
                f"with the last gradient or later. Received: ready_s up to {max(self.ready_s):g}, "
                f"compute_s={self.compute_s:g}."
            )

    @classmethod
    def even(cls, *, variables: int, first_s: float, compute_s: float) -> Timeline:
        """Spreads gradients evenly, from the last variable's; only the two times matter much."""
        between_s = (compute_s - first_s) / max(1, variables - 1)
        ready_s = [first_s + between_s * index for index in reversed(range(variables))]
        # Rounding must not move the last gradient past the end.
        return cls(ready_s=tuple(min(s, compute_s) for s in ready_s), compute_s=compute_s)

    @classmethod
    def without_computation(cls, variables: int) -> Timeline:
        """Returns the times of a step without computation: all gradients are ready at once."""
        return cls(ready_s=(0.0,) * variables, compute_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Predicted times of one training step.

    Attributes:
      step_s: Seconds of the step.
      compute_s: Seconds of its forward and backward pass.
      busy_s: Seconds in which Horovod's thread executes collectives.
    """

    step_s: float
    compute_s: float
    busy_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that computation does not hide."""
        return self.step_s - self.compute_s

    @property
    def efficiency(self) -> float:
        """Share of the step spent in computation; 0 for a step without computation."""
        return self.compute_s / self.step_s if self.step_s else 0.0


def fusion_bytes_of(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the size up to which Horovod fuses the all-reduces of one cycle, in bytes."""
    text = environment.get(FUSION_THRESHOLD) or str(FUSION_BYTES)
    if not text.isdecimal():
        raise ValueError(f"{FUSION_THRESHOLD} must be a number of bytes. Received: {text!r}")
    return int(text)


def simulate(
    chains: Sequence[Sequence[StageTime]],
    ready_s: Sequence[float],
    compute_s: float,
    collective_s: float,
    fusion_bytes: int = FUSION_BYTES,
) -> Simulated:
    """Predicts one step from the stages of its buckets, which are ready after `ready_s`.

    Horovod's thread negotiates once per cycle for all ready collectives, which takes
    `collective_s`. It fuses compatible all-reduces, and executes collectives sequentially. Local
    work of all buckets shares a rank's CPU or GPU, concurrently with the thread. Nothing overlaps
    with the next step.
    """
    run = _Run(chains, fusion_bytes)
    for bucket, ready in enumerate(ready_s):
        run.reach(ready, bucket, 0)
    while run.has_more:
        run.carry_out_cycle(collective_s)
    return Simulated(step_s=max(run.finish_s, compute_s), compute_s=compute_s, busy_s=run.busy_s)


@dataclass
class _Run:
    """State of a simulation."""

    chains: Sequence[Sequence[StageTime]]
    fusion_bytes: int
    finish_s: float = 0.0
    busy_s: float = 0.0
    _thread_free_s: float = 0.0
    _processor_free_s: float = 0.0
    # Time, sequence number (breaks ties by creation order), bucket, stage.
    _events: list[tuple[float, int, int, int]] = field(default_factory=list)
    _waiting: list[tuple[float, int, int, int]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def has_more(self) -> bool:
        return bool(self._events or self._waiting)

    def reach(self, time_s: float, bucket: int, stage: int) -> None:
        """Schedules the time at which a bucket is ready for a stage."""
        heapq.heappush(self._events, (time_s, next(self._numbers), bucket, stage))

    def carry_out_cycle(self, collective_s: float) -> None:
        """Executes the collectives that are ready when the thread is idle."""
        self._advance(self._thread_free_s)
        while not self._waiting:
            if not self._events:
                return
            self._advance(self._events[0][0])
        begin_s = max(self._thread_free_s, min(self._waiting)[0])
        self._advance(begin_s)
        ready = sorted(entry for entry in self._waiting if entry[0] <= begin_s)
        self._waiting = [entry for entry in self._waiting if entry[0] > begin_s]
        now_s = begin_s + collective_s
        while ready:
            fused = self._fused_with_first(ready)
            ready = [entry for entry in ready if entry not in fused]
            stages = [self.chains[bucket][stage] for _, _, bucket, stage in fused]
            latency_s = max(stage.latency_s for stage in stages)
            took_s = latency_s + sum(stage.load_s for stage in stages)
            now_s += took_s
            self.busy_s += took_s
            for _, _, bucket, stage in fused:
                self.reach(now_s, bucket, stage + 1)
        self._thread_free_s = now_s

    def _advance(self, until_s: float) -> None:
        """Executes local work that starts by a time, and collects collectives ready by then."""
        while self._events and self._events[0][0] <= until_s:
            entry = heapq.heappop(self._events)
            time_s, _, bucket, index = entry
            if index >= len(self.chains[bucket]):
                self.finish_s = max(self.finish_s, time_s)
                continue
            stage = self.chains[bucket][index]
            if stage.operation is None:
                self._processor_free_s = max(time_s, self._processor_free_s) + stage.load_s
                self.reach(self._processor_free_s, bucket, index + 1)
            else:
                self._waiting.append(entry)

    def _fused_with_first(
        self, ready: list[tuple[float, int, int, int]]
    ) -> list[tuple[float, int, int, int]]:
        """Returns the first collective, and those that Horovod fuses with it."""
        first, *others = ready
        leading = self.chains[first[2]][first[3]]
        fused, size_bytes = [first], leading.size_bytes
        if leading.fuses_with is None:
            return fused
        for entry in others:
            stage = self.chains[entry[2]][entry[3]]
            if (
                stage.fuses_with == leading.fuses_with
                and size_bytes + stage.size_bytes <= self.fusion_bytes
            ):
                fused.append(entry)
                size_bytes += stage.size_bytes
        return fused
