"""Measures the time to a target accuracy with the small preset of the DAWNBench example.

    python -m benchmarks.dawnbench          # short: one seed, all-reduce and the paper's schedule
    python -m benchmarks.dawnbench --full   # three seeds, all schedules, omitted parts; two hours

Systems are Horovod called directly (one all-reduce per gradient), all-reduce in buckets during the
backward pass (as in PyTorch DDP) in float32 and in float16, the 2D torus, hierarchical top 1 % in
all phases, the paper's schedule (fp16 compression) and `auto`. All have the same model, data,
learning rates and evaluation. The bandwidth between nodes (`RATE`) corresponds to 25 GbE in the
paper's run. As in DAWNBench, time includes the tracing of steps, but not evaluation. An interrupted
run resumes.
"""

import functools
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import figures, harness

RATE = "32mbit"
"""The 25 GbE equivalent. On 16 nodes, 2D torus takes 61 ms for the gradients of ResNet-50 (1.875 x
102 MB per node), and a V100 computes for 58 ms in the first phase (table 4 of the paper). The small
model computes for 75 ms in this phase, on two cores for four ranks, and sends 315 kB per node."""
SYSTEMS = ("horovod", "allreduce", "allreduce16", "torus2d", "hitopk", "paper", "auto")
LOOKS = {
    # System -> its label, and the system in `figures` with the same line style.
    "horovod": ("Horovod called directly", "horovod"),
    "allreduce": ("all-reduce in buckets, as DDP", "allreduce"),
    "allreduce16": ("fp16 all-reduce in buckets, as DDP's hook", "allreduce:float16"),
    "torus2d": ("2D torus", "torus2d"),
    "hitopk": ("hierarchical top 1 %", "hitopk:0.01"),
    "paper": ("the paper's schedule", "hitopk:0.01:float16"),
    "auto": ("auto", "auto"),
}
PARTS = {
    "cache": "the paper's schedule, without cache",
    "resizing": "the paper's schedule, without resizing",
    "sparse": "the paper's schedule, without the sparse phase",
    "lars": "the paper's schedule, without LARS",
}
"""Part of the paper's schedule to omit -> label of the run without it."""
COMMON = {"layout": "2x2", "rate": RATE, "shortest": False}
SHORT = COMMON | {"systems": ["allreduce", "paper"], "seeds": [0], "parts": []}
FULL = COMMON | {"systems": list(SYSTEMS), "seeds": [0, 1, 2], "parts": list(PARTS)}
SMALLEST = {
    "layout": "1x1",
    "rate": "200mbit",
    "shortest": True,
    "systems": ["paper"],
    "seeds": [0],
    "parts": [],
}


