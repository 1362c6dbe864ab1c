"""Measures time and bytes of steps of an emulated model, by `LocalUpdates` and by all-reduce."""

import time

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.exchanges import scheme_named
from benchmarks.local_updates import EVERY_STEP
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.lab.network import payload_bytes

ALONE = 10**6
"""Steps between synchronizations for a run that must not synchronize."""


def weights_of(model):
    """Returns variables in the shapes of a model's parameters."""
    shapes = [shape for layer in model.layers for shape in (layer.kernel, *layer.vectors)]
    return [
        keras.Variable(np.zeros(shape, "float32"), name=f"weight_{index}")
        for index, shape in enumerate(shapes)
    ]


def optimizer_of(scheme, every, delay):
    """Returns the optimizer that is measured; `every` is a number, or `EVERY_STEP`."""
    inner = keras.optimizers.SGD(0.01)
    if every == EVERY_STEP:
        return tp.DistributedOptimizer(inner, scheme_named(scheme))
    return tp.LocalUpdates(inner, every, scheme=scheme_named(scheme), overlap_steps=delay)


class Steps:
    """Steps that compute for a given time, and update all weights.

    Args:
      model: Emulated model, for its shapes.
      optimizer: Optimizer that is measured.
    """

    def __init__(self, model, optimizer):
        self._weights, self._optimizer = weights_of(model), optimizer
        optimizer.build(self._weights)

        @tf.function
        def update(value):
            gradients = [tf.fill(weight.shape, value) for weight in self._weights]
            self._optimizer.apply(gradients, self._weights)

        self._update = update

    def run(self, count, compute_s, wire):
        """Runs `count` steps, and returns their total seconds on the slowest rank."""
        exchange_objects(None, wire, "bench.begin")
        begin = time.perf_counter()
        for _ in range(count):
            time.sleep(compute_s)
            self._update(tf.constant(1e-3))
            if isinstance(self._optimizer, tp.LocalUpdates):
                self._optimizer.end_step()
        return max(exchange_objects(time.perf_counter() - begin, wire, "bench.end"))


def node_bytes(wire):
    """Returns the total bytes that all nodes have sent so far."""
    everybody = exchange_objects(payload_bytes(), wire, "bench.bytes")
    return sum(everybody[node[0]] for node in wire.topology.nodes)


def planned_bytes(optimizer, wire):
    """Returns the planned bytes between nodes per synchronization, or per step."""
    own = optimizer.plan.cost.cross_bytes
    return sum(exchange_objects(own, wire, "bench.planned"))


def main():
    task = Task.from_argument()
    tp.init(network="unknown")
    wire, (system,) = runtime.wire(), task.systems
    optimizer = optimizer_of(task.scheme, task.every, task.delay)
    steps = Steps(task.emulated(), optimizer)
    every = 1 if task.every == EVERY_STEP else task.every
    # The first synchronization traces all steps, and an overlapped one ends before timing starts.
    steps.run(every + task.delay, 0.0, wire)
    before, count = node_bytes(wire), every * task.rounds
    seconds = steps.run(count, task.compute_s, wire)
    sent = node_bytes(wire) - before
    alone = Steps(task.emulated(), tp.LocalUpdates(keras.optimizers.SGD(0.01), ALONE))
    alone.run(2, 0.0, wire)
    alone_s = alone.run(task.steps, task.compute_s, wire) / task.steps
    task.note(
        system,
        {
            "mean_step_s": seconds / count,
            "alone_s": alone_s,
            "sent_per_round": sent / task.rounds,
            "planned_per_round": planned_bytes(optimizer, wire),
        },
    )


if __name__ == "__main__":
    main()
