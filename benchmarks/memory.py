"""Memory of optimizers whose state lies whole on every rank, or in parts on its servers (`update="server"`).

python -m benchmarks.memory            # SGD, Adam and AdamW on 2 and 4 ranks
"""

import argparse
import itertools
import statistics

from benchmarks import harness
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
    "optimizers": ["sgd", "momentum"],
    "elements": 2**12,
    "updates": ["server"],
}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser, "memory")
    parser.add_argument("--layouts", nargs="*", metavar="MxN", help="nodes x ranks on each")
    return harness.parse(parser, CASES, CASES, SMALLEST)


def planned(options):
    """A job for each optimizer and place: memory that one leaves behind would be the next one's."""
    cases = itertools.product(options.layouts, options.optimizers, options.updates)
    more = {} if options.elements == ELEMENTS else {"elements": options.elements}
    return harness.keyed(
        {"layout": layout, "optimizer": name, "update": of} | more for layout, name, of in cases
    )


def run(layout, optimizer, update, elements=ELEMENTS):
    task = {"elements": elements, "update": update, "systems": [optimizer]}
    answer = harness.in_lab(harness.cluster(layout, "10gbit"), "memory", task)
    return answer | {"layout": layout, "optimizer": optimizer, "update": update}


def rows(cells):
    """(ranks, optimizer, update), bytes of slots and what is resident beyond plain SGD, both as the median of ranks."""
    figures = {
        (c["layout"], c["optimizer"], c["update"]): c["systems"][c["optimizer"]]
        for c in cells.values()
    }
    for (layout, optimizer, update), found in figures.items():
        plain = figures.get((layout, "sgd", update))
        if optimizer != "sgd" and plain:
            slots, resident, without = map(
                statistics.median, (found["slots"], found["resident"], plain["resident"])
            )
            yield (layout, optimizer, update), slots, resident - without


def show(cells):
    print(f"\n{ELEMENTS / 1e6:.1f} M float32 weights; the median of the ranks")
    table = [
        (layout, optimizer, update, f"{slots / 1e6:.1f} MB", f"{resident / 1e6:.0f} MB")
        for (layout, optimizer, update), slots, resident in rows(cells)
    ]
    harness.show(
        [("ranks", "optimizer", "update", "slots", "resident beyond SGD without slots"), *table]
    )


def plot(cells, path):
    def draw(axes):
        found = list(rows(cells))
        names = [" ".join(about) for about, *_ in found]
        axes[0].barh(names, [resident / 1e6 for *_, resident in found], label="resident")
        axes[0].plot(
            [slots / 1e6 for _, slots, _ in found], names, "k|", markersize=12, label="slots"
        )
        axes[0].set(xlabel="MB")

    harness.plot(path, 1, draw)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
