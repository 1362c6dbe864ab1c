"""Compares step time, exposed communication, stalls and scaling efficiency with other frameworks.

    python -m benchmarks.scaling            # short: ResNet-50 on 2 x 2 ranks, one bandwidth
    python -m benchmarks.scaling --full     # two models, 4 and 8 ranks, three bandwidths; 2 hours
    python -m benchmarks.scaling --models vgg19 --layouts 4x4 --gbits 25 --systems torus2d hitopk
    python -m benchmarks.scaling --gbits 25 --flow-gbit 5   # a limit per connection, as in clouds

Accelerators are emulated: compute takes the papers' times, dilated (computation and network are D
times slower; D is 4, or 1 up to 1 Gb/s, where the network alone makes steps long). A model that
does not fit into memory is shrunk by f, and bandwidth by f squared. Bandwidths are those of the
real cluster. Other frameworks are Horovod called directly, PyTorch DDP, Keras on JAX with
`keras.distribution` and MultiWorkerMirroredStrategy. An interrupted run resumes.
"""

import importlib.util
import itertools
import math
import statistics
from typing import NamedTuple

from benchmarks import architectures, figures, harness

SYSTEMS = ("alone", "allreduce", "alltoall", "alltoall:float16", "torus2d", "torus2d:float16")
PEERS = ("horovod", "horovod-fp16", "ddp", "ddp-fp16", "ddp-powersgd", "jax", "mirrored-packs")
# PowerSGD sends whole gradients in its first two steps.
WARM_UP = {"keras_fit": 2, "ddp": 3, "mirrored": 2, "jax_fit": 2}
DILATION = 4.0
SLOW_GBIT = 1.0
"""Bandwidth up to which the default dilation is 1."""
SHRINK = {
    "alexnet": 8,
    "googlenet": 4,
    "resnet50": 2,
    "resnet50_96": 2,
    "vgg19": 4,
    "vgg19_32": 8,
    "vgg19_22k": 8,
    "transformer_110m": 4,
    "gpt2": 4,
    "resnet152": 2,
}
SHORT = {"models": ["resnet50"], "layouts": ["2x2"], "gbits": [10.0]}
COMMON = {"systems": [*SYSTEMS, *PEERS], "steps": 3}
SMALLEST = {
    "models": ["alexnet"],
    "layouts": ["2x1"],
    "gbits": [10.0],
    # `benchmarks.auto`, `cold_starts` and `overview` use these values, too, and need `auto`.
    "systems": ["alone", "allreduce", "horovod", "auto"],
    "dilation": 0.2,
    "steps": 1,
}
FULL = {"models": ["vgg19", "resnet50"], "layouts": ["2x2", "4x2"], "gbits": [25.0, 10.0, 4.0]}


class Case(NamedTuple):
    """Configuration in which systems are compared.

    Attributes:
      model: Name of the emulated model.
      layout: "MxN", nodes x ranks on each.
      gbit: Bandwidth between real nodes, in Gb/s.
      dilation: Factor on all times.
      flow_gbit: Limit of each connection between real nodes, in Gb/s; `None` for no limit.
      uneven: Factor on the compute times of rank 0.
    """

    model: str
    layout: str
    gbit: float
    dilation: float
    flow_gbit: float | None = None
    uneven: float = 1.0

    @property
    def network(self):
        """Bandwidth between nodes, as tables and titles show it."""
        limit = "" if self.flow_gbit is None else f", {self.flow_gbit:g} per connection"
        slower = "" if self.uneven == 1.0 else f", rank 0 takes {self.uneven:g} times as long"
        return f"{self.gbit:g} Gb/s{limit}{slower}"


def parse_arguments():
    parser = harness.argument_parser("scaling", __doc__)
    parser.add_argument(
        "--models", nargs="*", choices=architectures.MODELS, help="models of the papers"
    )
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    parser.add_argument(
        "--gbits", nargs="*", type=float, help="bandwidths between real nodes, in Gb/s"
    )
    parser.add_argument("--flow-gbit", type=float, help="limit of each connection, in Gb/s (none)")
    parser.add_argument(
        "--systems",
        nargs="*",
        help="schemes with options, such as hitopk:0.01, and other frameworks",
    )
    parser.add_argument(
        "--dilation",
        type=float,
        help=f"factor on all times ({DILATION:g}; up to {SLOW_GBIT:g} Gb/s 1)",
    )
    parser.add_argument("--steps", type=int, help="timed steps of each system (3)")
    options = harness.parse(parser, COMMON | SHORT, COMMON | FULL, SMALLEST)
    options.systems = without_missing_peers(options.systems)
    return options


