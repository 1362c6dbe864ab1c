"""Trains on each rank of `python -m tfposeidon demo`: steps by one scheme after the other."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfposeidon
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.demo import MODEL
from tfposeidon.lab.network import payload_bytes

WARM_UP_STEPS = 2
"""Steps of each scheme that are not timed: the first is traced, and opens connections."""


def main(arguments: list[str]) -> None:
    """Measures every scheme; rank 0 writes what all ranks have found.

    Args:
      arguments: Path of the JSON file to write, number of steps, and names of schemes.
    """
    path, steps, *schemes = arguments
    # Layers that wait for their accelerator must not hold up the threads that exchange.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    rank = tfposeidon.init().rank
    model = emulated_model(MODEL, seed=rank)
    found = {scheme: measure(model, scheme, int(steps)) for scheme in schemes}
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def measure(model: keras.Model, scheme: str, steps: int) -> dict[str, float]:
    """Trains a few steps by a scheme, on all ranks.

    Args:
      model: An emulated model; its weights are of no interest.
      scheme: Scheme for `DistributedOptimizer`.
      steps: Number of steps that are timed.

    Returns:
      "step_s", the median over the steps of the slowest rank's seconds, and "sent_bytes", what a
      rank sent to other nodes per step, on average. The same on all ranks.
    """
    optimizer = tfposeidon.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme=scheme)
    model.compile(optimizer=optimizer, loss="mse")
    data = np.ones((model.inputs[0].shape[0], 1), "float32")
    for _ in range(WARM_UP_STEPS):
        model.train_on_batch(data, data)
    sent_before, own_steps_s = payload_bytes(), []
    for _ in range(steps):
        begin_s = time.perf_counter()
        model.train_on_batch(data, data)
        own_steps_s.append(time.perf_counter() - begin_s)
    # Each rank counts what its whole node sends.
    own_bytes = (payload_bytes() - sent_before) / steps / runtime.wire().topology.node.size
    wire = runtime.wire()
    steps_s = exchange_objects(own_steps_s, wire, "demo.steps")
    sent_bytes = exchange_objects(own_bytes, wire, "demo.bytes")
    # All ranks wait for the slowest; the median drops steps that the machine disturbed.
    step_s = float(np.median(np.max(steps_s, axis=0)))
    if wire.topology.rank == 0:
        print(f"{scheme}: {1e3 * step_s:.0f} ms per step", flush=True)
    return {"step_s": step_s, "sent_bytes": float(np.mean(sent_bytes))}


if __name__ == "__main__":
    main(sys.argv[1:])
