"""Measures the cost of the wrapper in a step of `fit`, against Horovod and plain Keras.

    python -m benchmarks.wrapper                                             # 10 minutes
    python -m benchmarks.wrapper --pairs 401 --systems allreduce fit         # 13 minutes
    python -m benchmarks.wrapper --pairs 11 --systems synchronization start  # ResNet-50 itself
    python -m benchmarks.wrapper --pairs 15 --systems "small 1" "small 10"   # steps of 4 ms; 8 min
    python -m benchmarks.wrapper --pairs 15 --systems "small auto 1" "small auto 10"  # 8 minutes

Two ranks on one node exchange ResNet-50's gradients and apply their means; one rank calls `fit`.
Steps include the wrapper's work in `fit`: it counts samples, weights gradients and times exchanges.
Both sides take turns, A B B A, and each such pair gives a ratio, so that a machine that slows down
has no effect. The table shows the median of the ratios, its 95 % interval, and the quartiles.
"synchronization" is the work of `fit` per epoch outside of steps: two comparisons of replicas, and
averages of layer state and metrics, relative to a step of 8 images per rank. "start" is the
broadcast at the start of a model's first `fit`, relative to the same step. "small 10" is a step of
`fit` with "allreduce", `steps_per_execution` 10 and four dense layers of 64 on two ranks, relative
to `grouped_allreduce` in a custom train step. "small auto 10" is the same step under "auto",
relative to the scheme that it chose. An interrupted run resumes.
"""

import itertools
import math
import statistics

import numpy as np

from benchmarks import architectures, figures, harness
from tfposeidon.exchange.plan import DEFAULT_BUCKET_BYTES

COMMON = {
    "pairs": 101,
    "systems": ["fit", "allreduce", "alltoall", "alltoall:float16", "torus2d"],
    "model": "resnet50",
    "bucket_mib": [DEFAULT_BUCKET_BYTES / 2**20],
    "shrink": 1,
}
WHOLE = {"fit", "synchronization", "start", "small 1", "small 10", "small auto 1", "small auto 10"}
"""Systems without variations of scheme and buckets."""
SMALLEST = COMMON | {"pairs": 1, "systems": ["allreduce"], "model": "alexnet", "shrink": 8}


def parse_arguments():
    parser = harness.argument_parser("wrapper", __doc__)
    parser.add_argument("--pairs", type=int, help=f"number of timed pairs ({COMMON['pairs']})")
    parser.add_argument(
        "--systems", nargs="*", help="schemes and `small` on two ranks, and `fit` on one"
    )
    parser.add_argument(
        "--model",
        choices=architectures.MODELS,
        help="model whose gradients are exchanged (resnet50)",
    )
    parser.add_argument(
        "--bucket-mib", type=float, nargs="*", help="sizes of buckets to try, in MiB"
    )
    return harness.parse(parser, COMMON, COMMON, SMALLEST)


def planned(options):
    """Returns one job per system and bucket size."""
    names = [
        name if name in WHOLE else f"{name} {bucket_mib:g}"
        for name in options.systems
        for bucket_mib in (options.bucket_mib if name not in WHOLE else [0])
    ]
    # Add `shrink` only if it is set, so that keys of stored results stay valid.
    more = {"shrink": options.shrink} if options.shrink > 1 else {}
    return harness.keyed(
        {"system": name, "model": options.model, "pairs": options.pairs} | more for name in names
    )


def run(system, model, pairs, shrink=1):
    layout = "1x1" if system == "fit" else "1x2"
    task = {"systems": [system], "model": model, "shrink": shrink, "pairs": pairs}
    return harness.in_lab(harness.cluster(layout, "unshaped"), "wrapper", task)