def without_missing_peers(systems):
    """Returns the installed systems, and prints how to install the others."""
    missing = []
    if not importlib.util.find_spec("torch"):
        print("Skipped PyTorch DDP: PyTorch is missing. Run: pip install torch==2.13.0")
        missing.append("ddp")
    if not harness.JAX.exists():
        print(f"Skipped Keras on JAX: its environment is missing. Run: {harness.JAX_REMEDY}")
        missing.append("jax")
    return [system for system in systems if system.partition("-")[0] not in missing]


def planned(options):
    """Returns one job per model, layout, bandwidth and worker."""
    programs = harness.by_worker(options.systems, "keras_fit").items()
    cases = itertools.product(options.models, options.layouts, options.gbits, programs)
    # Add `flow_gbit` only if it is set, so that keys of stored results stay valid.
    flow = {"flow_gbit": options.flow_gbit} if options.flow_gbit else {}
    return harness.keyed(
        {"model": model, "layout": layout, "gbit": gbit, "worker": worker, "systems": systems}
        | {"dilation": options.dilation or dilation_at(gbit), "steps": options.steps}
        | flow
        | ({"uneven": options.uneven} if getattr(options, "uneven", None) else {})
        for model, layout, gbit, (worker, systems) in cases
    )


def dilation_at(gbit):
    """Returns the default dilation for a bandwidth."""
    return 1.0 if gbit <= SLOW_GBIT else DILATION


def run(
    model, layout, gbit, worker, systems, dilation, steps, flow_gbit=None, uneven=1.0, late=False
):
    """Measures systems on one model, at a bandwidth scaled by dilation and shrinking.

    With `late`, the steps of all schemes are those of the epoch in which `auto` is measured,
    because steps of later epochs take a few percent longer.
    """
    shrink = SHRINK.get(model, 1)
    slower = dilation * shrink**2
    rate = gbit * 1e9 / slower
    task = {
        "model": model,
        "shrink": shrink,
        "dilation": dilation,
        "systems": systems,
        "steps": steps,
        "uneven": uneven,
        "late": late,
    }
    task["warm_up"] = WARM_UP[worker]
    options = harness.cluster(layout, f"{rate / 1e3:.0f}kbit")
    about = {"model": model, "layout": layout, "gbit": gbit, "rate_bits_per_s": rate}
    if flow_gbit:
        options += f" --flow {flow_gbit * 1e6 / slower:.0f}kbit"
        about["flow_gbit"] = flow_gbit
    return harness.in_lab(options, worker, task) | about


def groups(cells):
    """Returns rows of systems by case.

    Args:
      cells: Answers by key; if two jobs measured a system, the later one is used.

    Returns:
      `Case` -> one row per system, fastest first.
    """
    found = {}
    for cell in cells.values():
        rows = found.setdefault(group(cell), {})
        rows |= {system: row(system, figures, cell) for system, figures in cell["systems"].items()}
    return {
        key: sorted(rows.values(), key=lambda r: r.get("step_s", math.inf))
        for key, rows in found.items()
    }


def group(cell):
    """Returns the `Case` of an answer."""
    task = cell["task"]
    return Case(
        *(cell["model"], cell["layout"], cell["gbit"], task["dilation"], cell.get("flow_gbit")),
        task.get("uneven", 1.0),
    )


def row(system, figures, cell):
    """Returns the table row of a system.

    Args:
      system: Name of the scheme or of another framework.
      figures: Measured times and bytes of the system, or an error.
      cell: Answer of the job that measured the system.

    Returns:
      Dilated seconds of a step on the slowest rank, exposed and ideal seconds, the share of time in
      which each rank's accelerator is stalled, and efficiency; or the last line of the error.
    """
    if "error" in figures:
        return {"system": system, "error": figures["error"].strip().splitlines()[-1]}
    task = cell["task"]
    slower = task["dilation"] * task.get("uneven", 1.0)
    compute_s = slower * architectures.model(task["model"]).step_s
    step_s = statistics.median(figures["step_s"])
    ranks = [statistics.median(times) for times in zip(*figures["ranks_s"], strict=True)]
    wire_s = 8 * figures["sent_bytes"] / cell["rate_bits_per_s"]
    return {
        "system": system,
        "step_s": step_s,
        "exposed_s": max(0.0, step_s - compute_s),
        "stalled": [max(0.0, 1 - compute_s / rank_s) for rank_s in ranks],
        "efficiency": min(1.0, compute_s / step_s),
        "wire_s": wire_s,
        # The forward pass is a third of the computation; communication can overlap with the rest.
        "ideal_s": max(compute_s, compute_s / 3 + wire_s),
    }


