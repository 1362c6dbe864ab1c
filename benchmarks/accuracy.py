"""Measures time and steps to a fixed accuracy: scikit-learn's digits, 4 ranks, slow network.

    python -m benchmarks.accuracy             # short: two schemes, one seed
    python -m benchmarks.accuracy --full      # all dense schemes, three seeds; 5 minutes
    python -m benchmarks.accuracy --sparse    # sparse schemes and all-reduce; 16 minutes
    python -m benchmarks.accuracy --one-bit   # one-bit and exact gradients

Every scheme trains the same CNN from the same seeds until it reaches the validation accuracy, for
at most 30 epochs. With `--sparse` and `--one-bit` (Poseidon, Fig. 11), it trains for all 30 epochs.
An interrupted run resumes.
"""

import statistics

import numpy as np

from benchmarks import figures, harness

FULL = {
    "systems": [
        "allreduce",
        "allreduce:float16",
        "alltoall",
        "alltoall:float16",
        "torus2d",
        "torus2d:bfloat16",
    ],
    "seeds": [0, 1, 2],
}
SPARSE = {
    "systems": [
        "allreduce",
        *(
            f"hitopk:{density}:{method}"
            for density in (0.01, 0.001)
            for method in ("exact", "mstopk")
        ),
    ],
    "seeds": [0, 1, 2],
}
ONE_BIT = {"systems": ["allreduce", "hybcomm", "onebit"], "seeds": [0, 1, 2]}
SHORT = {"systems": ["allreduce", "alltoall:float16"], "seeds": [0]}
SMALLEST = {"systems": ["allreduce", "hitopk:0.1"], "seeds": [0], "layout": "2x1", "epochs": 1}
RATE = "100mbit"
TARGET, EPOCHS = 0.98, 30
COMMON = {"layout": "2x2", "epochs": EPOCHS}
# Use one rank per node, because ranks of a node would sum their gradients before they send bits.
ONE_BIT |= {"layout": "4x1"}


def parse_arguments():
    parser = harness.argument_parser("accuracy", __doc__)
    parser.add_argument(
        "--systems", nargs="*", help="schemes with options, such as hitopk:0.01:exact"
    )
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights and batches")
    parser.add_argument(
        "--target", type=float, default=TARGET, help=f"validation accuracy to reach ({TARGET})"
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="compare the convergence of sparse schemes and all-reduce",
    )
    parser.add_argument(
        "--one-bit",
        action="store_true",
        help="compare the convergence of one-bit and exact gradients",
    )
    others = {"sparse": COMMON | SPARSE, "one_bit": COMMON | ONE_BIT}
    return harness.parse(parser, COMMON | SHORT, COMMON | FULL, SMALLEST, others)


def planned(options):
    """Returns one job per seed, which measures all schemes."""
    common = {"systems": options.systems, "target": options.target, "layout": options.layout}
    common |= {} if options.epochs == EPOCHS else {"epochs": options.epochs}
    common["goes_on"] = options.sparse or options.one_bit
    return harness.keyed(common | {"seed": seed} for seed in options.seeds)


def run(systems, target, layout, goes_on, seed, epochs=EPOCHS):
    task = {
        "systems": systems,
        "target": target,
        "goes_on": goes_on,
        "seed": seed,
        "epochs": epochs,
    }
    return harness.in_lab(harness.cluster(layout, RATE), "accuracy", task) | {"seed": seed}


def show(cells):
    """Prints steps, seconds and accuracy of each scheme: median, minimum and maximum over seeds."""
    found = runs_of(cells)
    print(f"\nscikit-learn's digits on 4 ranks, {RATE} between nodes")
    header = ("scheme", "seeds", "reached", "steps", "seconds", "best accuracy", "final accuracy")
    harness.show([header, *(cells_of(system, runs) for system, runs in found.items())])


def cells_of(system, runs):
    reached = [run for run in runs if run["reached_steps"] is not None]
    return (
        system,
        str(len(runs)),
        str(len(reached)),
        spread([run["reached_steps"] for run in reached], "{:.0f}"),
        spread([run["reached_s"] for run in reached], "{:.1f}"),
        spread([max(run["accuracies"]) for run in runs], "{:.2%}"),
        spread([run["accuracies"][-1] for run in runs], "{:.2%}"),
    )