def parse_arguments():
    parser = harness.argument_parser("dawnbench", __doc__)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, help="systems to compare")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights, order and crops")
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, help="parts to omit from the paper's schedule"
    )
    parser.add_argument("--layout", metavar="MxN", help="cluster, as nodes x ranks per node (2x2)")
    parser.add_argument("--rate", help=f"rate between nodes ({RATE})")
    parser.set_defaults(shortest=None)
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per seed and system, and per omitted part."""
    runs = [(system, None) for system in options.systems]
    runs += [("paper", part) for part in options.parts]
    more = {"shortest": True} if options.shortest else {}
    return harness.keyed(
        {"system": system, "part": part, "seed": seed}
        | {"layout": options.layout, "rate": options.rate}
        | more
        for seed in options.seeds
        for system, part in runs
    )


@functools.cache
def drawn(shortest):
    """Creates the images of all jobs in a folder that is deleted when this process ends."""
    sys.path.insert(0, str(harness.ROOT / "examples"))
    from data import draw_shapes

    folder = tempfile.TemporaryDirectory()
    counts = {"train": 160, "test": 80} if shortest else {}
    draw_shapes.draw(Path(folder.name) / "shapes", **counts)
    return folder


def run(system, part, seed, layout, rate, shortest=False):
    """Trains with one system; the answer has a record per epoch."""
    data = f"{drawn(shortest).name}/shapes"
    task = {"systems": [system], "seed": seed, "data": data, "shortest": shortest}
    task["without"] = [part] if part else []
    options = harness.cluster(layout, rate)
    about = {"system": system, "part": part, "seed": seed, "layout": layout, "rate": rate}
    return harness.in_lab(options, "dawnbench", task) | about


def runs_of(cells):
    """Returns records and targets of all seeds, by system and omitted part."""
    found = {}
    for cell in cells.values():
        (answer,) = cell["systems"].values()
        found.setdefault((cell["system"], cell["part"]), []).append(answer)
    wanted = [(system, None) for system in SYSTEMS] + [("paper", part) for part in PARTS]
    return {key: found[key] for key in wanted if key in found}


def name(system, part):
    """Returns the label of a system, with the omitted part."""
    return PARTS[part] if part else LOOKS[system][0]


def target_of(runs):
    """Returns the target accuracy of all runs, from 0 to 1."""
    return next(iter(runs.values()))[0]["target"]


def reached(answer):
    """Returns the first record whose accuracy reaches the target, or `None`."""
    lines = answer["lines"]
    return next((line for line in lines if line["val_accuracy"] >= answer["target"]), None)


def show(cells):
    """Prints the time to the target and the final accuracy, by system."""
    runs = runs_of(cells)
    target = target_of(runs)
    cell = next(iter(cells.values()))
    print(
        f"\nsmall preset, {figures.ranks(cell['layout'])}, {figures.rate(cell['rate'])} between "
        "nodes; mean over seeds (lowest, highest)"
    )
    header = (
        "schedule",
        "seeds",
        f"seconds to {100 * target:g} %",
        "epochs",
        "final accuracy",
    )
    rows = [(*header, "total seconds", "fastest epoch by pixels x batch, s")]
    for key, seeds in runs.items():
        first = [reached(run) for run in seeds]
        missed = first.count(None)
        first = [line for line in first if line]
        rows.append(
            (
                name(*key),
                str(len(seeds)),
                spread([line["seconds"] for line in first], "{:.0f}")
                + (f"; {missed} below target" if missed else ""),
                spread([line["epoch"] + 1 for line in first], "{:.1f}"),
                spread([100 * run["lines"][-1]["val_accuracy"] for run in seeds], "{:.1f}") + " %",
                spread([run["lines"][-1]["seconds"] for run in seeds], "{:.0f}"),
                ", ".join(f"{size}: {s:.1f}" for size, s in epoch_seconds(seeds).items()),
            )
        )
    harness.show(rows)


def spread(values, form):
    """Returns mean, minimum and maximum of values."""
    if not values:
        return "none"
    lowest, highest = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.mean(values))} ({lowest}, {highest})"


def epoch_seconds(seeds):
    """Returns the seconds of the fastest epoch over all seeds, by resolution and batch size.

    The first epoch of each phase includes the tracing of steps.
    """
    found = {}
    for run in seeds:
        for before, line in zip(run["lines"], run["lines"][1:], strict=False):
            taken = line["seconds"] - before["seconds"]
            found.setdefault(f"{line['pixels']} x {line['batch']}", []).append(taken)
    return {size: min(taken) for size, taken in found.items()}


def plot(cells, path):
    """Plots accuracy over training time, and each seed's time to the target."""
    runs = runs_of(cells)
    target = 100 * target_of(runs)

    def draw(figure, axes):
        curves, times = axes
        for (system, part), seeds in runs.items():
            if part is None:
                seconds = np.mean([[one["seconds"] for one in run["lines"]] for run in seeds], 0)
                accuracies = [[one["val_accuracy"] for one in run["lines"]] for run in seeds]
                curves.plot(seconds, 100 * np.mean(accuracies, 0), **look(system))
        curves.set(xlabel="seconds of training", ylabel="accuracy on test images, %", ylim=(0, 101))
        for height, ((system, _part), seeds) in enumerate(runs.items()):
            found = [line["seconds"] for run in seeds if (line := reached(run))]
            style = look(system) | {"linestyle": "", "label": None}
            times.plot(found, [height] * len(found), **style)
            if not found:
                times.annotate("below target", (0, height), va="center", fontsize=9)
        times.set_yticks(range(len(runs)), [name(*key) for key in runs])
        times.margins(x=0.06)
        times.set(xlabel=f"seconds to {target:g} %, by seed")
        times.set_xlim(left=0)
        times.set_ylim(len(runs) - 0.5, -0.5)
        curves.axhline(target, **figures.REFERENCE)
        for axis in axes:
            axis.grid()
        ours = [label for label, like in LOOKS.values() if figures.style(like).ours]
        figures.legend(figure, columns=3, more=ours)

    figures.save(path, 2, draw, height_in=3.6)


def look(system):
    """Returns the line style and the label of a system."""
    label, like = LOOKS[system]
    return figures.line(like) | {"label": label, "markersize": 4}


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
