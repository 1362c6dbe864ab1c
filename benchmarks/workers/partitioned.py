"""Measures a cache that is partitioned over nodes: bytes between nodes, and step times.

Systems: "bytes" (epochs without training), and then, alternately, "replicate" (each node stores all
samples) and "split" (each node stores a part).
"""

import statistics

import keras
import numpy as np
import tensorflow as tf

import datacache
import tfposeidon as tp
from benchmarks.workers.keras_fit import StepTimer
from benchmarks.workers.reading import Drawn
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.lab.network import payload_bytes

NUMBER_AND_LENGTH = 16
"""Bytes that are sent per sample in addition to its contents."""


def open_cache(task, partition):
    """Returns a warm cache of random samples."""
    cache = datacache.Cache(
        Drawn(task.pixels, task.samples), partition=partition, memory=f"/dev/shm/{partition}"
    )
    cache.warm(progress=False)
    return cache


def bytes_on_the_link(task, cache, wire):
    """Records the bytes that a node receives in an epoch, and the predicted number."""
    # Synchronize here and after the epoch: the counter includes the bytes of all ranks of a node.
    exchange_objects(None, wire, "bench.begin")
    before, received = payload_bytes(direction="rx"), cache.stats().received
    for _ in cache.counted(cache.dataset(task.batch, seed=1)):
        pass
    exchange_objects(None, wire, "bench.end")
    of_one = task.pixels**2 * 3 + NUMBER_AND_LENGTH
    mine = {
        "received": cache.stats().received - received,
        "measured": payload_bytes(direction="rx") - before,
    }
    node = [
        found
        for rank, found in enumerate(exchange_objects(mine, wire, "bench.sum"))
        if rank in wire.topology.node.ranks
    ]
    predicted = of_one * sum(found["received"] for found in node)
    task.note(
        "bytes",
        {
            "predicted": predicted,
            "measured": statistics.median(found["measured"] for found in node),
        },
    )


def steps(task, cache, wire):
    """Returns seconds of each step of `fit`, on every rank."""
    layers = [
        keras.Input((task.pixels, task.pixels, 3)),
        keras.layers.Flatten(),
        keras.layers.Dense(task.width),
    ]
    model = keras.Sequential(layers)
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(1e-6), scheme="allreduce"), "mse")
    data = cache.dataset(task.batch).map(
        lambda x: (tf.cast(x, "float32"), tf.zeros([tf.shape(x)[0], task.width]))
    )
    timer = StepTimer(wire, task.warm_up)
    cache.begin_epoch(0, data)
    model.fit(data.prefetch(2), verbose=0, shuffle=False, callbacks=[timer])
    return timer.times


def main():
    task = Task.from_argument()
    tp.init()
    wire = runtime.wire()
    caches = {name: open_cache(task, name) for name in ("replicate", "split")}
    bytes_on_the_link(task, caches["split"], wire)
    times = {name: [] for name in caches}
    for _ in range(task.rounds):
        for name, cache in caches.items():
            times[name].append([max(step) for step in steps(task, cache, wire)])
    for name, rounds in times.items():
        task.note(
            name,
            {
                "step_s": np.concatenate(rounds).tolist(),
                "rounds_s": [float(np.median(r)) for r in rounds],
            },
        )
    for cache in caches.values():
        cache.close()


if __name__ == "__main__":
    main()
