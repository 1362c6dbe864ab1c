"""Reproduces the figures of the Poseidon paper, on emulated accelerators.

    python -m benchmarks.poseidon            # short: one model on 2 and 4 ranks
    python -m benchmarks.poseidon --full     # the paper's bandwidths on up to 16 ranks; 2.5 hours

The figures show speed-up over nodes (Figs. 5 and 6) and over bandwidth (Fig. 8), the share of time
that ranks are stalled (Fig. 7), and bytes that each node sends and receives (Fig. 10). "ps-late"
sends after the backward pass, "ps" during it (WFBP), "ps-adam" sends factors to one server per
layer; "horovod" is Horovod's own all-reduce. Times, bandwidths and sizes are scaled as in
benchmarks.scaling. An interrupted run resumes.
"""

import statistics

from benchmarks import figures, harness, scaling
from tfposeidon.text import readable_size

SYSTEMS = ("ps-late", "ps", "hybcomm", "horovod")
# Values of the figures and of section 5, on 16 nodes: model, Gb/s, system -> speed-up.
PAPER = {
    ("googlenet", 10, "hybcomm"): 16,
    ("vgg19_32", 10, "ps-late"): 8,
    ("vgg19_32", 10, "hybcomm"): 16,
    ("vgg19_22k", 10, "ps-late"): 4,
    ("vgg19_22k", 10, "hybcomm"): 16,
    ("vgg19_22k", 40, "ps-late"): 8,
}
FAST = 40.0
SLOWER = {
    "googlenet": (2.0, 5.0, 10.0),
    "vgg19_32": (10.0, 20.0, 30.0),
    "vgg19_22k": (10.0, 20.0, 30.0),
}
TRAFFIC = {
    "model": "vgg19_32",
    "layout": "8x1",
    "gbit": FAST,
    "systems": ["ps", "ps-adam", "hybcomm"],
}
COMMON = {"systems": SYSTEMS, "dilation": 8.0, "steps": 3}


def parse_arguments():
    parser = harness.argument_parser("poseidon", __doc__)
    parser.add_argument("--models", nargs="*", choices=SLOWER, help="models of the paper")
    parser.add_argument("--nodes", nargs="*", type=int, help="numbers of nodes, of one rank each")
    return harness.parse(
        parser,
        {"models": ["vgg19_22k"], "nodes": [4, 2], "bandwidths": 1} | COMMON,
        {"models": list(SLOWER), "nodes": [16, 8, 4, 2], "bandwidths": 3} | COMMON,
        {"models": ["vgg19_32"], "nodes": [2], "bandwidths": 0}
        | {"systems": ["ps-late", "hybcomm"], "dilation": 0.2, "steps": 1},
    )


def planned(options):
    """Returns the jobs, the largest clusters first.

    All models run at 40 Gb/s, and at lower bandwidths on the most nodes; with `--full` also on 4 x
    4 ranks, and once more for the traffic of each node.
    """
    most = max(options.nodes)
    cases = [(model, f"{nodes}x1", FAST) for nodes in options.nodes for model in options.models]
    cases += [
        (m, f"{most}x1", gbit) for m in options.models for gbit in SLOWER[m][: options.bandwidths]
    ]
    cases += [(model, "4x4", FAST) for model in options.models] if options.full else []
    common = {"worker": "keras_fit", "dilation": options.dilation, "steps": options.steps}
    jobs = [
        {"model": m, "layout": layout, "gbit": g, "systems": list(options.systems)} | common
        for m, layout, g in cases
    ]
    return harness.keyed([*jobs, TRAFFIC | common] if options.full else jobs)


def speedups(cells):
    """Returns speed-ups over one rank that exchanges nothing.

    Args:
      cells: Answers by key.

    Returns:
      (model, Gb/s, layout) -> system -> speed-up.
    """
    found = {}
    for case, rows in scaling.groups(cells).items():
        nodes, per_node = map(int, case.layout.split("x"))
        ranks = nodes * per_node
        found[case.model, case.gbit, case.layout] = {
            r["system"]: ranks * r["efficiency"] for r in rows if "step_s" in r
        }
    return found


def show(cells):
    """Prints measured and published speed-ups, the share of stalled time, and traffic."""
    print(
        f"\nspeed-up over one rank, {harness.emulated(cells)}; "
        "in brackets: mean share of time in which ranks are stalled"
    )
    rows = [("model", "Gb/s", "ranks", *SYSTEMS, "paper")]
    stalled = {
        (case.model, case.gbit, case.layout, row["system"]): statistics.mean(row["stalled"])
        for case, rows in scaling.groups(cells).items()
        for row in rows
        if "step_s" in row
    }
    for (model, gbit, layout), found in sorted(speedups(cells).items(), key=_order):
        texts = [
            f"{found[system]:.1f} ({stalled[model, gbit, layout, system]:.0%})"
            if system in found
            else ""
            for system in SYSTEMS
        ]
        paper = [
            f"{s} {PAPER[model, gbit, s]}"
            for s in SYSTEMS
            if (model, gbit, s) in PAPER and layout == "16x1"
        ]
        rows.append((model, f"{gbit:g}", layout, *texts, ", ".join(paper)))
    harness.show(rows)
    for system, nodes in traffic(cells).items():
        sent, received = ([node[way] for node in nodes] for way in (0, 1))
        print(
            f"{system}: a node sends {readable_size(min(sent))} to {readable_size(max(sent))} a "
            f"step, and receives {readable_size(min(received))} to {readable_size(max(received))}"
        )


