"""Poseidon's figures again, on emulated accelerators.

Speed-up over nodes (Figs. 5 and 6) and over bandwidth (Fig. 8), the share of time that ranks stand still (Fig. 7), and
what each node sends and receives (Fig. 10).

    python -m benchmarks.poseidon            # short: one model on 2 and 4 ranks
    python -m benchmarks.poseidon --full     # the papers' bandwidths on up to 16 ranks

"ps-late" exchanges after the backward pass, "ps" during it (WFBP), "ps-adam" sends factors to one server a layer;
"horovod" is Horovod's own all-reduce. Times, links and sizes are scaled as in benchmarks.scaling. An interrupted run
goes on where it was.
"""

import argparse

from benchmarks import harness, scaling
from tfposeidon.units import readable_size

SYSTEMS = ("ps-late", "ps", "hybcomm", "horovod")
# What the figures and section 5 tell, on 16 nodes: model, Gb/s, system -> speed-up.
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
COMMON = {"dilation": 8.0, "steps": 3}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser, "poseidon")
    parser.add_argument("--models", nargs="*", choices=SLOWER, help="which of the models")
    parser.add_argument("--nodes", nargs="*", type=int, help="how many, of one rank each")
    return harness.parse(
        parser,
        {"models": ["vgg19_22k"], "nodes": [4, 2], "bandwidths": 1} | COMMON,
        {"models": list(SLOWER), "nodes": [16, 8, 4, 2], "bandwidths": 3} | COMMON,
        {"models": ["googlenet"], "nodes": [2], "bandwidths": 0, "dilation": 0.2, "steps": 1},
    )


def planned(options):
    """Jobs, the largest clusters first: all at 40 Gb/s, fewer Gb/s on the most nodes, 4 x 4 ranks, traffic."""
    most = max(options.nodes)
    cases = [(model, f"{nodes}x1", FAST) for nodes in options.nodes for model in options.models]
    cases += [
        (m, f"{most}x1", gbit) for m in options.models for gbit in SLOWER[m][: options.bandwidths]
    ]
    cases += [(model, "4x4", FAST) for model in options.models] if options.full else []
    common = {"worker": "keras_fit", "dilation": options.dilation, "steps": options.steps}
    jobs = [
        {"model": m, "layout": layout, "gbit": g, "systems": list(SYSTEMS)} | common
        for m, layout, g in cases
    ]
    return harness.keyed([*jobs, TRAFFIC | common] if options.full else jobs)


def speedups(cells):
    """(model, Gb/s, layout) -> system -> speed-up over one rank that exchanges nothing."""
    found = {}
    for (model, layout, gbit, _), rows in scaling.groups(cells).items():
        nodes, per_node = map(int, layout.split("x"))
        ranks = nodes * per_node
        found[model, gbit, layout] = {
            r["system"]: ranks * r["efficiency"] for r in rows if "step_s" in r
        }
    return found


def show(cells):
    """Speed-ups, beside the paper's where it tells them, the shares of time that ranks stand still, and traffic."""
    print(
        "\nspeed-up over one rank alone; in brackets the share of time that the ranks stand still, on average"
    )
    rows = [("model", "Gb/s", "ranks", *SYSTEMS, "paper")]
    stalled = {
        (model, gbit, layout, row["system"]): sum(row["stalled"]) / len(row["stalled"])
        for (model, layout, gbit, _), rows in scaling.groups(cells).items()
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
            f"{system}: a node sends {readable_size(min(sent))} to {readable_size(max(sent))} a step, and receives "
            f"{readable_size(min(received))} to {readable_size(max(received))}"
        )


def _order(item):
    (model, gbit, layout), _ = item
    nodes, per_node = map(int, layout.split("x"))
    return model, per_node, nodes, gbit


def traffic(cells):
    """System -> bytes that each node sends and receives a step, in the size of the shrunk model."""
    cell = next((c for c in cells.values() if c["task"]["systems"] == TRAFFIC["systems"]), None)
    return (
        {}
        if cell is None
        else {name: figures["node_bytes"] for name, figures in cell["systems"].items()}
    )


def plot(cells, path):
    """Speed-up over nodes and over bandwidth, a panel for each model, and the traffic of each node."""
    found = speedups(cells)
    names = sorted({model for model, *_ in found})
    sent = traffic(cells)

    def draw(axes):
        for axis, model in zip(axes, names, strict=False):
            _draw_nodes(axis, model, found)
        for axis, model in zip(axes[len(names) :], names, strict=False):
            _draw_bandwidth(axis, model, found)
        if sent:
            _draw_traffic(axes[-1], sent)

    harness.plot(path, 2 * len(names) + bool(sent), draw)


def _draw_nodes(axis, model, found):
    for system in SYSTEMS:
        points = [(int(layout[:-2]), v[system]) for (m, g, layout), v in found.items()
                  if (m, g) == (model, FAST) and layout.endswith("x1") and system in v]  # fmt: skip
        axis.plot(
            *zip((1, 1), *sorted(points), strict=True), marker="o", markersize=4, label=system
        )
    axis.plot((1, 16), (1, 16), color="grey", linestyle=":", label="linear")
    axis.set(title=f"{model}, {FAST:g} Gb/s", xlabel="nodes", ylabel="speed-up")
    axis.legend(fontsize=7)


def _draw_bandwidth(axis, model, found):
    most = max(int(layout[:-2]) for m, _, layout in found if m == model and layout.endswith("x1"))
    for number, system in enumerate(SYSTEMS):
        points = [(g, v[system]) for (m, g, layout), v in found.items()
                  if (m, layout) == (model, f"{most}x1") and system in v]  # fmt: skip
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            markersize=4,
            color=f"C{number}",
            label=system,
        )
        paper = [
            (g, v) for (m, g, s), v in PAPER.items() if (m, s) == (model, system) and most == 16
        ]
        if paper:
            axis.plot(
                *zip(*paper, strict=True),
                marker="x",
                linestyle="",
                color=f"C{number}",
                label=f"{system}, paper",
            )
    axis.axhline(most, color="grey", linestyle=":")
    axis.set(title=f"{model}, {most} nodes", xlabel="Gb/s", ylim=(0, most * 1.05))


def _draw_traffic(axis, sent):
    for number, (system, nodes) in enumerate(sent.items()):
        places = [node + 0.27 * number for node in range(len(nodes))]
        axis.bar(places, [sum(node) / 1e6 for node in nodes], 0.25, label=system)
    axis.set(
        title=f"{TRAFFIC['model']} on {TRAFFIC['layout']} ranks",
        xlabel="node",
        ylabel="MB sent and received",
    )


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), scaling.run, show, plot)


if __name__ == "__main__":
    main()
