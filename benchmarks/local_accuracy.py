"""Compares local updates with all-reduce: accuracy, and bytes that a rank sends.

    python -m benchmarks.local_accuracy                       # short: digits, three seeds
    python -m benchmarks.local_accuracy --full                # ten seeds, images too; three hours
    python -m benchmarks.local_accuracy --full --parts time   # only the step times at 200 Mb/s
    python -m benchmarks.local_accuracy --full --data "drawn images, longer"   # seven hours more

Four ranks on four nodes train an MLP on scikit-learn's digits, and a CNN with batch normalization
on synthetic images (examples/data/draw_shapes.py), for 384 steps or for four times as many. Samples
of the ranks are IID ("alike"), or non-IID ("own classes"). With the same seed all systems start
with the same weights and read the same samples in the same order, so differences are paired. Bytes
are those of the plan. Accuracies do not depend on bandwidth, so they are measured without a limit
on it. Step times are measured separately, at 200 Mb/s. An interrupted run resumes.
"""

import statistics
from typing import NamedTuple

import numpy as np

from benchmarks import figures, harness

RATE, LAYOUT = "200mbit", "4x1"


class System(NamedTuple):
    """Method of training in the comparison.

    Attributes:
      kind: Group of systems that one job measures.
      method: Name without `every`, which systems that differ only in `every` share.
      rule: Argument `rule` of `optimizer_of` in the worker.
      every: Steps between synchronizations.
      scheme: Scheme of an exchange.
      look: System of `figures` that determines the color.
    """

    kind: str
    method: str
    rule: str
    every: int
    scheme: str
    look: str

    @property
    def name(self):
        """Name of the system, with `every`."""
        return self.method if self.every == 1 else f"{self.method}, every {self.every}"


BASE, LIKE_BASE = "all-reduce", "all-reduce by AdamW"
EACH_STEP, VARIANTS = "in each step", "variants"
LOCAL_BY_ADAMW = {"outer": "outer", "average by adamw": "average"}
"""Rules with AdamW as the inner optimizer -> outer optimizer of `LocalUpdates`."""
SYSTEMS = {
    system.name: system
    for system in (
        System(EACH_STEP, BASE, "sgd", 1, "allreduce", "allreduce"),
        System(EACH_STEP, LIKE_BASE, "adamw", 1, "allreduce", "allreduce:float16"),
        System(EACH_STEP, "top 1 %", "sgd", 1, "hitopk:0.01", "hitopk:0.01"),
        *(
            System(method, method, rule, every, "torus2d", method)
            for method, rule in (
                ("local SGD", "average"),
                ("EASGD", "elastic"),
                ("DiLoCo", "outer"),
            )
            for every in (4, 16, 64)
        ),
        # AdamW without an outer optimizer shows which of the two determines DiLoCo's result.
        System(VARIANTS, "local AdamW", "average by adamw", 16, "torus2d", "local AdamW"),
        System(VARIANTS, "local SGD in 16 bits", "average", 16, "alltoall:float16", "auto:fp16"),
        System(
            VARIANTS, "local SGD by top 1 %", "average", 16, "hitopk:0.01", "hitopk:0.01:float16"
        ),
    )
}
KINDS = list(dict.fromkeys(system.kind for system in SYSTEMS.values()))
NEAR = 0.5
"""Largest difference from all-reduce that counts as near, in percentage points."""
EPOCHS = {"digits": 8, "drawn images": 6, "drawn images, longer": 24}
"""Data sets, and their numbers of epochs of 64 steps."""
LABELS = {
    "digits": "digits",
    "drawn images": "synthetic images",
    "drawn images, longer": "synthetic images, longer",
    "alike": "IID",
    "own classes": "non-IID",
}
"""Labels of data sets and shares, whose names are keys of stored results."""
TIMED_EPOCHS = 4
SEEDS_OF_A_JOB = {"digits": 10, "drawn images": 5, "drawn images, longer": 5}
"""Largest number of seeds per job."""
COMMON = {
    "parts": ["accuracy", "time"],
    "data": ["digits", "drawn images"],
    "shares": ["alike", "own classes"],
    "kinds": KINDS,
    "layout": LAYOUT,
    "scale": 1.0,
    "epochs": None,
}
FULL = COMMON | {"seeds": list(range(10))}
SHORT = COMMON | {"seeds": [0, 1, 2], "data": ["digits"], "kinds": [EACH_STEP, "local SGD"]}
SMALLEST = COMMON | {
    "parts": ["accuracy"],
    "seeds": [0, 1],
    "data": ["digits"],
    "shares": ["own classes"],
    "kinds": [EACH_STEP],
    "layout": "2x1",
    "scale": 0.02,
    "epochs": 1,
}


