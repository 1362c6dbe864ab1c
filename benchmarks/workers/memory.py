"""Measures the memory of a rank after some steps: optimizer state, and resident memory."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(),
    "adamw": lambda: keras.optimizers.AdamW(),
}


def resident_bytes(peak=False):
    """Returns resident bytes of this process, as the kernel counts them.

    Args:
      peak: True for the peak of the process instead of the current value.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def main():
    task = Task.from_argument()
    tp.init()
    (name,) = task.systems
    weight = keras.Variable(np.zeros(task.elements, "float32"), name="weight")
    kind = tp.ShardedOptimizer if task.update == "server" else tp.DistributedOptimizer
    optimizer = kind(OPTIMIZERS[name](), "ps")

    @tf.function
    def step(x):
        optimizer.apply([weight * x + x], [weight])

    for _ in range(3):
        step(tf.constant(1.0))
    # The first two variables are the iteration counter and the learning rate.
    slots = sum(4 * int(np.prod(v.shape)) for v in optimizer.inner_optimizer.variables[2:])
    own = {"slots": slots, "resident": resident_bytes()}
    everybody = exchange_objects(own, runtime.wire(), "memory")
    task.note(name, {what: [rank[what] for rank in everybody] for what in own})


if __name__ == "__main__":
    main()
