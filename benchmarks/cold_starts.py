"""Starts jobs with `auto` repeatedly, without and with other load, and compares their choices.

    python -m benchmarks.cold_starts           # 10 starts of 3 configurations; 20 minutes
    python -m benchmarks.cold_starts --full    # also while a process keeps a core busy; 1 hour

Each start measures the network, decides, and then times five steps with the chosen scheme. Steps
and times are those of `benchmarks.scaling`. All fixed schemes are measured in two more jobs. An
interrupted run resumes.
"""

import argparse
import collections
import contextlib
import itertools
import statistics
import subprocess
import sys

from benchmarks import auto, figures, harness, scaling

CELLS = (
    # Configurations of `benchmarks.auto` with short steps.
    ("resnet50_96", "2x2", 40.0, None),
    ("googlenet", "2x2", 2.0, None),
    ("resnet50", "2x2", 25.0, 5.0),
)
COMMON = {"dilation": None, "steps": 5, "cells": CELLS, "starts": 10}
SHORT, FULL = COMMON | {"loads": [False]}, COMMON | {"loads": [False, True]}
SMALLEST = FULL | scaling.SMALLEST | {"starts": 1, "cells": [("alexnet", "2x1", 10.0, None)]}
FIXED_RUNS = 2
"""Number of jobs that measure all fixed schemes, for each configuration and load."""
NEAR, BEST = 0.02, 0.05
"""Relative excess up to which a step time is near that of the usual choice, or the best scheme."""


def parse_arguments():
    parser = harness.argument_parser("cold_starts", __doc__)
    parser.add_argument("--starts", type=int, help="starts of each configuration (10)")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns a job per configuration, load and start, and jobs with the fixed schemes."""
    found = {}
    for (model, layout, gbit, flow_gbit), load in itertools.product(options.cells, options.loads):
        cell = {"models": [model], "layouts": [layout], "gbits": [gbit], "flow_gbit": flow_gbit}
        for start in range(options.starts + FIXED_RUNS):
            systems = ["auto"] if start < options.starts else [*auto.FIXED]
            own = vars(options) | cell | {"systems": systems}
            for key, arguments in scaling.planned(argparse.Namespace(**own)).items():
                more = {"start": start, "load": load}
                found[f"{key} start={start} load={load}"] = arguments | more
    return found


def run(start, load, **arguments):
    with contextlib.ExitStack() as stack:
        if load:
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        return scaling.run(**arguments, late=True) | {"start": start, "load": load}


def compared(cells):
    """Yields a row per configuration and load, with choices and numbers of near and good starts."""
    groups = collections.defaultdict(list)
    for cell in cells.values():
        groups[scaling.group(cell), cell["load"]].append(cell)
    for (case, load), found in groups.items():
        starts = [cell["systems"]["auto"] for cell in found if "auto" in cell["systems"]]
        steps_s = [statistics.median(one["step_s"]) for one in starts]
        choices = collections.Counter(one["chose"] for one in starts)
        ((usual, _),) = choices.most_common(1)
        pairs = list(zip(starts, steps_s, strict=True))
        usual_s = statistics.median(s for one, s in pairs if one["chose"] == usual)
        times = collections.defaultdict(list)
        for cell, name in itertools.product(found, auto.FIXED):
            times[name] += cell["systems"].get(name, {}).get("step_s", [])
        best_s = min((statistics.median(found) for found in times.values() if found), default=None)
        yield {
            "case": case,
            "load": load,
            "choices": choices,
            "steps_s": steps_s,
            "usual_s": usual_s,
            "best_s": best_s,
            "near": sum(one["chose"] == usual or s <= (1 + NEAR) * usual_s for one, s in pairs),
            "good": best_s and sum(s <= (1 + BEST) * best_s for s in steps_s),
        }


def show(cells):
    """Prints a line per configuration and load."""
    header = (
        "model",
        "network",
        "other load",
        "choices",
        "same or within 2 %",
        "within 5 % of best",
    )
    print(f"\ncold starts of auto, steps {harness.emulated(cells)}")
    table = []
    for row in compared(cells):
        choices = "; ".join(f"{count} x {name}" for name, count in row["choices"].most_common())
        count, case = len(row["steps_s"]), row["case"]
        good = "" if row["good"] is None else f"{row['good']} of {count}"
        load = "one core" if row["load"] else "none"
        near = f"{row['near']} of {count}"
        table.append((case.model, case.network, load, choices, near, good))
    harness.show([header, *table])


def plot(cells, path):
    """Plots the step time of each start: a row of points per configuration and load."""
    found = [row for row in compared(cells) if row["best_s"]]

    def draw(figure, axes):
        (axis,) = axes
        for height, row in enumerate(found):
            points = [step_s / row["best_s"] for step_s in row["steps_s"]]
            look = figures.line("auto") | {"linestyle": "", "markersize": 8, "alpha": 0.6}
            axis.plot(points, [height] * len(points), **look)
        names = [
            f"{figures.MODELS.get(row['case'].model, row['case'].model)}, {row['case'].network},\n"
            f"{'one core busy' if row['load'] else 'no other load'}"
            for row in found
        ]
        axis.axvline(1, color="black", linewidth=1)
        axis.axvline(1 + BEST, color="gray", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(found)), names)
        axis.set(xlabel="step after a cold start / step of the best fixed scheme (dashed: + 5 %)")
        axis.set_ylim(len(found) - 0.5, -0.5)
        axis.grid()

    if found:
        figures.save(path, 1, draw, height_in=1.0 + 0.6 * len(found))


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
