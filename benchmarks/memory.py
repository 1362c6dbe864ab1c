"""Measures memory of optimizers whose state is replicated on all ranks, or sharded.

    python -m benchmarks.memory      # momentum, Adam and AdamW on 2 and 4 ranks; 5 minutes

Each line is a separate job that applies three updates to one variable of 33.6 M values with "ps",
with `DistributedOptimizer` ("worker" updates) or `ShardedOptimizer` ("server"). An interrupted run
resumes.
"""

import itertools
import statistics

from benchmarks import figures, harness
from benchmarks.workers.memory import OPTIMIZERS

ELEMENTS = 2**25
UPDATES = ("worker", "server")
CASES = {
    "layouts": ["2x1", "4x1", "2x2"],
    "optimizers": list(OPTIMIZERS),
    "elements": ELEMENTS,
    "updates": UPDATES,
}
SMALLEST = {
    "layouts": ["2x1"],
    "optimizers": ["momentum"],
    "elements": 2**12,
    "updates": ["server"],
}


def parse_arguments():
    parser = harness.argument_parser("memory", __doc__)
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    return harness.parse(parser, CASES, CASES, SMALLEST)


def planned(options):
    """Returns a job for each layout, optimizer and side that updates.

    In a job with several cases, memory that one case retains would be counted in the next case.
    """
    cases = itertools.product(options.layouts, options.optimizers, options.updates)
    more = {} if options.elements == ELEMENTS else {"elements": options.elements}
    return harness.keyed(
        {"layout": layout, "optimizer": name, "update": update} | more
        for layout, name, update in cases
    )


def run(layout, optimizer, update, elements=ELEMENTS):
    task = {"elements": elements, "update": update, "systems": [optimizer]}
    answer = harness.in_lab(harness.cluster(layout, "10gbit"), "memory", task)
    return answer | {"layout": layout, "optimizer": optimizer, "update": update}


def rows(cells):
    """Yields (ranks, optimizer, update), bytes of state, and resident bytes beyond plain SGD.

    Both numbers of bytes are medians over ranks.
    """
    measured = {
        (c["layout"], c["optimizer"], c["update"]): c["systems"][c["optimizer"]]
        for c in cells.values()
    }
    for (layout, optimizer, update), found in measured.items():
        plain = measured.get((layout, "sgd", update))
        if optimizer != "sgd" and plain:
            slots, resident, without = map(
                statistics.median, (found["slots"], found["resident"], plain["resident"])
            )
            yield (layout, optimizer, update), slots, resident - without


def show(cells):
    """Prints a line per layout, optimizer and side that updates."""
    print(f"\n{ELEMENTS / 1e6:.1f} M float32 weights; the median of the ranks")
    table = [
        (layout, optimizer, update, f"{slots / 1e6:.1f} MB", f"{resident / 1e6:.0f} MB")
        for (layout, optimizer, update), slots, resident in rows(cells)
    ]
    harness.show(
        [("ranks", "optimizer", "update", "optimizer state", "resident beyond plain SGD"), *table]
    )


COLORS = {"worker": figures.style("ps").color, "server": figures.style("ps:server").color}
"""Colors of updates on every rank, the default, and of updates on the shard owners."""
OPTIMIZER_NAMES = {"momentum": "SGD, momentum", "adam": "Adam", "adamw": "AdamW"}


def plot(cells, path):
    """Plots a panel per layout: resident memory as bars, and optimizer state as marks."""
    (elements,) = {cell.get("task", {}).get("elements", ELEMENTS) for cell in cells.values()}
    labels = {"worker": "resident, DistributedOptimizer", "server": "resident, ShardedOptimizer"}
    found = {}
    for (layout, *about), slots, resident in rows(cells):
        found.setdefault(layout, []).append((*about, slots / 1e6, resident / 1e6))

    def draw(figure, axes):
        most = max(size for own in found.values() for *_, resident in own for size in [resident])
        for axis, (layout, own) in zip(axes, found.items(), strict=True):
            names = []
            for index, (optimizer, update, slots, resident) in enumerate(own):
                names.append(f"{OPTIMIZER_NAMES[optimizer]}, {update}")
                axis.barh(
                    index,
                    resident,
                    color=COLORS[update],
                    label=labels[update],
                    height=0.7,
                )
                mark = axis.vlines(slots, index - 0.42, index + 0.42, "black", linewidth=2.5)
                axis.annotate(
                    f"{resident:.0f}",
                    (max(resident, slots), index),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                )
            mark.set_label("optimizer state, from its shapes")
            axis.set_yticks(range(len(names)), names)
            axis.set(
                title=figures.ranks(layout),
                xlabel="MB on a rank, beyond plain SGD",
                xlim=(0, 1.15 * most),
            )
            axis.invert_yaxis()
            axis.tick_params(left=False)
        text = f"one variable of {elements / 1e6:.1f} M float32 values, after three updates"
        figure.suptitle(text)
        figures.legend(figure, columns=2, more=labels.values())

    if found:
        figures.save(path, len(found), draw, height_in=3.2)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
