"""Draws the plot of the README from the cells of `benchmarks.scaling`: time per step on a slow link, beside the peers.

python -m benchmarks.overview     # reads docs/results/scaling.json, writes docs/results/overview.png
"""

import argparse
import json
from pathlib import Path

from benchmarks import harness, scaling

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SYSTEMS = {
    "horovod": "Horovod",
    "ddp": "PyTorch DDP",
    "2dtar": "tfposeidon, 2D torus",
    "horovod-fp16": "Horovod, 16 bits",
    "ddp-fp16": "PyTorch DDP, 16 bits",
    "2dtar:float16": "tfposeidon, 2D torus, 16 bits",
    "ddp-powersgd": "PyTorch DDP, PowerSGD",
    "hitopk:0.01": "tfposeidon, top 1 %",
}
COLORS = {"horovod": "#9a9a9a", "ddp": "#5b8db8", "2dtar": "#d1495b", "hitopk": "#d1495b"}
NAMES = {"vgg19": "VGG-19", "resnet50": "ResNet-50"}


def rows(cells, model, layout, gbit):
    """Seconds of a step by system, at the speed of the real accelerator, and those of computing alone."""
    ((key, found),) = (
        (key, found)
        for key, found in scaling.groups(cells).items()
        if key[:3] == (model, layout, gbit)
    )
    dilation = key[3]
    steps = {row["system"]: row["step_s"] / dilation for row in found if "step_s" in row}
    return {system: steps[system] for system in SYSTEMS if system in steps}, steps["alone"]


def plot(cells, layout, gbit, path):
    """Saves one panel for each model, with a bar for each system."""

    def draw(axes):
        for axis, (model, name) in zip(axes, NAMES.items(), strict=True):
            steps, alone_s = rows(cells, model, layout, gbit)
            colors = [COLORS[system.split("-")[0].split(":")[0]] for system in steps]
            bars = axis.barh(
                [SYSTEMS[system] for system in steps],
                [1e3 * s for s in steps.values()],
                color=colors,
            )
            axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
            axis.axvline(
                1e3 * alone_s,
                color="black",
                linestyle="--",
                linewidth=1,
                label="without communication",
            )
            axis.set(
                title=name, xlabel="milliseconds per step", xlim=(0, 1.2e3 * max(steps.values()))
            )
            axis.spines[["top", "right"]].set_visible(False)
            axis.invert_yaxis()
            axis.tick_params(labelleft=axis is axes[0])
        for label, system in zip(axes[0].get_yticklabels(), steps, strict=True):
            label.set_fontweight("bold" if system.startswith(("2dtar", "hitopk")) else "normal")
        axes[0].figure.suptitle(
            f"{layout.replace('x', ' x ')} ranks, {gbit:g} Gb/s between emulated nodes", y=1.02
        )

    harness.plot(path, len(NAMES), draw)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="4x2", help="nodes x ranks on each (4x2)")
    parser.add_argument(
        "--gbit", type=float, default=4.0, help="bandwidth between nodes in Gb/s (4)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "scaling.json", help="cells of benchmarks.scaling"
    )
    parser.add_argument(
        "--plot", type=Path, default=RESULTS / "overview.png", help="where the plot goes"
    )
    options = parser.parse_args()
    plot(json.loads(options.results.read_text()), options.layout, options.gbit, options.plot)


if __name__ == "__main__":
    main()
