"""Time and steps to a fixed accuracy on real data: scikit-learn's digits on 4 ranks, with slow links.

    python -m benchmarks.accuracy                # short: two schemes, one seed
    python -m benchmarks.accuracy --full         # all dense schemes, three seeds
    python -m benchmarks.accuracy --sparse       # sparse ones beside the all-reduce, always all epochs
    python -m benchmarks.accuracy --one-bit      # one bit for each gradient beside exact schemes (Poseidon, Fig. 11)

Every scheme trains the same CNN from the same seeds until validation accuracy is reached, or for so many epochs.
"""

import argparse
import statistics

from benchmarks import harness

FULL = {
    "systems": ["allreduce", "allreduce:float16", "asa", "asa16", "2dtar", "2dtar:bfloat16"],
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
SHORT = {"systems": ["allreduce", "asa16"], "seeds": [0]}
SMALLEST = {"systems": ["allreduce", "hitopk:0.1"], "seeds": [0], "layout": "2x1", "epochs": 1}
RATE = "100mbit"
TARGET, EPOCHS = 0.98, 30
COMMON = {"layout": "2x2", "epochs": EPOCHS}
# Ranks of one node would sum before they send bits.
ONE_BIT |= {"layout": "4x1"}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser, "accuracy")
    parser.add_argument("--systems", nargs="*", help="schemes")
    parser.add_argument("--seeds", nargs="*", type=int, help="of weights and batches")
    parser.add_argument(
        "--target", type=float, default=TARGET, help=f"validation accuracy to reach ({TARGET})"
    )
    parser.add_argument("--sparse", action="store_true", help="convergence of sparse schemes")
    parser.add_argument(
        "--one-bit", action="store_true", help="convergence with one bit for each gradient"
    )
    others = {"sparse": COMMON | SPARSE, "one_bit": COMMON | ONE_BIT}
    return harness.parse(parser, COMMON | SHORT, COMMON | FULL, SMALLEST, others)


def planned(options):
    """One job for each seed, with all schemes in it."""
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
    """Medians over seeds, with the lowest and the highest."""
    found = {}
    for cell in cells.values():
        for system, figures in cell["systems"].items():
            found.setdefault(system, []).append(figures)
    print(f"\nscikit-learn's digits on 4 ranks, {RATE} between nodes")
    header = ("scheme", "seeds", "reached", "steps", "seconds", "best accuracy", "last accuracy")
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
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def plot(cells, path):
    """Validation accuracy over training time, and loss and error over iterations; one line for each run."""
    # Results from before losses were noted have one panel.
    everything = all("losses" in run for cell in cells.values() for run in cell["systems"].values())

    def draw(axes):
        _draw(
            axes[0],
            cells,
            lambda run: (run["seconds"], [100 * accuracy for accuracy in run["accuracies"]]),
        )
        axes[0].set(xlabel="seconds of training", ylabel="validation accuracy, %", ylim=(80, 100))
        if not everything:
            return
        _draw(axes[1], cells, lambda run: (run["iterations"], run["losses"]))
        _draw(
            axes[2],
            cells,
            lambda run: (run["iterations"], [1 - accuracy for accuracy in run["accuracies"]]),
        )
        axes[1].set(xlabel="iterations", ylabel="training loss, mean of an epoch", yscale="log")
        axes[2].set(xlabel="iterations", ylabel="validation error", yscale="log")

    harness.plot(path, 3 if everything else 1, draw)


def _draw(axis, cells, points):
    systems = list(dict.fromkeys(system for cell in cells.values() for system in cell["systems"]))
    for place, cell in enumerate(cells.values()):
        for system, run in cell["systems"].items():
            style = {
                "label": system if place == 0 else None,
                "color": f"C{systems.index(system)}",
                "linewidth": 1,
            }
            axis.plot(*points(run), **style)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
