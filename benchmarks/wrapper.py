"""What the wrapper costs in a step as `fit` makes it: beside Horovod's own exchange, and beside plain Keras.

    python -m benchmarks.wrapper

Two ranks on one node exchange ResNet-50's gradients and apply their means; one rank calls `fit`. Steps include what
`fit` has the wrapper do: samples are counted, gradients weighted, exchanges timed. Both sides are timed in turn,
A B B A, and each such pair gives a ratio, so that a machine that becomes slower does not count. Beside the median of
the ratios stand the interval in which it lies with 95 %, and their quartiles. An interrupted run goes on.
"""

import argparse
import itertools
import math
import statistics

import numpy as np

from benchmarks import harness
from tfposeidon.lab import models
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES

COMMON = {
    "pairs": 101,
    "systems": ["fit", "allreduce", "asa", "asa16", "2dtar"],
    "model": "resnet50",
    "bucket_mib": [DEFAULT_BUCKET_BYTES / 2**20],
}
SMALLEST = COMMON | {"pairs": 1, "systems": ["fit", "allreduce"], "model": "googlenet"}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser, "wrapper")
    parser.add_argument("--pairs", type=int, help=f"pairs that are timed ({COMMON['pairs']})")
    parser.add_argument("--systems", nargs="*", help="schemes on two ranks, and `fit` on one")
    parser.add_argument(
        "--model", choices=models.MODELS, help="whose gradients are exchanged (resnet50)"
    )
    parser.add_argument("--bucket-mib", type=float, nargs="*", help="bucket sizes to try")
    return harness.parse(parser, COMMON, COMMON, SMALLEST)


def planned(options):
    """A job for each system."""
    names = [
        "fit" if name == "fit" else f"{name} {bucket_mib:g}"
        for name in options.systems
        for bucket_mib in (options.bucket_mib if name != "fit" else [0])
    ]
    return harness.keyed(
        {"system": name, "model": options.model, "pairs": options.pairs} for name in names
    )


def run(system, model, pairs):
    layout = "1x1" if system == "fit" else "1x2"
    return harness.in_lab(
        harness.cluster(layout, "unshaped"),
        "wrapper",
        {"systems": [system], "model": model, "pairs": pairs},
    )


def median_interval(values):
    """Between which of the values the median of all that could be drawn lies with 95 % at least; six are needed.

    As many values lie below the interval as above it. The median misses it if at most so many fall on one side of it,
    as so many heads of a coin.

    >>> median_interval(range(100)), median_interval(range(101))
    ((39, 60), (40, 60))
    """
    ordered = sorted(values)
    count = len(ordered)
    tails = itertools.accumulate(math.comb(count, heads) for heads in range(count // 2))
    # Both tails together in one of 20 cases.
    low = max(0, sum(40 * tail <= 2**count for tail in tails) - 1)
    return ordered[low], ordered[count - 1 - low]


def ratios(cell):
    """The system, and ours / theirs of each pair."""
    ((system, figures),) = cell["systems"].items()
    return system, [
        ours / theirs for ours, theirs in zip(figures["ours_s"], figures["theirs_s"], strict=True)
    ]


def show(cells):
    header = ("", "pairs", "ours", "theirs", "ratio", "95 % of the median", "quartiles")
    print(
        "\nsteps of two ranks on one machine by a scheme and buckets of so many MiB; of one rank, ten by `fit`"
    )
    harness.show([header, *map(row, cells.values())])


def row(cell):
    system, found = ratios(cell)
    figures = cell["systems"][system]
    times = [f"{1e3 * statistics.median(figures[side]):.1f} ms" for side in ("ours_s", "theirs_s")]
    intervals = (median_interval(found), np.quantile(found, [0.25, 0.75]))
    texts = [f"{low:.3f} to {high:.3f}" for low, high in intervals]
    return (system, str(len(found)), *times, f"{statistics.median(found):.3f}", *texts)


def plot(cells, path):
    """Ratios of all pairs."""

    def draw(axes):
        found = dict(map(ratios, cells.values()))
        axes[0].boxplot(list(found.values()), showfliers=False)
        axes[0].set_xticks(
            range(1, len(found) + 1), list(found), rotation=30, ha="right", fontsize=7
        )
        axes[0].axhline(1.0, color="grey", linestyle=":", label="theirs")
        axes[0].set_ylabel("time, ours / theirs")

    harness.plot(path, 1, draw)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
