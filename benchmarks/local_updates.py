"""Measures the cost of `LocalUpdates` per step on a slow network, and bytes per synchronization.

    python -m benchmarks.local_updates          # short: 2 x 2 ranks
    python -m benchmarks.local_updates --full   # 2 x 2 and 4 x 1 ranks; ten minutes

The model has the 25.6 million parameters of ResNet-50; steps sleep for their compute time. The cost
of communication is the mean time of a step, minus that of a step without exchange. An
interrupted run resumes.
"""

from benchmarks import figures, harness

RATE = "200mbit"
EVERY_STEP = "every step"
"""Replaces the number of steps for systems that exchange gradients at every step."""
SYSTEMS = {
    # Scheme, steps between synchronizations, overlap in steps, compute seconds of a step.
    "all-reduce in each step": ("allreduce", EVERY_STEP, 0, 0.0),
    "weights every 32 steps": ("allreduce", 32, 0, 0.0),
    "weights every 32, by 2D torus": ("torus2d", 32, 0, 0.0),
    "weights every 32, 31 steps late": ("torus2d", 32, 31, 0.3),
    "top 1 % of weights every 16": ("hitopk:0.01", 16, 0, 0.0),
}
LOOKS = dict(
    zip(
        SYSTEMS,
        ("allreduce", "allreduce:float16", "torus2d", "torus2d:float16", "hitopk:0.01"),
        strict=True,
    )
)
COMMON = {"systems": list(SYSTEMS), "model": "resnet50", "shrink": 1, "rounds": 2, "rate": RATE}
SHORT = COMMON | {"layouts": ["2x2"]}
FULL = COMMON | {"layouts": ["2x2", "4x1"]}
SMALLEST = COMMON | {
    "systems": ["weights every 32, by 2D torus"],
    "layouts": ["2x1"],
    "model": "alexnet",
    "shrink": 64,
    "rounds": 1,
}


def parse_arguments():
    parser = harness.argument_parser("local_updates", __doc__)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, help="systems to compare")
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    parser.add_argument("--rate", help=f"rate between nodes ({RATE})")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per layout and system."""
    return harness.keyed(
        {
            "layout": layout,
            "system": system,
            "rate": options.rate,
            "model": options.model,
            "shrink": options.shrink,
            "rounds": options.rounds,
        }
        for layout in options.layouts
        for system in options.systems
    )


def run(layout, system, rate, model, shrink, rounds):
    """Measures one system."""
    scheme, every, delay, compute_s = SYSTEMS[system]
    task = {"systems": [system], "model": model, "shrink": shrink, "scheme": scheme}
    task |= {"every": every, "delay": delay, "compute_s": compute_s, "rounds": rounds, "steps": 16}
    about = {"layout": layout, "system": system, "rate": rate}
    return harness.in_lab(harness.cluster(layout, rate), "local_updates", task) | about


def cost_s(cell):
    """Returns the seconds that communication adds to a step."""
    (found,) = cell["systems"].values()
    return found["mean_step_s"] - found["alone_s"]


def by_layout(cells):
    """Returns answers by layout and system."""
    found = {}
    for cell in cells.values():
        found.setdefault(cell["layout"], {})[cell["system"]] = cell
    return found


def show(cells):
    """Prints a line per layout and system."""
    header = ("ranks", "system", "step without it", "communication", "x steps / all-reduce")
    rows = [(*header, "sent per synchronization, MB", "planned, MB")]
    for layout, systems in by_layout(cells).items():
        dense = systems.get(next(iter(SYSTEMS)))
        for system, cell in systems.items():
            (found,) = cell["systems"].values()
            every = SYSTEMS[system][1]
            share = ""
            if dense and every != EVERY_STEP:
                share = f"{cost_s(cell) / (cost_s(dense) / every):.2f}"
            rows.append(
                (
                    figures.ranks(layout),
                    system,
                    f"{1e3 * found['alone_s']:.0f} ms",
                    f"{1e3 * cost_s(cell):.1f} ms",
                    share,
                    f"{found['sent_per_round'] / 1e6:.2f}",
                    f"{found['planned_per_round'] / 1e6:.2f}",
                )
            )
    harness.show(rows)


def plot(cells, path):
    """Plots the time that communication adds to a step, as a bar per system."""
    layouts = by_layout(cells)

    def draw(figure, axes):
        for axis, (layout, systems) in zip(axes, layouts.items(), strict=True):
            names = [system for system in SYSTEMS if system in systems]
            for height, system in enumerate(names):
                cost_ms = 1e3 * max(cost_s(systems[system]), 1e-4)
                axis.barh(height, cost_ms, height=0.7, **figures.bar(LOOKS[system]))
                axis.annotate(
                    f"{1e3 * cost_s(systems[system]):,.1f}",
                    (cost_ms, height),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                )
            axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
            axis.set(
                xscale="log",
                xlim=(0.1, 5e4),
                ylim=(len(names) - 0.4, -0.6),
                title=figures.ranks(layout),
                xlabel="milliseconds that communication adds to a step",
            )

    figures.save(path, len(layouts), draw, height_in=2.6)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
