"""Measures what local updates cost in accuracy, by the bytes that they send, beside all-reduce.

    python -m benchmarks.local_accuracy                       # short: digits, three seeds
    python -m benchmarks.local_accuracy --full                # all of it; an hour
    python -m benchmarks.local_accuracy --full --parts time   # of it the time of steps at 200 Mb/s

Four ranks, each a node of its own, train an MLP on scikit-learn's digits, and a CNN with batch
normalization on drawn images (examples/data/draw_shapes.py); samples of the ranks are alike, or
each rank has classes of its own. Under a seed all systems begin with the same weights and see the
same samples in the same order, so that differences are those of pairs. Bytes are those of the plan.
Accuracies, which do not depend on links, are measured without a limit on them, and times of steps
at 200 Mb/s by themselves. An interrupted run goes on.
"""

import statistics
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks import figures, harness

RATE, LAYOUT = "200mbit", "4x1"


class System(NamedTuple):
    """What is trained by.

    Attributes:
      kind: Name of all systems that one job measures.
      method: Name of all systems that differ in `every` alone.
      rule: Rule of the worker.
      every: Steps between exchanges.
      scheme: Scheme of an exchange.
      look: System of `figures` whose look it has.
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
EACH_STEP, COMPRESSED = "in each step", "compressed"
SYSTEMS = {
    system.name: system
    for system in (
        System(EACH_STEP, BASE, "sgd", 1, "allreduce", "allreduce"),
        System(EACH_STEP, LIKE_BASE, "adamw", 1, "allreduce", "allreduce:float16"),
        System(EACH_STEP, "top 1 %", "sgd", 1, "hitopk:0.01", "hitopk:0.01"),
        *(
            System(method, method, rule, every, "2dtar", method)
            for method, rule in (
                ("local SGD", "average"),
                ("EASGD", "elastic"),
                ("DiLoCo", "outer"),
            )
            for every in (4, 16, 64)
        ),
        System(COMPRESSED, "local SGD in 16 bits", "average", 16, "asa16", "asa16"),
        System(COMPRESSED, "local SGD by top 1 %", "average", 16, "hitopk:0.01", "hitopk:0.001"),
    )
}
KINDS = list(dict.fromkeys(system.kind for system in SYSTEMS.values()))
NEAR = 0.5
"""Points below all-reduce that are near it."""
EPOCHS = {"digits": 8, "drawn images": 6}
"""Times that 64 steps are trained."""
TIMED_EPOCHS = 4
COMMON = {
    "parts": ["accuracy", "time"],
    "data": list(EPOCHS),
    "shares": ["alike", "own classes"],
    "kinds": KINDS,
    "layout": LAYOUT,
    "scale": 1.0,
    "epochs": None,
}
FULL = COMMON | {"seeds": list(range(10))}
SHORT = COMMON | {"seeds": [0, 1, 2], "data": ["digits"], "kinds": [EACH_STEP, "local SGD"]}
SMALLEST = COMMON | {
    "seeds": [0, 1],
    "data": ["drawn images"],
    "shares": ["own classes"],
    "kinds": [EACH_STEP, "DiLoCo"],
    "layout": "2x1",
    "scale": 0.02,
    "epochs": 2,
}


def parse_arguments():
    parser = harness.argument_parser("local_accuracy", __doc__)
    parser.add_argument("--parts", nargs="*", choices=COMMON["parts"], help="what to measure")
    parser.add_argument("--data", nargs="*", choices=EPOCHS, help="what to train on")
    parser.add_argument("--shares", nargs="*", choices=COMMON["shares"], help="samples of a rank")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="how to train")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights and order")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job for each part, kind of systems, data set and shares, with all seeds in it."""
    more = {"layout": options.layout, "scale": options.scale}
    accuracy = [
        {"part": "accuracy", "kind": kind, "data": data, "shares": shares}
        | {"seeds": options.seeds, "epochs": options.epochs or EPOCHS[data]}
        for kind in options.kinds
        for data in options.data
        for shares in options.shares
    ]
    time = [
        {"part": "time", "kind": kind, "data": data, "shares": "alike"}
        | {"seeds": [0], "epochs": options.epochs or TIMED_EPOCHS}
        for kind in options.kinds
        for data in options.data
    ]
    jobs = [job | more for job in (*accuracy, *time) if job["part"] in options.parts]
    return harness.keyed(jobs)


def run(part, kind, data, shares, seeds, epochs, layout, scale):
    """Trains by all systems of a kind, from all seeds; or times their steps."""
    systems = {
        name: {"rule": system.rule, "every": system.every, "scheme": system.scheme}
        for name, system in SYSTEMS.items()
        if system.kind == kind
    }
    task = {"part": part, "data": data, "shares": shares, "seeds": seeds, "epochs": epochs}
    task |= {"scale": scale, "systems": systems}
    rate = RATE if part == "time" else "unshaped"
    about = {"part": part, "kind": kind, "data": data, "shares": shares, "layout": layout}
    return harness.in_lab(harness.cluster(layout, rate), "local_accuracy", task) | about


class Outcome(NamedTuple):
    """What a system has come to.

    Attributes:
      accuracies: Test accuracy at the end in percent, one for each seed.
      rounds: Exchanges until then.
      sent_bytes: Bytes that a rank has sent in them.
      steps: Steps until then.
      step_s: Seconds of a step over slow links; `None` if that was not measured.
    """

    accuracies: np.ndarray
    rounds: int
    sent_bytes: float
    steps: int
    step_s: float | None


