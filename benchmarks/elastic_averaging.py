"""Measures elastic averaging with a server: step rates with a slow worker, and accuracy.

    python -m benchmarks.elastic_averaging          # short: three seeds
    python -m benchmarks.elastic_averaging --full   # five seeds; 18 minutes

Step rate: eight workers, of which one takes four times as long for a step, exchange a million
values with a server; each worker's rate is compared with its rate without exchanges. The eight
workers also train synchronously. Accuracy, after Theano-MPI's comparison: four workers train an MLP
on scikit-learn's digits, synchronously (BSP) and by elastic averaging, with several values of alpha
and several numbers of steps between exchanges. Accuracies depend on the order of the workers'
exchanges, so runs differ. An interrupted run resumes.
"""

import statistics

import numpy as np

from benchmarks import figures, harness
from benchmarks.local_accuracy import between, interval

TOGETHER, ASYNCHRONOUS = "synchronous all-reduce", "elastic averaging"
BSP = "BSP"
ALPHAS, TAUS = (0.1, 0.225, 0.5), (1, 2, 4)
"""Values of alpha (0.225 is the default, 0.9 over four workers), and steps between exchanges."""
PACES = {TOGETHER: {"every": None}, ASYNCHRONOUS: {"every": 4}}
RUNS = {BSP: {"every": None, "alpha": None}} | {
    f"alpha {alpha:g}, every {tau}": {"every": tau, "alpha": alpha}
    for alpha in ALPHAS
    for tau in TAUS
}
COMMON = {
    "parts": ["pace", "accuracy"],
    "paces": list(PACES),
    "workers": 8,
    "learners": 4,
    "compute_s": 0.2,
    "steps": 96,
    "length": 1_000_000,
    "rate": "1gbit",
    "epochs": 8,
    "runs": list(RUNS),
}
FULL = COMMON | {"seeds": list(range(5))}
SHORT = COMMON | {"seeds": [0, 1, 2]}
SMALLEST = COMMON | {
    "parts": ["pace"],
    "paces": [ASYNCHRONOUS],
    "seeds": [0, 1],
    "workers": 2,
    "learners": 2,
    "compute_s": 0.01,
    "steps": 8,
    "length": 1000,
    "epochs": 1,
    "runs": [BSP, "alpha 0.225, every 1"],
}
SLOWNESS = 4


def parse_arguments():
    parser = harness.argument_parser("elastic_averaging", __doc__)
    parser.add_argument("--parts", nargs="*", choices=COMMON["parts"], help="parts to measure")
    parser.add_argument("--runs", nargs="*", choices=RUNS, help="runs to train")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights and order")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns two jobs per part: one with a server, and one without."""
    pace = {"compute_s": options.compute_s, "steps": options.steps, "length": options.length}
    jobs = [
        {"part": "pace", "system": system, "workers": options.workers, "rate": options.rate} | pace
        for system in options.paces
    ]
    jobs += [
        {"part": "accuracy", "system": system, "workers": options.learners, "rate": "unshaped"}
        | {"seeds": options.seeds, "epochs": options.epochs, "runs": options.runs}
        for system in (BSP, ASYNCHRONOUS)
    ]
    return harness.keyed(job for job in jobs if job["part"] in options.parts)


def run(part, system, workers, rate, **options):
    """Measures the step rates of workers, or the accuracy."""
    if part == "pace":
        systems = {system: PACES[system]}
        options |= {"slowness": SLOWNESS}
    else:
        names = [name for name in options.pop("runs") if (name == BSP) == (system == BSP)]
        systems = {name: RUNS[name] for name in names}
    # One node per rank; the server is an additional rank.
    ranks = workers + (system == ASYNCHRONOUS)
    task = {"part": part, "systems": systems} | options
    about = {"part": part, "system": system, "workers": workers}
    return harness.in_lab(harness.cluster(f"{ranks}x1", rate), "elastic_averaging", task) | about


