"""Compares schemes on a slow network, in a table and a plot.

  python -m tfposeidon demo

The demo trains a model in the lab, on emulated nodes with slow links between them: with Horovod's
all-reduce, with the plan that `auto` chooses, with a lossless scheme and with a sparse scheme. The
demo takes two minutes. It requires Linux with iproute2, as root or with user namespaces. Elsewhere,
the demo prints the reason and exits with status 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfposeidon import checks
from tfposeidon.lab import architectures
from tfposeidon.lab.command import Cluster, UnavailableError, check_machine, namespaces, python
from tfposeidon.text import table

LABELS = {
    "allreduce": "Horovod's all-reduce",
    "auto": "tfposeidon auto, exact",
    "hybcomm": "tfposeidon hybcomm, exact",
    "hitopk": "tfposeidon hitopk, top 1 %",
}
"""Compared schemes and their labels; the first is the baseline."""
# benchmarks/figures.py defines these colors for the plots in docs/results.
COLORS = {"allreduce": "#6abf8b", "auto": "#0072b2", "hybcomm": "#d6006e", "hitopk": "#7d4fd6"}
CLUSTER = Cluster(nodes=2, per_node=2, inter=2e8)
MODEL = architectures.VGG19.shrunk(4)
ABOUT = f"VGG-19 shrunk to {MODEL.parameters / 1e6:.1f} M parameters, {CLUSTER}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Step time and traffic of a scheme."""

    step_s: float
    """Time of the slowest rank, as the median over the steps."""
    sent_bytes: float
    """Bytes that a rank sends to other nodes per step, without headers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="timed steps per scheme (default: 3)"
    )
    default, text = "tfposeidon-demo.png", "file of the plot (default: %(default)s)"
    parser.add_argument("--plot", type=Path, default=default, metavar="FILE", help=text)


def main(options: argparse.Namespace) -> int:
    """Returns 0 (even if no lab can run), 1 for a failed job, or 2 for invalid options."""
    try:
        checks.check_integer("--steps", options.steps, 1)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        check_machine(CLUSTER)
        namespaces()
    except (ValueError, UnavailableError) as error:
        reason = str(error).splitlines()[0].removesuffix(" Tried:")
        print(f"tfposeidon demo: skipped, because the lab cannot run on this machine: {reason}")
        return 0
    print(f"{ABOUT}; the accelerators and links are emulated.", flush=True)
    try:
        found = measure(options.steps)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        # After a timeout, the output may be bytes or missing.
        output = error.stderr if isinstance(error.stderr, str) else ""
        print(f"tfposeidon demo: {error}\n{output[-4000:]}", file=sys.stderr)
        return 1
    print("\n".join(["", *table(rows(found)), ""]))
    print(plot(found, options.plot))
    return 0


def measure(steps: int) -> dict[str, Measured]:
    """Runs the demo's job in the lab; returns the measurements by scheme."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        cluster = f"--nodes {CLUSTER.nodes} --per-node {CLUSTER.per_node} --inter {CLUSTER.inter}"
        # If this process is killed, the kernel ends the lab.
        command = ["setpriv", "--pdeathsig", "TERM", *python("tfposeidon"), "lab"]
        command += [*cluster.split(), "--show", "first", "--"]
        command += [*python("tfposeidon.lab.demo"), str(path), str(steps)]
        # Hide real GPUs, because NCCL would refuse ranks that share one.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        # All schemes together take about 10 s per step.
        limit_s = 600 + 60 * steps
        subprocess.run(
            command, env=environment, stderr=subprocess.PIPE, text=True, timeout=limit_s, check=True
        )
        found = json.loads(path.read_text())
    return {scheme: Measured(**figures) for scheme, figures in found.items()}


def rows(found: Mapping[str, Measured]) -> list[tuple[str, ...]]:
    """Returns a header and a row for each scheme; the first scheme is the baseline.

    >>> found = {"allreduce": Measured(step_s=2.4, sent_bytes=27e6),
    ...          "hitopk": Measured(step_s=0.8, sent_bytes=1e6)}
    >>> for row in rows(found):
    ...     print(*row, sep=" | ")
    scheme | step time | sent per rank to other nodes | speedup
    Horovod's all-reduce | 2400 ms | 27.00 MB | 1.0
    tfposeidon hitopk, top 1 % | 800 ms | 1.00 MB | 3.0
    """
    baseline_s = next(iter(found.values())).step_s
    rows: list[tuple[str, ...]] = [
        ("scheme", "step time", "sent per rank to other nodes", "speedup")
    ]
    for scheme, one in found.items():
        sent = f"{one.sent_bytes / 1e6:.2f} MB"
        speedup = f"{baseline_s / one.step_s:.1f}"
        rows.append((LABELS[scheme], f"{1e3 * one.step_s:.0f} ms", sent, speedup))
    return rows