def median_interval(values):
    """Returns an interval that contains the true median with a probability of at least 95 %.

    Equally many values lie below and above the interval. Each value is above or below the true
    median with equal probability, so the number of values above it has a binomial distribution.

    Args:
      values: At least six numbers.

    >>> median_interval(range(100)), median_interval(range(101))
    ((39, 60), (40, 60))
    """
    ordered = sorted(values)
    count = len(ordered)
    tails = itertools.accumulate(math.comb(count, heads) for heads in range(count // 2))
    # Both tails together have a probability of at most 5 %.
    low = max(0, sum(40 * tail <= 2**count for tail in tails) - 1)
    return ordered[low], ordered[count - 1 - low]


def ratios(cell):
    """Returns the system of an answer, and the ratio tfposeidon / baseline of each pair."""
    ((system, measured),) = cell["systems"].items()
    pairs = zip(measured["ours_s"], measured["theirs_s"], strict=True)
    return system, [ours / theirs for ours, theirs in pairs]


def show(cells):
    """Prints times, ratios and their intervals."""
    header = ("", "pairs", "tfposeidon", "baseline", "ratio", "95 % of the median", "quartiles")
    print(
        "\none step of two ranks on one machine, by scheme and bucket size in MiB; "
        "ten steps of `fit` on one rank"
    )
    harness.show([header, *map(row, cells.values())])
    for system, found in map(ratios, cells.values()):
        if system == "synchronization":
            share = statistics.median(found)
            print(f"what `fit` adds to an epoch of 100 steps is {share:.2g} % of it")


def row(cell):
    system, found = ratios(cell)
    measured = cell["systems"][system]
    times = [f"{1e3 * statistics.median(measured[side]):.1f} ms" for side in ("ours_s", "theirs_s")]
    intervals = (median_interval(found), np.quantile(found, [0.25, 0.75]))
    texts = [f"{low:.3f} to {high:.3f}" for low, high in intervals]
    return (system, str(len(found)), *times, f"{statistics.median(found):.3f}", *texts)


def plot(cells, path):
    """Plots the ratios of all pairs as boxes from quartile to quartile."""

    def draw(figure, axes):
        (axis,) = axes
        found = dict(map(ratios, cells.values()))
        for system in ("synchronization", "start"):
            found.pop(system, None)
        for index, (system, values) in enumerate(found.items()):
            color = style(system).color
            axis.boxplot(
                [values],
                positions=[index],
                orientation="horizontal",
                widths=0.6,
                showfliers=False,
                patch_artist=True,
                boxprops={"facecolor": color},
                medianprops={"color": "black", "linewidth": 2},
            )
            axis.annotate(
                f"{statistics.median(values):.3f}",
                (1.0, index),
                (6, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
            )
        axis.axvline(1.0, label="as fast as without tfposeidon", **figures.REFERENCE)
        axis.set_yticks(range(len(found)), map(readable, found))
        for text, system in zip(axis.get_yticklabels(), found, strict=True):
            text.set_fontweight("bold" if style(system).ours else "normal")
        axis.set(
            xlabel="time of a step / with Horovod's own all-reduce; on one rank: / of plain Keras"
        )
        axis.invert_yaxis()
        axis.tick_params(left=False)
        title = "lines and figures: medians of the pairs; boxes: from quartile to quartile"
        figures.legend(figure, title=title)

    figures.save(path, 1, draw, height_in=1.6 + 0.4 * len(cells))


def style(system):
    """Returns the style of a system: that of its scheme."""
    name = system.partition(" ")[0]
    return figures.style("allreduce" if name == "small" else name)


def readable(system):
    """Returns the name of a system for the plot.

    >>> readable("fit"), readable("alltoall:float16 4")
    ('fit on one rank', 'all-to-all, 16 bits, buckets of 4 MiB')
    """
    if system == "fit":
        return figures.style(system).label
    if system in WHOLE:
        *_, steps = system.split()
        name = "auto / all-reduce" if "auto" in system else "fit"
        return f"{name}, small model, steps_per_execution={steps}"
    scheme, bucket_mib = system.rsplit(" ", 1)
    return f"{figures.style(scheme).label}, buckets of {bucket_mib} MiB"


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
