"""Starts jobs with `auto` repeatedly, without and with other load, and compares their choices.

    python -m benchmarks.cold_starts           # 10 starts of 3 configurations; an hour
    python -m benchmarks.cold_starts --full    # also while a process keeps a core busy; 3 hours

Each start measures the network, decides, and then times five steps with the chosen scheme. Steps
and times are those of `benchmarks.scaling`. All fixed schemes are measured in two more jobs. Beside
a busy core, short steps vary by 10 % between jobs, so these starts also measure a fixed scheme
(`REFERENCE`). An interrupted run resumes.
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
REFERENCE = {"resnet50_96": "allreduce", "resnet50": "torus2d"}
"""Fixed scheme that starts beside a busy core also measure, by model."""
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
            both = ["auto", *([REFERENCE[model]] if load and model in REFERENCE else [])]
            systems = both if start < options.starts else [*auto.FIXED]
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
        starts = [cell["systems"] for cell in found if "auto" in cell["systems"]]
        if not starts:
            continue
        fixed = [cell["systems"] for cell in found if "auto" not in cell["systems"]]
        steps_s = [step_s(one, "auto") for one in starts]
        choices = collections.Counter(one["auto"]["chose"] for one in starts)
        ((usual, _),) = choices.most_common(1)
        is_usual = [one["auto"]["chose"] == usual for one in starts]
        usual_s = statistics.median(itertools.compress(steps_s, is_usual))
        yield {
            "case": case,
            "load": load,
            "choices": choices,
            "ratios": [ratio for one in starts for ratio in ratios(one, fixed)],
            "near": sum(
                one or s <= (1 + NEAR) * usual_s for one, s in zip(is_usual, steps_s, strict=True)
            ),
        }


def step_s(systems, name):
    """Returns the median seconds of the steps of one system of a job."""
    return statistics.median(systems[name]["step_s"])


def ratios(start, fixed):
    """Yields the step after a start relative to the best fixed scheme, if jobs measured these."""
    if not fixed:
        return
    # Other processes only prolong steps, so the faster job counts.
    times_s = {
        name: min(step_s(one, name) for one in fixed if "step_s" in one[name])
        for name in auto.FIXED
    }
    reference = next((name for name in start if name != "auto"), None)
    # Relate times within a job, and schemes by the jobs that measured all of them.
    scale = step_s(start, reference) / times_s[reference] if reference else 1.0
    yield step_s(start, "auto") / (scale * min(times_s.values()))


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
        count, case = row["choices"].total(), row["case"]
        good = sum(ratio <= 1 + BEST for ratio in row["ratios"])
        good = f"{good} of {count}" if row["ratios"] else ""
        load = "one core" if row["load"] else "none"
        near = f"{row['near']} of {count}"
        table.append((case.model, case.network, load, choices, near, good))
    harness.show([header, *table])


def plot(cells, path):
    """Plots the step time of each start: a row of points per configuration and load."""
    found = [row for row in compared(cells) if row["ratios"]]

    def draw(figure, axes):
        (axis,) = axes
        for height, row in enumerate(found):
            look = figures.line("auto") | {"linestyle": "", "markersize": 8, "alpha": 0.6}
            axis.plot(row["ratios"], [height] * len(row["ratios"]), **look)
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
