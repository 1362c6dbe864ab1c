"""Measures TensorFlow's MultiWorkerMirroredStrategy, with rings over gRPC.

`fit` of Keras 3 does not support this strategy, so a custom loop trains the emulated Keras model.
"mirrored" uses the default settings of the strategy, which sends all gradients together after the
last one. "mirrored-packs" sends packs of gradients during the backward pass.
"""

import json
import os
import traceback

import tensorflow as tf

from benchmarks.workers.task import Task
from tfposeidon.lab.accelerator import emulated_model

# This is the bucket size of PyTorch.
PACK_BYTES = 25 * 2**20
# `bytes_per_pack=0` disables packs.
SYSTEMS = {"mirrored": 0, "mirrored-packs": PACK_BYTES}
LEARNING_RATE = 1e-3


def main():
    task = Task.from_argument()
    os.environ["TF_CONFIG"] = json.dumps(cluster(task))
    # The strategy must exist before TensorFlow runs an op.
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring(0))
    everybody = everybody_under(strategy, task)
    for system in task.systems:
        try:
            task.measure(system, step_under(strategy, task, system), everybody)
        except Exception:  # noqa: BLE001
            task.note(system, {"error": traceback.format_exc()})


def cluster(task):
    """Returns TF_CONFIG with a worker for each rank."""
    workers = [task.address(rank) for rank in range(task.size)]
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": task.rank}}


def ring(pack_bytes):
    """Returns options that send gradients in rings over gRPC.

    Args:
      pack_bytes: Minimum size of a pack, or 0 to send all gradients as one.
    """
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=pack_bytes, implementation=implementation
    )


def pack_bytes(task, system):
    """Returns the size of a pack, which shrinks with the model."""
    return round(SYSTEMS[system] / task.shrink**2)


def step_under(strategy, task, system):
    """Returns a training step of a new model.

    Args:
      strategy: The strategy.
      task: The job's `Task`.
      system: One of `SYSTEMS`.

    Raises:
      ValueError: If the system is unknown.
    """
    if system not in SYSTEMS:
        raise ValueError(f"`systems` must be among {', '.join(SYSTEMS)}. Received: {system!r}")
    communication = ring(pack_bytes(task, system))
    with strategy.scope():
        model = emulated_model(task.emulated(), dilation=task.dilation, seed=task.rank)
    data = tf.zeros(model.input_shape)

    def on_replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(data, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        means = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.MEAN, gradients, communication
        )
        for variable, mean in zip(model.trainable_variables, means, strict=True):
            variable.value.assign_sub(LEARNING_RATE * mean)

    @tf.function
    def step():
        strategy.run(on_replica)

    return step


def everybody_under(strategy, task):
    """Returns a function that maps this rank's seconds to those of all ranks (`Task.measure`)."""

    def on_replica(own):
        # The strategy requires a tensor on a device, but an argument has no device.
        own = tf.identity(own)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)

    @tf.function
    def gathered(own):
        return strategy.run(on_replica, args=(own,))

    def everybody(seconds):
        own = tf.one_hot(task.rank, task.size, tf.constant(seconds, tf.float64), dtype=tf.float64)
        return gathered(own).numpy().tolist()

    return everybody


if __name__ == "__main__":
    main()