def _order(item):
    (model, gbit, layout), _ = item
    nodes, per_node = map(int, layout.split("x"))
    return model, per_node, nodes, gbit


def traffic(cells):
    """Returns bytes that each node sends and receives per step of the scaled-down model."""
    cell = next((c for c in cells.values() if c["task"]["systems"] == TRAFFIC["systems"]), None)
    return (
        {}
        if cell is None
        else {name: measured["node_bytes"] for name, measured in cell["systems"].items()}
    )


def plot(cells, path):
    """Plots speed-up over nodes and over bandwidth, a column of panels for each model.

    A second figure, whose name ends with "_traffic", shows the traffic of each node.
    """
    found = speedups(cells)
    names = [model for model in SLOWER if any(model == key[0] for key in found)]

    def draw(figure, axes):
        for axis, model in zip(axes[: len(names)], names, strict=True):
            draw_nodes(axis, model, found)
        for axis, model in zip(axes[len(names) :], names, strict=True):
            draw_bandwidth(axis, model, found)
        title = "bold: tfposeidon; dashed: other frameworks; rings and crosses: covered lines"
        figures.legend(figure, title=title)

    figures.save(path, 2 * len(names), draw, columns=len(names), height_in=3.2)
    if sent := traffic(cells):
        beside = path.with_stem(f"{path.stem}_traffic")
        figures.save(
            beside, 1, lambda figure, axes: draw_traffic(figure, axes[0], sent), height_in=3.6
        )


def line(system):
    """Returns a line style of a system with which overlapping lines stay visible.

    Points of the parameter server are rings around those of HybComm, and Horovod's line is dashed
    and on top.
    """
    own = {
        "ps": {"fillstyle": "none", "markersize": 10, "markeredgewidth": 2},
        "horovod": {"zorder": 3, "marker": "x", "markersize": 8, "markeredgewidth": 1.8},
    }
    return figures.line(system) | own.get(system, {})


def draw_nodes(axis, model, found):
    """Plots speed-up over the number of nodes, at the highest bandwidth."""
    for system in figures.in_order(SYSTEMS):
        points = [
            (int(layout.removesuffix("x1")), own[system])
            for (name, gbit, layout), own in found.items()
            if (name, gbit) == (model, FAST) and layout.endswith("x1") and system in own
        ]
        axis.plot(*zip((1, 1), *sorted(points), strict=True), **line(system))
    axis.plot((1, 16), (1, 16), label="linear", **figures.REFERENCE)
    axis.set(
        title=f"{figures.MODELS[model]}, {FAST:g} Gb/s",
        xlabel="nodes",
        ylabel="speed-up",
        xticks=(1, 2, 4, 8, 16),
        ylim=(0, 17),
        yticks=range(0, 17, 4),
    )
    axis.grid(axis="y")


def draw_bandwidth(axis, model, found):
    """Plots speed-up over bandwidth on the largest cluster, with the values of the paper."""
    most = max(
        int(layout.removesuffix("x1"))
        for name, _, layout in found
        if name == model and layout.endswith("x1")
    )
    for system in figures.in_order(SYSTEMS):
        points = [
            (gbit, own[system])
            for (name, gbit, layout), own in found.items()
            if (name, layout) == (model, f"{most}x1") and system in own
        ]
        axis.plot(*zip(*sorted(points), strict=True), **line(system))
        paper = [
            (gbit, speedup)
            for (name, gbit, of), speedup in PAPER.items()
            if (name, of) == (model, system) and most == 16
        ]
        if paper:
            style = figures.line(system) | {"linestyle": "", "marker": "*", "markersize": 13}
            style |= {"label": f"{figures.style(system).label}: paper"}
            axis.plot(*zip(*paper, strict=True), markeredgecolor="black", **style)
    axis.axhline(most, **figures.REFERENCE)
    axis.set(
        title=f"{figures.MODELS[model]}, {most} nodes",
        xlabel="bandwidth, Gb/s",
        ylabel="speed-up",
        ylim=(0, 1.08 * most),
        yticks=range(0, most + 1, max(1, most // 4)),
        xlim=(0, 1.05 * FAST),
    )
    axis.grid(axis="y")


def draw_traffic(figure, axis, sent):
    """Plots the bytes that each node sends and receives in a step, by scheme."""
    for number, (system, nodes) in enumerate(sent.items()):
        centers = [node + 0.27 * (number - 1) for node in range(len(nodes))]
        out, back = ([node[way] / 1e6 for node in nodes] for way in (0, 1))
        label, style = figures.style(system).label, figures.bar(system)
        axis.bar(centers, out, 0.25, label=f"{label}: sent", **style)
        axis.bar(centers, back, 0.25, bottom=out, alpha=0.45, label=f"{label}: received", **style)
    axis.set(
        title=f"{figures.MODELS[TRAFFIC['model']]}, {figures.ranks(TRAFFIC['layout'])}",
        xlabel="node",
        ylabel="MB per step",
        xticks=range(len(nodes)),
    )
    axis.grid(axis="y")
    figures.legend(figure, columns=3)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), scaling.run, show, plot)


if __name__ == "__main__":
    main()
