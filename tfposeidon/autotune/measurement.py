"""Measures the network profile of a job, and the throughput of its ranks under full load.

Rounds of collectives and of local work run until a time budget is spent. `estimate` fits a profile
to their times.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfposeidon import ops
from tfposeidon.autotune.estimate import (
    FEWEST_ROUNDS,
    LEAST_S,
    estimate_links,
    quantile,
    rates_of,
    rounded,
)
from tfposeidon.autotune.probes import (
    FEW_ELEMENTS,
    LONG_ENOUGH_S,
    MOST_ELEMENTS,
    Probe,
    large_probes,
    small_probes,
)
from tfposeidon.communication.network_profile import NetworkProfile, Rates
from tfposeidon.communication.wire import Wire, exchange_objects

BUDGET_S, LATEST_S = 1.2, 3.0
"""Seconds after the first round beyond which no round starts; the second limit is for slow machines
on which a probe was timed fewer than `FEWEST_ROUNDS` times by then."""
MOST_ROUNDS, GROWING_ROUNDS = 15, 3
SHORT_ROUNDS = 4
"""Number of times that short messages are sent per round: they vary more, and take less time."""
ELEMENTS, PAIRS = 2**20, (2**13, 2**17)
"""Elements, and pairs of two selections, of the timed local work."""
SIDE, ROWS = 2048, 128
"""Side of the timed product, and rows of the matrices that are multiplied."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disables Python's garbage collector: a collection on one rank would count as network time.

    With large graphs in memory, a collection may take a second.

    >>> with without_collections():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_collections()
def measure(wire: Wire) -> NetworkProfile:
    """Measures the network profile of a job; all ranks call it together, and get the same result.

    Rounds of all probes alternate, so that temporary load does not affect only one of them. The
    slowest rank determines the time of a round, and the lower quartile represents the rounds.
    """
    topology = wire.topology
    short = _Round(wire, small_probes(topology), {}, "short")
    long = _Round(wire, large_probes(topology), WORK, "long")
    lengths = [probe.length for probe in long.probes]
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(MOST_ROUNDS):
        # The first round traces and connects. It may change lengths, but its times do not count.
        if number < 2:
            begin_s = time.perf_counter()
        often = [
            short([FEW_ELEMENTS] * len(short.probes)) for _ in range(SHORT_ROUNDS if number else 1)
        ]
        once = long(lengths)
        mine = [time.perf_counter() - begin_s, often, once]
        everybody = exchange_objects(mine, wire, f"tp.links.round_{number}")
        if number:
            for times in np.max([often for _, often, _ in everybody], axis=0):
                short.note(times, samples)
        slowest = np.max([once for *_, once in everybody], axis=0)
        if number:
            long.note(slowest, samples)
            # The variation of times is unknown after one round of a length.
            is_known = min(map(len, samples.values())) >= FEWEST_ROUNDS
            # Use rank 0's clock, so that all ranks stop at the same round.
            if everybody[0][0] > (BUDGET_S if is_known else LATEST_S):
                break
        if number < GROWING_ROUNDS:
            shortest = np.max([np.min(often, axis=0) for _, often, _ in everybody], axis=0)
            bytes_s = _without_latency(long.probes, slowest, short.probes, shortest)
            lengths = _grown(long.probes, lengths, bytes_s, samples)
    probes = [
        *short.probes,
        *(replace(one, length=length) for one, length in zip(long.probes, lengths, strict=True)),
    ]
    hosts, ranks_per_core = _surroundings(wire)
    links = replace(
        estimate_links(probes, samples, topology, _rates(samples)),
        hosts=hosts,
        ranks_per_core=ranks_per_core,
    )
    # All ranks need bit-equal figures to make equal plans, also if their processors differ.
    agreed = exchange_objects(links.to_json(), wire, "tp.links.agreed")[0]
    return NetworkProfile.from_json(agreed, "rank 0")


def hosts_of(wire: Wire) -> tuple[str, ...]:
    """Returns the name of each node; all ranks call it together."""
    names = exchange_objects(socket.gethostname(), wire, "tp.links.hosts")
    return tuple(names[node[0]] for node in wire.topology.nodes)


def _surroundings(wire: Wire) -> tuple[tuple[str, ...], float]:
    """Returns the names of the nodes, and the maximum over nodes of ranks per core."""
    mine = rounded(wire.topology.node.size / len(os.sched_getaffinity(0)))
    return hosts_of(wire), max(exchange_objects(mine, wire, "tp.links.ranks_per_core"))


def _without_latency(
    probes: Sequence[Probe],
    times: Sequence[float],
    short_probes: Sequence[Probe],
    short_times: Sequence[float],
) -> list[float]:
    """Returns the times of probes minus those of short messages of the same kind."""
    latencies: dict[str, float] = {}
    for probe, time_s in zip(short_probes, short_times, strict=True):
        latencies.setdefault(probe.operation, time_s)
    # The times also include local work, after those of the probes.
    pairs = zip(probes, times, strict=False)
    return [max(LEAST_S, time_s - latencies.get(p.operation, 0.0)) for p, time_s in pairs]


