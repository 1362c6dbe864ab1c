"""HiTopKComm broken down into its four steps (Shi et al. 2021, Fig. 8), in the emulated cluster.

python -m benchmarks.hitopk_steps            # 2 x 2 and 4 x 2 ranks, 200 Mb/s and 1 Gb/s, densities 0.01 and 0.001
"""

import argparse
import itertools

from benchmarks import harness
from benchmarks.workers.hitopk_steps import STEPS

CASES = {"layouts": ["2x2", "4x2"], "rates": ["200mbit", "1gbit"]}
SMALLEST = {"layouts": ["2x1"], "rates": ["1gbit"], "elements": 2**14}
SYSTEMS = ["hitopk:0.01", "hitopk:0.001"]
ELEMENTS = 25_557_032


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser, "hitopk_steps")
    parser.add_argument("--layouts", nargs="*", metavar="MxN", help="nodes x ranks on each")
    parser.add_argument("--rates", nargs="*", help="of the links between nodes")
    return harness.parse(
        parser, CASES | {"elements": ELEMENTS}, CASES | {"elements": ELEMENTS}, SMALLEST
    )


def run(layout, rate, elements=ELEMENTS):
    answer = harness.in_lab(
        harness.cluster(layout, rate), "hitopk_steps", {"elements": elements, "systems": SYSTEMS}
    )
    return answer | {"layout": layout, "rate": rate}


def rows(cells):
    for cell in cells.values():
        for system, figures in cell["systems"].items():
            yield f"{cell['layout']} {cell['rate']} {system}", figures["steps_s"]


def show(cells):
    header = ("ranks, link, scheme", *STEPS, "all")
    found = [
        (name, *(f"{1e3 * s:.0f} ms" for s in (*steps, sum(steps)))) for name, steps in rows(cells)
    ]
    harness.show([header, *found])


def plot(cells, path):
    def draw(axes):
        names, steps = zip(*rows(cells), strict=True)
        begins = [0.0] * len(names)
        for place, label in enumerate(STEPS):
            widths = [1e3 * own[place] for own in steps]
            axes[0].barh(names, widths, left=begins, label=label)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        axes[0].set(xlabel="milliseconds")

    harness.plot(path, 1, draw)


def main():
    options = parse_arguments()
    more = {} if options.elements == ELEMENTS else {"elements": options.elements}
    cases = itertools.product(options.layouts, options.rates)
    planned = harness.keyed({"layout": layout, "rate": rate} | more for layout, rate in cases)
    harness.carry_out(options, planned, run, show, plot)


if __name__ == "__main__":
    main()
