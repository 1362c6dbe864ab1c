"""Compares schemes on a slow network: a table and a plot.

  python -m tfposeidon demo

Trains a model in the lab, on emulated nodes with slow links between them: with Horovod's
all-reduce, with the choice of `auto`, with a lossless and with a sparse scheme. It takes two
minutes. It needs Linux with iproute2, as root or with user namespaces; elsewhere it reports the
reason, and the exit status is 0 as well.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfposeidon import checks
from tfposeidon.lab import architectures, sandbox
from tfposeidon.lab.cluster import Cluster
from tfposeidon.lab.command import RANK_BYTES, check_machine
from tfposeidon.text import table

LABELS = {
    "allreduce": "Horovod's all-reduce",
    "auto": "tfposeidon auto, exact",
    "hybcomm": "tfposeidon hybcomm, exact",
    "hitopk": "tfposeidon hitopk, top 1 %",
}
"""Compared schemes and their labels; the first is the baseline."""
# The colors of the plots in docs/results, which benchmarks/figures.py defines.
COLORS = {"allreduce": "#6abf8b", "auto": "#0072b2", "hybcomm": "#d6006e", "hitopk": "#7d4fd6"}
CLUSTER = Cluster(nodes=2, per_node=2, inter=2e8)
SHRINK = 4
MODEL = architectures.model("vgg19_32").shrunk(SHRINK)
ABOUT = f"VGG-19 shrunk to {MODEL.parameters / 1e6:.1f} M parameters, {CLUSTER}"
TIME_LIMIT_S = 600
STEP_LIMIT_S = 60
"""Added for each of `--steps`, for which all schemes together take 10 s."""


class DemoError(Exception):
    """Error of the demo's job in the lab."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Step time and traffic of a scheme.

    `step_s` is the slowest rank's time, median over the steps. `sent_bytes` is the bytes per rank
    that are sent to other nodes, without headers.
    """

    step_s: float
    sent_bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfposeidon demo`."""
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="timed steps per scheme (default: 3)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("tfposeidon-demo.png"),
        metavar="FILE",
        help="file of the plot (default: tfposeidon-demo.png)",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the demo; returns 0 (also without a lab), 1 for a failed job, 2 for invalid options."""
    try:
        checks.check_integer("--steps", options.steps, 1)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        check_machine(CLUSTER, RANK_BYTES)
        sandbox.namespaces()
    except (ValueError, sandbox.UnavailableError) as error:
        reason = str(error).splitlines()[0].removesuffix(" Tried:")
        print(f"tfposeidon demo: skipped, because the lab cannot run on this machine: {reason}")
        return 0
    print(f"{ABOUT}; the accelerators and links are emulated.", flush=True)
    try:
        found = measure(options.steps)
    except DemoError as error:
        print(f"tfposeidon demo: {error}", file=sys.stderr)
        return 1
    print("\n".join(["", *table(rows(found)), ""]))
    print(plot(found, options.plot))
    return 0


def measure(steps: int) -> dict[str, Measured]:
    """Runs the demo's job in the lab; returns the measurements by scheme."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        worker = sandbox.python("tfposeidon.lab.demo_worker")
        command = [*_lab(), "--", *worker, str(path), str(steps), *LABELS]
        # The accelerators are emulated: NCCL would refuse ranks that share a real one, and `auto`
        # does not measure networks of GPUs.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        limit_s = TIME_LIMIT_S + STEP_LIMIT_S * steps
        try:
            done = subprocess.run(
                command, env=environment, stderr=subprocess.PIPE, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(str(error)) from error
        if done.returncode:
            raise DemoError(f"the lab exited with status {done.returncode}:\n{done.stderr[-4000:]}")
        found = json.loads(path.read_text())
    return {scheme: Measured(**figures) for scheme, figures in found.items()}


def _lab() -> list[str]:
    # If this process is killed, the kernel ends the lab.
    ends_with_us = ["setpriv", "--pdeathsig", "TERM"]
    cluster = f"--nodes {CLUSTER.nodes} --per-node {CLUSTER.per_node} --inter {CLUSTER.inter:.0f}"
    lab = [*sandbox.python("tfposeidon"), "lab", *cluster.split(), "--show", "first"]
    return [*ends_with_us, *lab]


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
    slowest_s = next(iter(found.values())).step_s
    header = ("scheme", "step time", "sent per rank to other nodes", "speedup")
    return [
        header,
        *(
            (
                LABELS[scheme],
                f"{1e3 * one.step_s:.0f} ms",
                # Use one unit for all rows, so that they are easy to compare.
                f"{one.sent_bytes / 1e6:.2f} MB",
                f"{slowest_s / one.step_s:.1f}",
            )
            for scheme, one in found.items()
        ),
    ]


def plot(found: Mapping[str, Measured], path: Path) -> str:
    """Draws a bar for each scheme into a PNG file; returns a message for the user."""
    try:
        # Matplotlib is optional, so it is not imported above.
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return "The plot was skipped: Matplotlib is missing. Run: pip install matplotlib"
    # This backend needs no display.
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(8, 2.8))
    _draw(axis, found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except OSError as error:
        return f"The plot was not written: {error}"
    finally:
        pyplot.close(figure)
    return f"wrote {path}"


def _draw(axis: Any, found: Mapping[str, Measured]) -> None:
    steps_ms = [1e3 * one.step_s for one in found.values()]
    ours = [scheme != "allreduce" for scheme in found]
    labels = [LABELS[scheme] for scheme in found]
    bars = axis.barh(labels, steps_ms, color=[COLORS[scheme] for scheme in found])
    texts = [f"{step}, {sent} sent" for _, step, sent, _ in rows(found)[1:]]
    axis.bar_label(bars, texts, padding=4, fontsize=9)
    compute_ms = 1e3 * MODEL.step_s
    axis.axvline(compute_ms, color="black", linestyle="--", linewidth=1)
    axis.text(compute_ms, -0.55, "without communication", fontsize=8, ha="center", va="bottom")
    for label, own in zip(axis.get_yticklabels(), ours, strict=True):
        label.set_fontweight("bold" if own else "normal")
    axis.set_title(ABOUT, fontsize=10, pad=16)
    axis.figure.suptitle("A training step on a slow network", y=1.12, fontweight="bold")
    axis.set_xlabel("milliseconds per step; labels: megabytes that a rank sends to other nodes")
    axis.set_xlim(0, 1.35 * max(steps_ms))
    axis.spines[["top", "right"]].set_visible(False)
    axis.invert_yaxis()