def paces(cells):
    """Returns step rates of fast and slow workers by system, relative to those without exchange."""
    found = {}
    for cell in cells.values():
        if cell["part"] == "pace":
            ((name, figure),) = cell["systems"].items()
            # The server takes no steps.
            own = [rank["alone_s"] / rank["step_s"] for rank in figure["ranks"] if rank]
            found[name] = own[:-1], own[-1]
    return {name: found[name] for name in PACES if name in found}


def accuracies(cells):
    """Returns the accuracies of each run in percent, as an array over seeds."""
    found = {}
    for cell in cells.values():
        if cell["part"] == "accuracy":
            found |= {n: 100 * np.array(f["accuracies"]) for n, f in cell["systems"].items()}
    return {name: found[name] for name in RUNS if name in found}


def show(cells):
    """Prints a table per part."""
    rows = [("eight workers, one slow", "fast workers: median", "lowest", "slow worker")]
    for name, (fast, slow) in paces(cells).items():
        values = (statistics.median(fast), min(fast), slow)
        rows.append((name, *(f"{100 * value:.1f} %" for value in values)))
    if len(rows) > 1:
        print("\nstep rate of a worker, relative to its rate without exchanges")
        harness.show(rows)
    found = accuracies(cells)
    if BSP not in found:
        return
    print(f"\nscikit-learn's digits, {len(found[BSP])} seeds; in brackets: 95 % intervals")
    rows = [("system", "accuracy of the global weights, %", "difference from BSP, points")]
    for name, own in found.items():
        difference = "" if name == BSP else between(own - found[BSP])
        rows.append((name, f"{own.mean():.2f}", difference))
    harness.show(rows)


COLORS = dict(zip(TAUS, ("#0072b2", "#d55e00", "#7d4fd6"), strict=True))


def plot(cells, path):
    """Plots step rates of workers, and accuracy relative to BSP over alpha."""
    by_part = [part for part in COMMON["parts"] if part in {c["part"] for c in cells.values()}]
    draws = {"pace": _draw_paces, "accuracy": _draw_accuracies}

    def draw(figure, axes):
        for axis, part in zip(axes, by_part, strict=True):
            draws[part](axis, cells)

    figures.save(path, len(by_part), draw, height_in=3.0)


def _draw_paces(axis, cells):
    for height, (_, (fast, slow)) in enumerate(paces(cells).items()):
        label = (lambda text: text) if height == 0 else (lambda text: None)
        shifted = height + np.linspace(-0.12, 0.12, len(fast))
        axis.plot(100 * np.array(fast), shifted, "o", color="#0072b2", label=label("fast workers"))
        axis.plot([100 * slow], [height], "s", color="#d55e00", label=label("slow worker"))
    axis.axvline(95, **figures.REFERENCE)
    names = list(paces(cells))
    axis.set_yticks(range(len(names)), names)
    axis.set(
        xlim=(0, 110),
        ylim=(len(names) - 0.4, -0.6),
        title="one of eight workers is four times as slow",
        xlabel="step rate, % of the rate without exchanges",
    )
    axis.legend(loc="center left")


def _draw_accuracies(axis, cells):
    found = accuracies(cells)
    if BSP not in found:
        return
    axis.axhline(0, color=figures.style("allreduce").color, linewidth=1.4, label="BSP")
    for place, (tau, color) in enumerate(COLORS.items()):
        names = {alpha: f"alpha {alpha:g}, every {tau}" for alpha in ALPHAS}
        own = {a: interval(found[n] - found[BSP]) for a, n in names.items() if n in found}
        axis.errorbar(
            [alpha * (0.96 + 0.04 * place) for alpha in own],
            [mean for mean, _ in own.values()],
            [half for _, half in own.values()],
            color=color,
            marker="o",
            capsize=2.5,
            label=f"every {tau}",
        )
    axis.set_xscale("log")
    axis.set_xticks(ALPHAS, [f"{alpha:g}" for alpha in ALPHAS])
    axis.minorticks_off()
    axis.set(
        title=f"digits, four workers: BSP has {found[BSP].mean():.1f} %",
        xlabel="alpha",
        ylabel="difference from BSP, points",
    )
    # Leave space for the legend above the bars.
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.2 * (high - low))
    axis.legend(loc="upper center", ncols=4, handlelength=1.2, columnspacing=1.0)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
