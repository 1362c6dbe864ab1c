"""Draws the plot of the README: time per step on a slow link, beside the peers.

    python -m benchmarks.overview     # docs/results/scaling.json -> docs/results/overview.png

It shows cells that `python -m benchmarks.scaling --full` measured; nothing is run.
"""

import argparse
import json
from pathlib import Path

from benchmarks import figures, scaling

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SYSTEMS = (
    *("horovod", "ddp", "2dtar", "horovod-fp16", "ddp-fp16", "2dtar:float16"),
    *("ddp-powersgd", "hitopk:0.01"),
)
"""Systems that are drawn, top down, where there are results."""
MODELS = ("vgg19", "resnet50")
LIMIT = {"color": "black", "linestyle": "--", "linewidth": 1.5}


def rows(cells, model, layout, gbit):
    """Returns what the plot shows of a model.

    Args:
      cells: Answers of `benchmarks.scaling`.
      model: Name of the model.
      layout: "MxN", nodes x ranks on each.
      gbit: Bandwidth between nodes in Gb/s.

    Returns:
      Seconds of a step by system, at the speed of the real accelerator, and those without an
      exchange.
    """
    ((key, found),) = (
        (key, found)
        for key, found in scaling.groups(cells).items()
        if key[:3] == (model, layout, gbit)
    )
    dilation = key[3]
    steps = {row["system"]: row["step_s"] / dilation for row in found if "step_s" in row}
    return {system: steps[system] for system in SYSTEMS if system in steps}, steps["alone"]


def plot(cells, path, layout="4x2", gbit=4.0):
    """Saves one panel for each model, with a bar for each system."""

    def draw(figure, axes):
        for axis, model in zip(axes, MODELS, strict=True):
            steps, alone_s = rows(cells, model, layout, gbit)
            milliseconds = {system: 1e3 * step_s for system, step_s in steps.items()}
            figures.bars(axis, milliseconds, names=axis is axes[0])
            axis.axvline(1e3 * alone_s, label="computing, without any exchange", **LIMIT)
            axis.set(title=figures.MODELS[model], xlabel="milliseconds per step")
        labels = [figures.style(system).label for system in steps]
        ours = [f"tfposeidon, {label}" for label in labels]
        names = [
            own if figures.style(system).ours else label
            for system, label, own in zip(steps, labels, ours, strict=True)
        ]
        axes[0].set_yticks(range(len(names)), names)
        (dilation,) = {key[3] for key in scaling.groups(cells) if key[1:3] == (layout, gbit)}
        figure.suptitle(
            f"{figures.ranks(layout)}, {gbit:g} Gb/s between emulated nodes; "
            f"measured {dilation:g} times as slow"
        )
        figures.legend(figure)

    figures.save(path, len(MODELS), draw, height_in=3.6)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="4x2", help="cluster, as nodes x ranks on each (4x2)")
    parser.add_argument(
        "--gbit", type=float, default=4.0, help="bandwidth between nodes in Gb/s (4)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS / "scaling.json",
        help="answers of benchmarks.scaling",
    )
    parser.add_argument("--plot", type=Path, default=RESULTS / "overview.png", help="file to write")
    options = parser.parse_args()
    plot(json.loads(options.results.read_text()), options.plot, options.layout, options.gbit)


if __name__ == "__main__":
    main()
