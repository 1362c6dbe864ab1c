"""Measures workers and a server: step rates with a slow worker, or accuracy."""

import time

import keras
import tensorflow as tf

import tfposeidon as tp
from benchmarks.workers import local_accuracy
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

WARM_UP = 8
"""Number of steps before timing, because the first step traces."""


class Steps:
    """Steps that compute for a given time, and update weights with one optimizer.

    Args:
      optimizer: Optimizer that updates the weights.
      length: Number of weights.
      compute_s: Seconds that a step computes.
    """

    def __init__(self, optimizer, length, compute_s):
        self._weight = keras.Variable(tf.zeros([length]), name="weight")
        self._compute_s = compute_s
        optimizer.build([self._weight])

        @tf.function
        def update(value):
            optimizer.apply([tf.fill([length], value)], [self._weight])

        self._update = update

    def run(self, count):
        """Runs `count` steps, and returns their mean time in seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            time.sleep(self._compute_s)
            self._update(tf.constant(1e-3))
        return (time.perf_counter() - begin) / count


def paces(task, system):
    """Returns seconds of a step for each worker, alone and with exchanges.

    The last rank's steps take `slowness` times as long, so it runs fewer steps by this factor.
    """
    is_slow = tp.rank() == tp.size() - 1
    compute_s = task.compute_s * (task.slowness if is_slow else 1)
    together = system["every"] is None
    if together:
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.01), "allreduce")
        counts = task.steps // task.slowness
    else:
        optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.01), system["every"])
        counts = task.steps // task.slowness if is_slow else task.steps
    found = {}

    def train():
        alone = Steps(keras.optimizers.SGD(0.01), task.length, compute_s)
        alone.run(1)
        found["alone_s"] = alone.run(counts)
        steps.run(WARM_UP)
        found["step_s"] = steps.run(counts)

    steps = Steps(optimizer, task.length, compute_s)
    exchange_objects(None, runtime.wire(), "bench.begin")
    if together:
        train()
    else:
        optimizer.run(train)
    everybody = exchange_objects(found, runtime.wire(), "bench.paces")
    return {"ranks": everybody}


def accuracies(task, system):
    """Returns the accuracy of the final weights, which all ranks hold, by seed."""
    data = local_accuracy.data_set("digits", 1.0)

    def optimizer(steps):
        inner = local_accuracy.inner_optimizer(data, "sgd", None, steps)
        if system["every"] is None:
            return tp.DistributedOptimizer(inner, "allreduce")
        return tp.ElasticAveraging(inner, system["every"], system["alpha"])

    trainer = local_accuracy.Trainer(data, optimizer, task.epochs)
    found = []
    for seed in task.seeds:
        trainer.train(seed, "alike", callbacks=[], validates=False)
        found.append(trainer.accuracy(seed))
    return {"accuracies": found}


def main():
    task = Task.from_argument()
    # All ranks share a few cores, and these models do not benefit from more threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    serves = any(system["every"] is not None for system in task.systems.values())
    tp.init(network="unknown", server_rank=0 if serves else None)
    measure = {"accuracy": accuracies, "pace": paces}[task.part]
    for name, system in task.systems.items():
        task.note(name, measure(task, system))


if __name__ == "__main__":
    main()