def outcomes(cells):
    """Returns outcomes by data set and kind of shares, and those by system."""
    step_s, found = {}, {}
    for cell in cells.values():
        for name, figure in cell["systems"].items():
            if cell["part"] == "time":
                step_s[cell["data"], name] = statistics.median(figure["step_s"])
    for cell in cells.values():
        if cell["part"] != "accuracy":
            continue
        for name, figure in cell["systems"].items():
            found.setdefault((cell["data"], cell["shares"]), {})[name] = Outcome(
                accuracies=100 * np.array(figure["accuracies"])[:, -1],
                rounds=figure["rounds"][-1],
                sent_bytes=figure["rounds"][-1] * figure["round_bytes"],
                steps=figure["steps"][-1],
                step_s=step_s.get((cell["data"], name)),
            )
    return {
        kind: {name: own[name] for name in SYSTEMS if name in own} for kind, own in found.items()
    }


def interval(differences):
    """Returns mean, and half the width of its 95 % interval (Student's t).

    >>> mean, half = interval(np.array([1.0, 2.0, 3.0]))
    >>> round(float(mean), 2), round(float(half), 2)
    (2.0, 2.48)
    """
    count = len(differences)
    error = np.std(differences, ddof=1) / np.sqrt(count)
    return np.mean(differences), stats.t.ppf(0.975, count - 1) * error


def between(differences):
    """Returns mean and 95 % interval as text."""
    mean, half = interval(differences)
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def judged(differences):
    """Returns whether a system is near all-reduce: where the interval says so, or its mean does."""
    mean, half = interval(differences)
    if abs(mean) == half == 0 or mean - half >= -NEAR:
        return "yes"
    if mean + half < -NEAR:
        return "no"
    return "yes by its mean" if mean >= -NEAR else "no by its mean"


def show(cells):
    """Prints a table for each data set and kind of shares."""
    for (data, shares), systems in outcomes(cells).items():
        base = systems.get(BASE)
        if base is None:
            continue
        print(
            f"\n{data}, shares of the ranks: {shares}; {len(base.accuracies)} seeds, "
            f"{base.steps} steps; accuracy of the centre on test samples; in brackets 95 %"
        )
        header = ("system", "exchanges", "kB a rank sends", "of all-reduce", "accuracy, %")
        header += ("points from all-reduce", f"within {NEAR:g} points")
        rows = [(*header, "from the like by AdamW", "a step at 200 Mb/s", "all steps")]
        rows += [row(name, own, base, systems.get(LIKE_BASE)) for name, own in systems.items()]
        harness.show(rows)


def row(name, own, base, like):
    """Returns the cells of a system's row.

    Args:
      name: Name of the system.
      own: Its outcome.
      base: That of all-reduce.
      like: That of all-reduce by AdamW, or `None`.
    """
    differences = own.accuracies - base.accuracies
    is_base, by_adamw = own is base, SYSTEMS[name].rule == "outer" and like is not None
    return (
        name,
        f"{own.rounds}",
        f"{own.sent_bytes / 1e3:,.0f}",
        f"1/{base.sent_bytes / own.sent_bytes:.0f}",
        f"{own.accuracies.mean():.2f}",
        "" if is_base else between(differences),
        "" if is_base else judged(differences),
        between(own.accuracies - like.accuracies) if by_adamw else "",
        "" if own.step_s is None else f"{1e3 * own.step_s:.1f} ms",
        "" if own.step_s is None else f"{own.step_s * own.steps:.1f} s",
    )


PLACES = {"local SGD": 0.93, "EASGD": 1.0, "DiLoCo": 1.075}
"""Factors on the bytes of methods that send as many, so that all of their intervals are seen."""


def plot(cells, path):
    """Saves points from all-reduce over the bytes that a rank sends, a panel for each table."""
    panels = {kind: systems for kind, systems in outcomes(cells).items() if BASE in systems}

    def draw(figure, axes):
        for axis, (kind, systems) in zip(axes, panels.items(), strict=True):
            draw_panel(axis, kind, systems)
        methods = {system.method for system in SYSTEMS.values()}
        title = (
            "lines: every 64, 16 and 4 steps from left to right; bars: 95 % of the difference of "
            "pairs; green band: within 0.5 points"
        )
        figures.legend(figure, columns=4, more=methods, title=title)

    figures.save(path, len(panels), draw, height_in=3.3)


def draw_panel(axis, kind, systems):
    """Draws the systems of a data set and kind of shares."""
    base = systems[BASE]
    axis.axhspan(-NEAR, NEAR, color="#6abf8b", alpha=0.18, linewidth=0)
    axis.axhline(0, color=figures.style("allreduce").color, linewidth=1.4)
    axis.axvline(base.sent_bytes / 16e3, **figures.REFERENCE)
    for method in dict.fromkeys(SYSTEMS[name].method for name in systems):
        own = [systems[name] for name in systems if SYSTEMS[name].method == method]
        found = [interval(one.accuracies - base.accuracies) for one in own]
        look = next(system.look for system in SYSTEMS.values() if system.method == method)
        axis.errorbar(
            [PLACES.get(method, 1.0) * one.sent_bytes / 1e3 for one in own],
            [mean for mean, _ in found],
            [half for _, half in found],
            **figures.line(look) | {"label": method, "linewidth": 1.4},
            elinewidth=1.4,
            capsize=2.5,
        )
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=2)
    axis.set(
        title=f"{', '.join(kind)}: all-reduce has {base.accuracies.mean():.1f} %",
        xlabel="kB that a rank sends in training",
        ylabel="points from all-reduce",
    )
    axis.grid(axis="y")


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