def show(cells):
    """Prints a table per case, with times of the real cluster (measured times / D)."""
    for case, rows in groups(cells).items():
        cell = next(c for c in cells.values() if group(c) == case)
        task, dilation = cell["task"], case.dilation
        megabits = cell["rate_bits_per_s"] / 1e6
        shrunk = f", shrunk by {task['shrink']:g}" if task["shrink"] != 1 else ""
        step_ms = 1e3 * architectures.model(case.model).step_s
        print(
            f"\n{case.model}{shrunk}, {case.layout} ranks, {case.network}, compute "
            f"{step_ms:.0f} ms, {harness.emulated({case: cell})}; "
            f"measured {dilation:g} times as slow, with links of {megabits:.0f} Mb/s"
        )
        header = (
            "system",
            "step",
            "exposed",
            "ranks stalled",
            "efficiency",
            "bytes / link",
            "ideal step",
        )
        harness.show([header, *(cells_of(row, dilation) for row in rows)])


def cells_of(row, dilation):
    def milliseconds(name):
        return f"{1e3 * row[name] / dilation:.0f} ms"

    if "error" in row:
        return (row["system"], "failed", "", "", "", "", row["error"])
    return (
        row["system"],
        milliseconds("step_s"),
        milliseconds("exposed_s"),
        f"{min(row['stalled']):.0%} to {max(row['stalled']):.0%}",
        f"{row['efficiency']:.0%}",
        milliseconds("wire_s"),
        milliseconds("ideal_s"),
    )


def plot(cells, path):
    """Plots scaling efficiency over bandwidth, one panel for each model and layout.

    A last panel of bars shows the systems that were measured at a single bandwidth.
    """
    found = groups(cells)
    points = {panel: lines(found, panel) for panel in dict.fromkeys(key[:2] for key in found)}
    over_bandwidth = {
        panel: systems
        for panel, systems in points.items()
        if len({gbit for own in systems.values() for gbit, _ in own}) > 1
    }
    alone = {key: rows for key, rows in found.items() if key[:2] not in over_bandwidth}

    def draw(figure, axes):
        for axis, (panel, systems) in zip(axes, over_bandwidth.items(), strict=False):
            draw_lines(axis, panel, systems)
        if alone:
            draw_bars(axes[-1], alone)
        figures.legend(figure)

    panels = len(over_bandwidth) + bool(alone)
    figures.save(path, panels, draw, height_in=3.6 if panels < 3 else 3.0)


def lines(found, panel):
    """Returns points of bandwidth and efficiency in percent, by system.

    Systems without communication have an efficiency of 100 % by definition, and are omitted.

    Args:
      found: Rows by case, from `groups`.
      panel: Model and layout.
    """
    points = {}
    for case, rows in found.items():
        for row in rows if case[:2] == panel and case.flow_gbit is None else ():
            if "step_s" in row and row["system"] != "alone":
                points.setdefault(row["system"], []).append((case.gbit, 100 * row["efficiency"]))
    return points


def draw_lines(axis, panel, systems):
    """Plots a line per system over bandwidth."""
    for system in figures.in_order(systems):
        axis.plot(*zip(*sorted(systems[system]), strict=True), **figures.line(system))
    bandwidths = sorted({gbit for points in systems.values() for gbit, _ in points})
    model, layout = panel
    axis.set(
        title=f"{figures.MODELS.get(model, model)}, {figures.ranks(layout)}",
        xlabel="bandwidth between nodes, Gb/s",
        ylabel="scaling efficiency, %",
        xscale="log",
        ylim=(0, 105),
    )
    axis.set_xticks(bandwidths, [f"{gbit:g}" for gbit in bandwidths])
    axis.minorticks_off()
    axis.grid(axis="y")


def draw_bars(axis, found):
    """Plots a group of bars per model, for the first dilation of each."""
    cases = {key[:3]: rows for key, rows in reversed(found.items())}
    cases = dict(reversed(cases.items()))
    systems = figures.in_order(
        {row["system"] for rows in cases.values() for row in rows if "step_s" in row} - {"alone"}
    )
    width = 0.8 / max(1, len(systems))
    for index, system in enumerate(systems):
        own = [
            next(
                (100 * r["efficiency"] for r in rows if r["system"] == system and "step_s" in r), 0
            )
            for rows in cases.values()
        ]
        centers = [group + width * (index - (len(systems) - 1) / 2) for group in range(len(own))]
        label = figures.style(system).label
        drawn = axis.bar(centers, own, 0.92 * width, label=label, **figures.bar(system))
        if len(systems) < 6:
            axis.bar_label(drawn, fmt="%.0f", padding=2, fontsize=9)
    names = [figures.MODELS.get(model, model) for model, *_ in cases]
    about = sorted({f"{figures.ranks(layout)}, {gbit:g} Gb/s" for _, layout, gbit in cases})
    axis.set_xticks(range(len(names)), names)
    axis.set(title="; ".join(about), ylabel="scaling efficiency, %", ylim=(0, 108))
    axis.grid(axis="y")


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