def parse_arguments():
    parser = harness.argument_parser("local_accuracy", __doc__)
    parser.add_argument("--parts", nargs="*", choices=COMMON["parts"], help="parts to measure")
    parser.add_argument("--data", nargs="*", choices=EPOCHS, help="data sets")
    parser.add_argument(
        "--shares",
        nargs="*",
        choices=COMMON["shares"],
        help="IID (alike) or non-IID samples (own classes)",
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="kinds of systems")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights and order")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per part, data set, kind of shares, kind of systems and group of seeds."""
    more = {"layout": options.layout, "scale": options.scale}
    accuracy = [
        {"part": "accuracy", "kind": kind, "data": data, "shares": shares}
        | {"seeds": options.seeds[first : first + count], "epochs": options.epochs or EPOCHS[data]}
        for data in options.data
        for count in [SEEDS_OF_A_JOB[data]]
        for first in range(0, len(options.seeds), count)
        for shares in options.shares
        for kind in options.kinds
    ]
    time = [
        {"part": "time", "kind": kind, "data": data, "shares": "alike"}
        | {"seeds": [0], "epochs": options.epochs or TIMED_EPOCHS}
        # Step times do not depend on the length of training.
        for data in options.data
        if "longer" not in data
        for kind in options.kinds
    ]
    jobs = [job | more for job in (*accuracy, *time) if job["part"] in options.parts]
    return harness.keyed(jobs)


def run(part, kind, data, shares, seeds, epochs, layout, scale):
    """Trains with all systems of a kind and from all seeds, or times their steps."""
    systems = {
        name: {"rule": system.rule, "every": system.every, "scheme": system.scheme}
        for name, system in SYSTEMS.items()
        if system.kind == kind
    }
    task = {"part": part, "data": data, "shares": shares, "seeds": seeds, "epochs": epochs}
    task |= {"scale": scale, "systems": systems}
    rate = RATE if part == "time" else "unshaped"
    about = {"part": part, "kind": kind, "data": data, "shares": shares}
    return harness.in_lab(harness.cluster(layout, rate), "local_accuracy", task) | about


class Outcome:
    """Outcome of a system, over all seeds.

    Attributes:
      curves: Test accuracy in percent after each epoch, by seed.
      steps: Steps until the end.
      rounds: Synchronizations until the end.
      sent_bytes: Bytes that a rank sent in these synchronizations.
      step_s: Seconds of a step at 200 Mb/s; `None` if steps were not timed.
    """

    def __init__(self, step_s):
        self.curves, self.step_s = {}, step_s

    def add(self, seeds, figures):
        """Adds the results of a job."""
        curves = 100 * np.array(figures["accuracies"])
        self.curves |= dict(zip(seeds, curves, strict=True))
        self.steps, self.rounds = figures["steps"][-1], figures["rounds"][-1]
        self.sent_bytes = self.rounds * figures["round_bytes"]

    def mean(self, part=1.0):
        """Returns the mean accuracy after a share of the training."""
        return np.mean([curve[round(part * len(curve)) - 1] for curve in self.curves.values()])

    def beside(self, other):
        """Returns the final difference from another outcome in points, for each common seed."""
        seeds = self.curves.keys() & other.curves.keys()
        return np.array([self.curves[seed][-1] - other.curves[seed][-1] for seed in seeds])


def outcomes(cells):
    """Returns outcomes by data set and kind of shares, and by system."""
    step_s, found = {}, {}
    # Process times first, and accuracies in the order of their seeds.
    for cell in sorted(
        cells.values(), key=lambda cell: (cell["part"] != "time", cell["task"]["seeds"])
    ):
        data, shares, seeds = cell["data"], cell["shares"], cell["task"]["seeds"]
        for name, figure in cell["systems"].items():
            if cell["part"] == "time":
                for like in (data, f"{data}, longer"):
                    step_s[like, name] = statistics.median(figure["step_s"])
                continue
            systems = found.setdefault((data, shares), {})
            systems.setdefault(name, Outcome(step_s.get((data, name)))).add(seeds, figure)
    return {
        (data, shares): {name: own[name] for name in SYSTEMS if name in own}
        for data in EPOCHS
        for shares in COMMON["shares"]
        if BASE in (own := found.get((data, shares), {}))
    }


def interval(differences):
    """Returns mean, and half the width of its 95 % interval (Student's t).

    >>> mean, half = interval(np.array([1.0, 2.0, 3.0]))
    >>> round(float(mean), 2), round(float(half), 2)
    (2.0, 2.48)
    """
    # Imported here, because each rank imports this module as well.
    from scipy import stats

    count = len(differences)
    error = np.std(differences, ddof=1) / np.sqrt(count)
    return np.mean(differences), stats.t.ppf(0.975, count - 1) * error


def between(differences):
    """Returns mean and 95 % interval as text."""
    mean, half = interval(differences)
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def judged(differences):
    """Returns whether a system is at most `NEAR` points below all-reduce, by interval or mean."""
    mean, half = interval(differences)
    if mean - half >= -NEAR:
        return "yes"
    if mean + half < -NEAR:
        return "no"
    return "by its mean" if mean >= -NEAR else "not by its mean"


