"""Times steps whose gradients XLA compiles into zero, one or several functions.

    python -m benchmarks.xla           # a Transformer on 2 nodes, three bandwidths; 5 minutes

All variants exchange the gradients of a model of Keras layers by "allreduce", and alternate. The
table shows medians over turns; the time of a turn is that of the slowest rank. "first step"
includes the trace and, with XLA, the compilation. An interrupted run resumes.
"""

import statistics

from benchmarks import figures, harness

COMMON = {
    "rates": ["unshaped", "1gbit", "300mbit"],
    "segments": [0, 1, 2, 4],
    "width": 256,
    "blocks": 6,
    "rounds": 9,
}
SMALLEST = COMMON | {
    "rates": ["unshaped"],
    "segments": [0, 2],
    "width": 8,
    "blocks": 1,
    "rounds": 1,
}
BATCH, STEPS = 8, 3


def parse_arguments():
    parser = harness.argument_parser("xla", __doc__)
    parser.add_argument("--rates", nargs="*", help="bandwidths between two nodes")
    parser.add_argument("--segments", type=int, nargs="*", help="numbers of functions; 0: no XLA")
    parser.add_argument("--rounds", type=int, help=f"turns of {STEPS} steps ({COMMON['rounds']})")
    return harness.parse(parser, COMMON, COMMON, SMALLEST)


def planned(options):
    """Returns one job per bandwidth."""
    same = {name: getattr(options, name) for name in ("segments", "width", "blocks", "rounds")}
    return {rate: {"rate": rate} | same for rate in options.rates}


def run(rate, segments, width, blocks, rounds):
    sizes = {"width": width, "blocks": blocks, "batch": BATCH, "steps": STEPS, "rounds": rounds}
    task = sizes | {"systems": [str(count) for count in segments]}
    return harness.in_lab(harness.cluster("2x1", rate), "xla", task) | {"rate": rate}


def rows(cells):
    """Yields bandwidth, number of functions, and seconds of step, exposed exchange and tracing."""
    for cell in cells.values():
        for name, found in cell["systems"].items():
            step_s, exposed_s = (statistics.median(found[k]) for k in ("step_s", "exposed_s"))
            yield cell["rate"], name, step_s, exposed_s, found["trace_s"]


def show(cells):
    """Prints a line per bandwidth and number of functions."""
    print("\ntrain steps of a Transformer on 2 nodes with one rank each")
    table = [
        (rate, count, f"{1e3 * step:.0f} ms", f"{1e3 * exposed:.0f} ms", f"{trace:.1f} s")
        for rate, count, step, exposed, trace in rows(cells)
    ]
    harness.show([("bandwidth", "compiled functions", "step", "exposed", "first step"), *table])


def plot(cells, path):
    """Plots a panel per bandwidth: step times as bars that include exposed communication."""
    found = {}
    for rate, name, step_s, exposed_s, _ in rows(cells):
        found.setdefault(rate, []).append((name, 1e3 * step_s, 1e3 * exposed_s))

    def draw(figure, axes):
        for axis, (rate, own) in zip(axes, found.items(), strict=True):
            counts, steps, exposed = zip(*own, strict=True)
            names = [
                f"XLA, {n} function{'s' * (n != '1')}" if n != "0" else "no XLA" for n in counts
            ]
            rest = [step - part for step, part in zip(steps, exposed, strict=True)]
            axis.barh(
                names, rest, color=figures.PARTS[0], label="computation and hidden communication"
            )
            axis.barh(
                names, exposed, left=rest, color=figures.PARTS[3], label="exposed communication"
            )
            limit = (
                rate.replace("gbit", " Gb/s")
                .replace("mbit", " Mb/s")
                .replace("unshaped", "no limit")
            )
            axis.set(
                title=f"{limit} between nodes", xlabel="milliseconds per step; lower is better"
            )
            axis.invert_yaxis()
        figures.legend(figure, columns=2)

    if found:
        figures.save(path, len(found), draw, height_in=2.6)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