def plot(found: Mapping[str, Measured], path: Path) -> str:
    """Draws a bar for each scheme into a PNG file; returns a message for the user."""
    try:
        # Import Matplotlib only here, because it is optional.
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 2.8))
    except ImportError:
        return "The plot was skipped: Matplotlib is missing. Run: pip install matplotlib"
    _draw(figure.subplots(), found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except OSError as error:
        return f"The plot was not written: {error}"
    return f"wrote {path}"


def _draw(axis: Any, found: Mapping[str, Measured]) -> None:
    steps_ms = [1e3 * one.step_s for one in found.values()]
    labels = [LABELS[scheme] for scheme in found]
    bars = axis.barh(labels, steps_ms, color=[COLORS[scheme] for scheme in found])
    texts = [f"{step}, {sent} sent" for _, step, sent, _ in rows(found)[1:]]
    axis.bar_label(bars, texts, padding=4, fontsize=9)
    compute_ms = 1e3 * MODEL.step_s
    axis.axvline(compute_ms, color="black", linestyle="--", linewidth=1)
    axis.text(compute_ms, -0.55, "without communication", fontsize=8, ha="center", va="bottom")
    axis.set_title(ABOUT, fontsize=10, pad=16)
    axis.figure.suptitle("A training step on a slow network", y=1.12, fontweight="bold")
    axis.set_xlabel("milliseconds per step; labels: megabytes that a rank sends to other nodes")
    axis.set_xlim(0, 1.35 * max(steps_ms))
    axis.spines[["top", "right"]].set_visible(False)
    axis.invert_yaxis()


# ------------------------------------------------------------------ ranks


def train(path: str, steps: int) -> None:
    """Measures every scheme, and writes the results to a JSON file on rank 0."""
    # Import TensorFlow here and below, because the command must start without it.
    import tensorflow as tf

    import tfposeidon
    from tfposeidon.lab.accelerator import emulated_model

    # Layers that wait for their accelerator must not block the threads that communicate.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    rank = tfposeidon.init().rank
    model = emulated_model(MODEL, seed=rank)
    found = {scheme: _train_with(scheme, model, steps) for scheme in LABELS}
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def _train_with(scheme: str, model: Any, steps: int) -> dict[str, float]:
    """Trains a few steps on all ranks; returns the fields of `Measured`, equal on all ranks."""
    import keras
    import numpy as np

    import tfposeidon
    from tfposeidon.autotune.comparison import TIMED_STEPS, UNTIMED_STEPS
    from tfposeidon.autotune.forecast import forecasts_of
    from tfposeidon.communication import runtime
    from tfposeidon.communication.wire import exchange_objects
    from tfposeidon.lab.network import payload_bytes

    optimizer = tfposeidon.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme=scheme)
    # The plan reports the measured step time next to the predicted time, even after `auto` has
    # decided.
    optimizer.exchange.is_timed = True
    model.compile(optimizer=optimizer, loss="mse")
    batch = model.inputs[0].shape[0]
    # An epoch has one step that is traced or retraced, and the timed steps. `auto` decides after an
    # epoch, and needs its own number of timed steps in it.
    per_epoch = max(1 + steps, UNTIMED_STEPS + TIMED_STEPS if scheme == "auto" else 0)
    data = np.ones((batch * per_epoch, 1), "float32")
    seen: list[tuple[float, int]] = []

    def stop(epoch: int, logs: Any) -> None:
        # `auto` compares plans in the second and third epoch.
        model.stop_training = epoch == (3 if scheme == "auto" else 1)

    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=stop,
        on_train_batch_end=lambda _, logs: seen.append((time.perf_counter(), payload_bytes())),
    )
    # Request many epochs, but run only a few, because `auto` retraces a step only if the remaining
    # epochs save more than three times the time of a trace.
    model.fit(data, data, batch_size=batch, epochs=1000, verbose=0, callbacks=[watch])
    own_steps_s, own_bytes = np.diff(seen, axis=0)[-steps:].T
    wire = runtime.wire()
    # The interface counts the bytes of all ranks of the node.
    node_bytes = float(np.mean(own_bytes)) / wire.topology.node.size
    everybody = exchange_objects((own_steps_s.tolist(), node_bytes), wire, "demo")
    steps_s, sent_bytes = zip(*everybody, strict=True)
    # Take the slowest rank, because all ranks wait for it. The median ignores steps that other load
    # on the machine slowed down.
    step_s = float(np.median(np.max(steps_s, axis=0)))
    if wire.topology.rank == 0:
        print(f"{scheme}: {1e3 * step_s:.0f} ms per step", flush=True)
        for forecast in forecasts_of(optimizer.plan) if scheme == "auto" else ():
            lines = (f"chosen plan: {forecast.chosen}", *forecast.lines())
            print("\n".join(f"  {line}" for line in lines), flush=True)
    return {"step_s": step_s, "sent_bytes": float(np.mean(sent_bytes))}


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