HEADER = (
    "system",
    "exchanges",
    "kB sent per rank",
    "of all-reduce",
    "after half and all steps, %",
    "difference from all-reduce, points",
    f"within {NEAR:g} points",
    "difference from all-reduce by AdamW",
    f"step at {figures.rate(RATE)}",
    "all steps",
)


def show(cells):
    """Prints a table per data set and kind of shares."""
    for (data, shares), systems in outcomes(cells).items():
        base = systems[BASE]
        print(
            f"\n{LABELS[data]}, {LABELS[shares]}; {len(base.curves)} seeds, {base.steps} "
            "steps; test accuracy of the global weights, in brackets 95 % intervals of differences"
        )
        rows = [row(name, own, base, systems.get(LIKE_BASE)) for name, own in systems.items()]
        harness.show([HEADER, *rows])


def row(name, own, base, like):
    """Returns the table row of a system.

    Args:
      name: Name of the system.
      own: Outcome of the system.
      base: Outcome of all-reduce.
      like: Outcome of all-reduce with AdamW, or `None`.
    """
    differences, with_adamw = own.beside(base), SYSTEMS[name].rule in LOCAL_BY_ADAMW
    return (
        name,
        f"{own.rounds}",
        f"{own.sent_bytes / 1e3:,.0f}",
        f"1/{base.sent_bytes / own.sent_bytes:.0f}",
        " ".join(f"{own.mean(part):.2f}" for part in (0.5, 1.0)),
        "" if own is base else between(differences),
        "" if own is base else judged(differences),
        between(own.beside(like)) if with_adamw and like else "",
        "" if own.step_s is None else f"{1e3 * own.step_s:.1f} ms",
        "" if own.step_s is None else f"{own.step_s * own.steps:.1f} s",
    )


PLACES = {"local SGD": 0.9, "EASGD": 1.0, "DiLoCo": 1.11}
"""Factors that shift methods with equal bytes, so that their intervals do not overlap."""
POINTS = (-80, -40, -20, -10, -5, -2, -1, -NEAR, 0, NEAR, 1, 2, 5)
MEGABYTES = (0.02, 0.1, 0.5, 2, 10, 50)
"""Ticks of the axes."""


def plot(cells, path):
    """Plots the difference from all-reduce over the bytes that a rank sends, a panel per table."""
    panels = outcomes(cells)

    def draw(figure, axes):
        for axis, (kind, systems) in zip(axes, panels.items(), strict=True):
            draw_panel(axis, kind, systems)
        methods = {system.method for system in SYSTEMS.values()}
        title = (
            "lines: sync_every 64, 16 and 4 from left to right; bars: 95 % intervals of mean "
            f"differences;\nband: within {NEAR:g} points of all-reduce; dotted: 1/16 of its bytes"
        )
        figures.legend(figure, columns=4, more=methods, title=title)

    figures.save(path, len(panels), draw, height_in=3.3)


def draw_panel(axis, kind, systems):
    """Plots the systems of a data set and kind of shares."""
    base, lowest = systems[BASE], -1.0
    axis.axhspan(-NEAR, NEAR, color=figures.style("allreduce").color, alpha=0.2, linewidth=0)
    axis.axhline(0, color=figures.style("allreduce").color, linewidth=1.4)
    axis.axvline(base.sent_bytes / 16e6, **figures.REFERENCE)
    for method in dict.fromkeys(SYSTEMS[name].method for name in systems):
        own = [systems[name] for name in systems if SYSTEMS[name].method == method]
        look = next(system.look for system in SYSTEMS.values() if system.method == method)
        sent = [PLACES.get(method, 1.0) * one.sent_bytes / 1e6 for one in own]
        found = [interval(one.beside(base)) for one in own]
        means, halves = zip(*found, strict=True)
        lowest = min(lowest, *(mean - half for mean, half in found))
        style = figures.line(look) | {"label": method, "linewidth": 1.3}
        axis.errorbar(sent, means, None if method == BASE else halves, **style, capsize=2.5)
    axis.set_xscale("log")
    axis.set_xticks(MEGABYTES, [f"{size:g}" for size in MEGABYTES])
    axis.set_xticks([], minor=True)
    axis.set_yscale("symlog", linthresh=1, linscale=0.8)
    axis.set_yticks(POINTS, [f"{points:g}" for points in POINTS])
    axis.set_yticks([], minor=True)
    data, shares = kind
    axis.set(
        title=f"{LABELS[data]}, {LABELS[shares]}: all-reduce {base.mean():.1f} %",
        xlabel="MB sent per rank in training",
        ylabel="difference from all-reduce, points",
        xlim=(base.sent_bytes / 400e6, base.sent_bytes / 0.7e6),
        ylim=(1.3 * lowest, 2),
    )
    axis.grid(axis="y")


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