def _grown(
    probes: Sequence[Probe],
    lengths: Sequence[int],
    times: Sequence[float],
    samples: dict[str, list[float]],
) -> list[int]:
    """Returns lengths with which probes take long enough; drops samples of other lengths."""
    larger = [_enlarged(length, time_s) for length, time_s in zip(lengths, times, strict=True)]
    for probe, before, after in zip(probes, lengths, larger, strict=True):
        if after != before:
            samples.pop(probe.name, None)
    return larger


def _enlarged(length: int, seconds: float) -> int:
    """Returns a length with which a bandwidth probe takes long enough, or at least longer."""
    if seconds >= LONG_ENOUGH_S:
        return length
    # Do not jump to the length that this time predicts: short messages may be a burst.
    factor = min(8.0, max(2.0, LONG_ENOUGH_S / seconds))
    return min(MOST_ELEMENTS, round(factor * length))


class _Round:
    """One round of some probes and of local work, in one graph.

    Eager calls would take longer than the messages to measure.
    """

    def __init__(
        self,
        wire: Wire,
        probes: Sequence[Probe],
        work: Mapping[str, Callable[[tf.Tensor], tf.Tensor]],
        name: str,
    ) -> None:
        self.probes = probes
        self._wire, self._work, self._name = wire, work, f"tp.links.{name}"
        # Disable AutoGraph, whose conversion takes longer than everything else.
        self._function = tf.function(self._traced, autograph=False)
        self._vector = tf.random.stateless_normal([ELEMENTS], [1, 2])

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        """Returns this rank's seconds of each probe and kind of work; ranks start together."""
        times, _ = self._function(tf.constant(lengths, tf.int32), self._vector)
        return [float(seconds) for seconds in times.numpy()]

    def note(self, times: Iterable[float], samples: dict[str, list[float]]) -> None:
        """Adds the slowest rank's times of one round to the samples."""
        names = [*(probe.name for probe in self.probes), *self._work]
        for name, seconds in zip(names, times, strict=True):
            samples[name].append(float(seconds))

    def _traced(self, lengths: tf.Tensor, vector: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        # Return the results, because TensorFlow prunes ops that only control dependencies use.
        times: list[tf.Tensor] = []
        used: list[tf.Tensor] = []
        end_s = tf.timestamp()
        for number, probe in enumerate(self.probes):
            begin_s = self._time_of_all(end_s, number, used)
            with tf.control_dependencies([begin_s]):
                used.append(self._collective(probe, lengths[number], number))
            end_s = _time_after(used[-1])
            times.append(end_s - begin_s)
        if self._work:
            # Start together, so that all ranks work at the same time.
            end_s = self._time_of_all(end_s, len(times), used)
        for work in self._work.values():
            begin_s = end_s
            with tf.control_dependencies([begin_s]):
                used.append(work(vector))
            end_s = _time_after(used[-1])
            times.append(end_s - begin_s)
        return tf.stack(times), [tf.reshape(tensor, [-1])[:1] for tensor in used]

    def _time_of_all(self, before_s: tf.Tensor, number: int, used: list[tf.Tensor]) -> tf.Tensor:
        """Returns the time at which all ranks have reached this point, after `before_s`."""
        # Sum a value that is not constant, because TensorFlow could fold a constant.
        here = tf.reshape(tf.cast(before_s, tf.float32), [1])
        world = self._wire.topology.world
        used.append(self._wire.all_reduce(here, world, f"{self._name}.begin_{number}"))
        return _time_after(used[-1])

    def _collective(self, probe: Probe, length: tf.Tensor, number: int) -> tf.Tensor:
        name, group = f"{self._name}.{number}", probe.groups.get(self._wire.topology.rank)
        values = tf.ones(tf.reshape(length, [1]), probe.dtype)
        if group is None:
            return values[:1]
        if probe.operation == "all_reduce":
            return self._wire.all_reduce(values, group, name)
        if probe.operation == "all_gather":
            return self._wire.all_gather(values, group, name)
        share = length // group.size
        splits = [share] * (group.size - 1) + [length - share * (group.size - 1)]
        return self._wire.all_to_all(values, splits, group, name)


def _time_after(tensor: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tensor]):
        return tf.timestamp()


def _product(vector: tf.Tensor) -> tf.Tensor:
    matrix = tf.reshape(vector[: ROWS * SIDE], [ROWS, SIDE])
    return tf.matmul(matrix, matrix, transpose_a=True)


def _selected(vector: tf.Tensor, pairs: int) -> tf.Tensor:
    return ops.error_feedback_top_k(tf.zeros([ELEMENTS]), vector, pairs)[0]


WORK: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    # Four vectors, as in the sum of a shard owner.
    "sum": lambda vector: tf.add_n(tf.split(vector, 4)),
    "encode": lambda vector: ops.encode(vector, "float16"),
    "select": lambda vector: _selected(vector, PAIRS[0]),
    "select_many": lambda vector: _selected(vector, PAIRS[1]),
    "multiply": _product,
}
"""Local work to time, by kind."""


def _rates(samples: Mapping[str, Sequence[float]]) -> Rates:
    times = {name: quantile(samples[name]) for name in WORK}
    return rates_of(times, ELEMENTS, PAIRS, (ROWS, SIDE))
