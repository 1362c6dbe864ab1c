"""Trains on each rank of `python -m tfposeidon demo`: steps by one scheme after the other."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import tfposeidon
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.demo import MODEL
from tfposeidon.lab.network import payload_bytes
from tfposeidon.planning.plan import Plan
from tfposeidon.training import choose_plan

STEPS_OF_AUTO = choose_plan.UNTIMED_STEPS + choose_plan.TIMED_STEPS
"""Steps of an epoch after which `auto` plans again by what they took."""


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
    # The plan shows the measured step beside the predicted one, also once `auto` has decided.
    optimizer.exchange.is_timed = True
    model.compile(optimizer=optimizer, loss="mse")
    batch = model.inputs[0].shape[0]
    # One that is traced, or that traces anew, and those that are timed.
    per_epoch = max(1 + steps, STEPS_OF_AUTO if scheme == "auto" else 0)
    data = np.ones((batch * per_epoch, 1), "float32")
    watch = Watch()
    # As in a long training, of which two epochs are waited for: `auto` traces a step anew if that
    # pays in those that are left.
    model.fit(data, data, batch_size=batch, epochs=1000, verbose=0, callbacks=[watch])
    own_steps_s, own_bytes = np.diff(watch.seen, axis=0)[-steps:].T
    wire = runtime.wire()
    steps_s = exchange_objects(own_steps_s.tolist(), wire, "demo.steps")
    # Each rank counts what its whole node sends.
    node_bytes = float(np.mean(own_bytes)) / wire.topology.node.size
    sent_bytes = exchange_objects(node_bytes, wire, "demo.bytes")
    # All ranks wait for the slowest; the median drops steps that the machine disturbed.
    step_s = float(np.median(np.max(steps_s, axis=0)))
    if wire.topology.rank == 0:
        print(f"{scheme}: {1e3 * step_s:.0f} ms per step", flush=True)
        show_choice(optimizer.plan)
    return {"step_s": step_s, "sent_bytes": float(np.mean(sent_bytes))}


class Watch(keras.callbacks.Callback):
    """Notes when each step ends, and how many bytes its node has sent; stops after two epochs.

    Attributes:
      seen: Pairs of seconds and bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, int]] = []

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((time.perf_counter(), payload_bytes()))


def show_choice(plan: Plan) -> None:
    """Prints the schemes of a plan that predicted steps have chosen, and the predictions.

    Args:
      plan: Plan of an optimizer; nothing is printed where nothing was left open.
    """
    for forecast in plan.forecasts:
        if forecast.others:
            print(f"  it took: {forecast.chosen}")
            print("\n".join(f"  {line}" for line in forecast.lines()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