def spread(values, form):
    if not values:
        return "never"
    median, low, high = (
        form.format(figure) for figure in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} to {high})"


def plot(cells, path):
    """Plots curves over epochs, or the time and steps to the target, depending on the runs.

    Curves require that all runs train to the last epoch. Runs that stop at the target differ in
    length, and their length is the result.
    """
    found = runs_of(cells)
    if all(cell.get("task", {}).get("goes_on") for cell in cells.values()):
        plot_curves(found, path)
    else:
        targets = {cell.get("task", {}).get("target", TARGET) for cell in cells.values()}
        plot_needed(found, path, max(targets))


def runs_of(cells):
    """Returns the runs of each system, one per seed."""
    found = {}
    for cell in cells.values():
        for system, run in cell["systems"].items():
            found.setdefault(system, []).append(run)
    return found


def plot_needed(found, path, target):
    """Plots seconds and steps to the target: the median as a bar, and each seed as a point."""

    def draw(_, axes):
        needs = {"reached_s": f"seconds to {target:.0%}", "reached_steps": f"steps to {target:.0%}"}
        for axis, (what, label) in zip(axes, needs.items(), strict=True):
            values = {
                system: [run[what] for run in runs if run[what] is not None]
                for system, runs in found.items()
            }
            medians = {
                system: statistics.median(own) if own else None for system, own in values.items()
            }
            figures.bars(axis, medians, form="", names=axis is axes[0], limit=limit(values))
            for index, own in enumerate(values.values()):
                axis.plot(own, [index] * len(own), "o", color="black", markersize=5)
            axis.set_xlabel(f"{label} (bar: median, points: seeds)")

    figures.save(path, 2, draw, height_in=1.2 + 0.32 * len(found))


def limit(values):
    """Returns the largest value of all runs, or 1 if none reached the target."""
    return max((value for own in values.values() for value in own), default=1)


CURVES = {
    "accuracies": (
        "validation accuracy, %",
        lambda accuracy: 100 * accuracy,
        {"ylim": (80, 100.5)},
    ),
    "errors": ("validation error, %", lambda error: 100 * error, {"yscale": "log"}),
    "losses": ("training loss", lambda loss: loss, {"yscale": "log"}),
}
"""Label, value and axis of each panel, for runs of all epochs."""


CURVE = {"marker": "", "linewidth": 2.4}
ON_TOP = {"marker": "D", "linewidth": 1.0, "markersize": 3.5, "markevery": 2, "zorder": 3}
"""Style of the curve of exact selection, which stays visible if it equals that of MSTopK."""


def plot_curves(found, path):
    """Plots accuracy, error and loss over epochs: mean and range over seeds."""
    # Older results contain no losses, so omit their panel.
    noted = all("losses" in run for runs in found.values() for run in runs)
    names = [name for name in CURVES if noted or name != "losses"]

    def draw(figure, axes):
        for axis, name in zip(axes, names, strict=True):
            label, value, options = CURVES[name]
            for system, runs in found.items():
                curves = np.array([list(map(value, curve(run, name))) for run in runs])
                epochs = runs[0].get("iterations", range(1, curves.shape[1] + 1))
                style = figures.line(system) | CURVE
                if system.endswith(":exact"):
                    style |= ON_TOP
                axis.plot(epochs, curves.mean(0), **style)
                axis.fill_between(
                    epochs,
                    curves.min(0),
                    curves.max(0),
                    color=style["color"],
                    alpha=0.13,
                    linewidth=0,
                )
            axis.set(xlabel="steps" if noted else "epoch", ylabel=label, **options)
            if name == "errors":
                axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(axis="y")
        title = "lines: mean of the seeds; bands: their range"
        figures.legend(figure, columns=3, title=title)

    figures.save(path, len(names), draw, columns=3, height_in=3.4)


def curve(run, name):
    """Returns one value per epoch of a run."""
    if name == "errors":
        return [1 - accuracy for accuracy in run["accuracies"]]
    return run[name]


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
