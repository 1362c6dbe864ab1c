"""Measures the four steps of HiTopKComm (Shi et al. 2021, Fig. 8) on an emulated cluster.

    python -m benchmarks.hitopk_steps        # 2 x 2 and 4 x 2 ranks, 200 Mb/s and 1 Gb/s; 5 minutes

Each step is timed by omitting the later steps, at densities 0.01 and 0.001. An interrupted run
resumes.
"""

import itertools

from benchmarks import figures, harness

CASES = {"layouts": ["2x2", "4x2"], "rates": ["200mbit", "1gbit"]}
SMALLEST = {"layouts": ["2x1"], "rates": ["1gbit"], "elements": 2**14}
SYSTEMS = ["hitopk:0.01", "hitopk:0.001"]
STEPS = (
    "reduce-scatter in the node",
    "selection",
    "all-gather across nodes",
    "accumulation, all-gather in the node",
)
ELEMENTS = 25_557_032


def parse_arguments():
    parser = harness.argument_parser("hitopk_steps", __doc__)
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    parser.add_argument(
        "--rates", nargs="*", help="rates of the links between nodes, such as 200mbit"
    )
    return harness.parse(
        parser, CASES | {"elements": ELEMENTS}, CASES | {"elements": ELEMENTS}, SMALLEST
    )


def run(layout, rate, elements=ELEMENTS):
    answer = harness.in_lab(
        harness.cluster(layout, rate), "hitopk_steps", {"elements": elements, "systems": SYSTEMS}
    )
    return answer | {"layout": layout, "rate": rate}


def rows(cells):
    """Yields layout, rate and scheme as one name, and the seconds of each step."""
    for cell in cells.values():
        for system, measured in cell["systems"].items():
            yield f"{cell['layout']} {cell['rate']} {system}", measured["steps_s"]


def show(cells):
    """Prints milliseconds of each step, and their sum."""
    header = ("ranks, link, scheme", *STEPS, "total")
    found = [
        (name, *(f"{1e3 * s:.0f} ms" for s in (*steps, sum(steps)))) for name, steps in rows(cells)
    ]
    harness.show([header, *found])


def readable(name):
    """Returns the name of a row for the plot.

    >>> readable("2x2 200mbit hitopk:0.01")
    '2 x 2 ranks, 200 Mb/s, top 1 %'
    """
    layout, rate, system = name.split()
    density = float(system.partition(":")[2])
    return f"{figures.ranks(layout)}, {figures.rate(rate)}, top {100 * density:g} %"


def plot(cells, path):
    """Plots a bar per layout, network and density, divided into the four steps."""

    def draw(figure, axes):
        names, steps = zip(*rows(cells), strict=True)
        begins = [0.0] * len(names)
        for index, (label, color) in enumerate(zip(STEPS, figures.PARTS, strict=True)):
            widths = [1e3 * own[index] for own in steps]
            axes[0].barh(names, widths, left=begins, label=label, color=color, height=0.7)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        for index, end in enumerate(begins):
            axes[0].annotate(
                f"{end:.0f}", (end, index), (4, 0), textcoords="offset points", va="center"
            )
        axes[0].set(xlabel="milliseconds per exchange of 25.6 M values")
        axes[0].set_yticks(range(len(names)), map(readable, names))
        axes[0].invert_yaxis()
        axes[0].tick_params(left=False)
        figures.legend(figure, columns=2)

    figures.save(path, 1, draw, height_in=3.8)


def main():
    options = parse_arguments()
    more = {} if options.elements == ELEMENTS else {"elements": options.elements}
    cases = itertools.product(options.layouts, options.rates)
    planned = harness.keyed({"layout": layout, "rate": rate} | more for layout, rate in cases)
    harness.carry_out(options, planned, run, show, plot)


if __name__ == "__main__":
    main()
