"""Compares `auto` with every fixed exact scheme, in configurations not used for fitting.

    python -m benchmarks.auto            # short: GoogLeNet at 2 Gb/s
    python -m benchmarks.auto --full     # twelve configurations; 92 minutes

The configurations were chosen after the code was finished. Their models, layouts and bandwidths
differ from those of the other benchmarks. One has a limit per connection, as in clouds. One has
large layers and large batches, whose sufficient factors need few bytes and much computation. One is
a model of keras-hub, one has eight ranks, and in one a rank is slower than the others. Steps and
times are those of `benchmarks.scaling`. An interrupted run resumes.
"""

import argparse
import functools

from benchmarks import figures, harness, scaling

FIXED = ("allreduce", "alltoall", "torus2d", "ps", "hybcomm", "factors")
SYSTEMS = (*FIXED, "auto")
CELLS = (
    # Model, layout, Gb/s between nodes, Gb/s per connection, factor on the time of rank 0.
    ("googlenet", "2x2", 2.0, None),
    ("resnet152", "4x1", 5.0, None),
    ("resnet152", "2x2", 3.0, None),
    ("resnet50_96", "2x2", 40.0, None),
    ("vgg19_32", "4x1", 5.0, None),
    ("vgg19_22k", "2x1", 20.0, None),
    ("transformer_110m", "4x1", 15.0, None),
    ("resnet50", "2x2", 25.0, 5.0),
    ("vgg19", "4x1", 6.0, None),
    ("gpt2", "4x1", 10.0, None),
    ("resnet50", "4x2", 10.0, None),
    ("resnet50", "2x2", 4.0, None, 1.3),
)
COMMON = {"systems": list(SYSTEMS), "dilation": None, "steps": 5}
SHORT, FULL = COMMON | {"cells": CELLS[:1]}, COMMON | {"cells": CELLS}
SMALLEST = COMMON | scaling.SMALLEST | {"cells": [("alexnet", "2x1", 10.0, None)]}


def parse_arguments():
    parser = harness.argument_parser("auto", __doc__)
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per configuration."""
    found = {}
    for model, layout, gbit, flow_gbit, *uneven in options.cells:
        cell = {"models": [model], "layouts": [layout], "gbits": [gbit], "flow_gbit": flow_gbit}
        cell["uneven"] = next(iter(uneven), None)
        found |= scaling.planned(argparse.Namespace(**vars(options) | cell))
    return found


def compared(cells):
    """Yields the step time of `auto` and of the fixed schemes, by configuration.

    Args:
      cells: Answers of `scaling.run`, by key.
    """
    for cell in cells.values():
        case = scaling.group(cell)
        steps = {
            system: scaling.row(system, found, cell)["step_s"] / case.dilation
            for system, found in cell["systems"].items()
        }
        auto = cell["systems"]["auto"]
        fixed = {system: step_s for system, step_s in steps.items() if system in FIXED}
        best = min(fixed, key=fixed.get)
        yield {
            "case": case,
            "steps": steps,
            "best": best,
            "best_s": fixed[best],
            "chose": auto["chose"],
            "predicted_s": auto["predicted_s"] / case.dilation,
        }


def show(cells):
    """Prints a line per configuration, and the mean slowdown relative to the best fixed scheme."""
    header = (
        *("model", "ranks", "network", "best fixed scheme", "all-reduce", "auto", "auto / best"),
        *("auto / all-reduce", "chosen", "predicted"),
    )
    found = list(compared(cells))
    print(f"steps {harness.emulated(cells)}")
    harness.show([header, *map(cells_of, found)])
    regrets = [row["steps"]["auto"] / row["best_s"] - 1 for row in found]
    within = sum(regret <= 0.05 for regret in regrets)
    print(
        f"\nauto is slower than the best fixed scheme by {sum(regrets) / len(regrets):.1%} on "
        f"average, and within 5 % of it in {within} of {len(regrets)} configurations"
    )


def cells_of(row):
    case, auto_s = row["case"], row["steps"]["auto"]
    return (
        *(case.model, case.layout, case.network),
        f"{row['best']}, {1e3 * row['best_s']:.0f} ms",
        f"{1e3 * row['steps']['allreduce']:.0f} ms",
        f"{1e3 * auto_s:.0f} ms",
        f"{auto_s / row['best_s']:.2f}",
        f"{auto_s / row['steps']['allreduce']:.2f}",
        row["chose"],
        f"{1e3 * row['predicted_s']:.0f} ms",
    )


def plot(cells, path):
    """Plots step times relative to the best fixed scheme: a row of points per configuration."""
    found = list(compared(cells))

    def draw(figure, axes):
        (axis,) = axes
        for system in SYSTEMS:
            points = [
                (row["steps"][system] / row["best_s"], height)
                for height, row in enumerate(found)
                if system in row["steps"]
            ]
            look = figures.line(system) | {"linestyle": "", "markersize": 7}
            look["markersize"] = 13 if system == "auto" else 7
            axis.plot(*zip(*points, strict=True), **look)
        texts = [
            f"{figures.MODELS.get(case.model, case.model)}, {figures.ranks(case.layout)},\n"
            f"{case.network}"
            for case in (row["case"] for row in found)
        ]
        axis.axvline(1, color="black", linewidth=1)
        axis.set_yticks(range(len(found)), texts)
        axis.set(
            xlabel="step / step of the best fixed scheme",
            xscale="log",
            ylim=(len(found) - 0.5, -0.5),
        )
        axis.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        axis.minorticks_off()
        axis.grid()
        figures.legend(figure)

    figures.save(path, 1, draw, height_in=1.0 + 0.5 * len(found))


def main():
    options = parse_arguments()
    run = functools.partial(scaling.run, late=True)
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
