"""Compares predicted exchanges and steps with stored measurements; runs no ranks.

    python -m benchmarks.predict                 # the grid in docs/results/exchange_grid.json
    python -m benchmarks.predict --worst 20      # and the largest errors
    python -m benchmarks.predict --steps         # steps of scaling, Poseidon, the README, ...
    python -m benchmarks.predict --constants     # effect of each constant that is not measured

The grid comes from `python -m benchmarks.exchange --full --results
docs/results/exchange_grid.json`. The network profile is fitted, as before the first step of a job,
to the single collectives and the local work of the grid, not to exchanges of schemes. The burst
that the lab's shaper passes is subtracted and the time of a call is added, because all measured
times contain both.

Errors are (predicted - measured) / measured. Exchanges whose measured median has a standard error
above 5 % form a separate group. Then the exchange that `auto` would choose is compared with the
best one and with all-reduce. Nothing is fitted to steps: emulated accelerators have fixed compute
times, and exchanges take the times that the same profile predicts.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks import figures, grid, harness, predict_steps
from benchmarks.baselines import one_bit
from benchmarks.exchanges import factors_named, scheme_named
from tfposeidon.autotune import simulation
from tfposeidon.autotune.search import CLOSE_WITHIN
from tfposeidon.lab.network import BURST_S
from tfposeidon.policies import Auto

GRID = harness.RESULTS / "exchange_grid.json"
LINK_BOUND = 0.8
"""Ratio of the network's limit to a time, above which the network determines this time."""
LARGEST_ERROR = 0.05
"""Relative standard error above which a measured median is uncertain."""


def compared(rows):
    """Yields each exchange of a scheme with its prediction.

    Args:
      rows: Result of `grid.measured`.

    Yields:
      Dictionaries with layout, rate, system, size, measured and predicted seconds, the ratio of the
      network's limit to the measured time, and whether the measured time is accurate.
    """
    links = {}
    for (layout, rate, system, size), row in rows.items():
        if "@" in system:
            continue
        if (layout, rate) not in links:
            links[layout, rate] = grid.links_of(rows, layout, rate)
        known = links[layout, rate]
        if known is None:
            continue
        topology = grid.topology_of(layout)
        yield {
            "layout": layout,
            "rate": rate,
            "system": system,
            "size": size,
            "measured_s": row["time_s"],
            "predicted_s": grid.overhead_s(rows, layout)
            + predicted(system, size, topology, known, 0.0 if rate == "unshaped" else BURST_S),
            "link_share": (row["limit_s"] or 0.0) / row["time_s"],
            "is_known": row["standard_error"] <= LARGEST_ERROR,
        }


def predicted(system, size, topology, links, burst_s=0.0):
    """Returns the predicted seconds of an exchange.

    Args:
      system: Name of the scheme, with options, as in `benchmarks.exchange`.
      size: Number of values, or the shape of a matrix.
      topology: The ranks of the job.
      links: Network profile of the job.
      burst_s: Burst that the shaper passes at once, in seconds at the shaped rate.
    """
    factors = ()
    if "x" in size:
        scheme, shape = factors_named(system, size)
        length, factors = shape.left * shape.right, (shape,)
    else:
        scheme, length = scheme_named(system), int(size)
    times = simulation.stage_times(scheme, length, 4, factors, topology, links)
    if not scheme.loads_evenly:
        times = [alone_in_the_lab(time, topology.size) for time in times]
    free_s = sum(min(burst_s, time.load_s) for time in times if time.crosses_nodes)
    return simulation.simulate([times], [0.0], 0.0, links.collective_s) - free_s


def alone_in_the_lab(time, ranks):
    """Returns the time of a stage in which one rank works and can use the cores of all ranks.

    Speeds are measured while all ranks work, because each rank of a real cluster has its own cores.

    Args:
      time: Time of the stage if all ranks worked.
      ranks: Number of ranks.
    """
    return dataclasses.replace(time, load_s=time.load_s / ranks) if not time.operation else time


def error(row):
    return row["predicted_s"] / row["measured_s"] - 1


def summary(name, rows):
    """Returns a table row: number of rows, quantiles of absolute errors, and median error."""
    errors = [error(row) for row in rows]
    sizes = np.abs(errors)
    return (
        name,
        str(len(rows)),
        f"{np.median(sizes):.1%}",
        f"{np.percentile(sizes, 90):.1%}",
        f"{sizes.max():.0%}",
        f"{statistics.median(errors):+.1%}",
    )


HEADER = ("exchanges", "number", "median", "p90", "worst", "bias")


def is_considered(row):
    """Returns whether `auto` may choose the scheme of a row."""
    system = row["system"].partition(":")[0]
    return system in (
        "allreduce",
        "alltoall",
        "alltoall:float16",
        "torus2d",
        "hitopk",
        "topk",
        "factors",
    )


def show(rows, some, holds):
    """Prints errors of all rows, and of groups of them.

    Args:
      rows: Rows with their predictions.
      some: Name of a group that is hard to predict.
      holds: Function that returns whether a row belongs to this group.
    """
    groups = {"all": lambda row: True, "schemes of auto": is_considered, some: holds}
    for key in ("file", "layout", "rate"):
        if key not in rows[0]:
            continue
        for value in dict.fromkeys(row[key] for row in rows):
            # A file may have the name of a system.
            name = f"{value}.json" if key == "file" else value
            groups[name] = lambda row, key=key, value=value: row[key] == value
    for value in figures.in_order({row["system"] for row in rows}):
        groups[value] = lambda row, value=value: row["system"] == value
    found = {name: [row for row in rows if holds(row)] for name, holds in groups.items()}
    harness.show([HEADER, *(summary(name, own) for name, own in found.items() if own)])


CONSTANTS = {
    # The module of the constant, and a value with which it has no effect.
    "CODED_PER_SELECTED": (one_bit, 1),
    "HALF_PER_SUM": (grid, 1.0),
}
"""Constants of the predictions that no probe measures."""


@contextlib.contextmanager
def changed(name, value):
    """Changes a constant of the predictions within this context."""
    module, _ = CONSTANTS[name]
    before = getattr(module, name)
    try:
        setattr(module, name, value)
        simulation.stage_times.cache_clear()
        yield
    finally:
        setattr(module, name, before)
        simulation.stage_times.cache_clear()


def show_constants(rows):
    """Prints errors with a neutral value of each constant, and with half and twice its value.

    Args:
      rows: Result of `grid.measured`.
    """
    table = [("constant", "value", *HEADER[1:])]
    for name, (module, neutral) in CONSTANTS.items():
        own = getattr(module, name)
        for value in (own, neutral, own / 2, 2 * own):
            with changed(name, value):
                found = [row for row in compared(rows) if row["is_known"]]
            table.append((name, f"{value:g}", *summary("", found)[1:]))
    harness.show(table)


def show_worst(rows, number):
    """Prints the exchanges with the largest errors."""
    worst = sorted(rows, key=lambda row: -abs(error(row)))[:number]
    harness.show(
        [
            ("layout", "rate", "scheme", "size", "measured", "predicted", "error"),
            *(
                (
                    row["layout"],
                    row["rate"],
                    row["system"],
                    row["size"],
                    f"{1e3 * row['measured_s']:.1f} ms",
                    f"{1e3 * row['predicted_s']:.1f} ms",
                    f"{error(row):+.0%}",
                )
                for row in worst
            ),
        ]
    )


CHOICES = {
    "exact": ("allreduce", "alltoall", "torus2d"),
    "with fp16": (
        "allreduce",
        "alltoall",
        "torus2d",
        "allreduce:float16",
        "alltoall:float16",
        "torus2d:float16",
    ),
    "with top 1 %": ("allreduce", "alltoall", "torus2d", "hitopk:0.01", "topk:0.01"),
}
"""Groups of schemes from which `auto` chooses."""


def chosen(options, timed_trials):
    """Returns the system that `auto` chooses.

    Args:
      options: Rows of one exchange by system, including all-reduce.
      timed_trials: True if a timed trial decides between the two best with similar predictions.
    """
    seconds_of = {system: row["predicted_s"] for system, row in options.items()}
    timed = set()
    while True:
        close = sorted(seconds_of, key=seconds_of.get)[:2]
        is_close = seconds_of[close[-1]] <= (1 + CLOSE_WITHIN) * seconds_of[close[0]]
        runners = set(close if is_close else close[:1]) - timed
        if not timed_trials or not runners or (not is_close and not timed):
            break
        timed |= runners
        seconds_of |= {system: options[system]["measured_s"] for system in runners}
    best = min(seconds_of, key=seconds_of.get)
    is_better = seconds_of[best] <= (1 - Auto().margin) * seconds_of["allreduce"]
    return best if is_better else "allreduce"


def considered(systems, layout):
    """Returns the systems that `auto` considers on a layout."""
    nodes, per_node = map(int, layout.split("x"))
    # On nodes of one rank, and on one node, the torus is an all-to-all.
    has_levels = nodes > 1 and per_node > 1
    return [system for system in systems if has_levels or not system.startswith("torus2d")]


def show_choices(rows):
    """Prints how the chosen exchanges compare with the best ones, and with all-reduce.

    Args:
      rows: Rows with their predictions.
    """
    by_cell = {}
    for row in rows:
        key = (row["layout"], row["rate"], row["size"])
        by_cell.setdefault(key, {})[row["system"]] = row
    table = [("allowed", "cases", "trial", "regret", "within 5 %", "slower than all-reduce by 2 %")]
    for name, systems in CHOICES.items():
        cells = [
            {system: cell[system] for system in considered(systems, layout) if system in cell}
            for (layout, *_), cell in by_cell.items()
        ]
        cells = [cell for cell in cells if "allreduce" in cell and len(cell) > 1]
        for timed_trials in (False, True):
            table.append((name, str(len(cells)), *outcome(cells, timed_trials)))
    print()
    harness.show(table)


def outcome(cells, timed_trials):
    """Returns the table row that evaluates the choices in some configurations.

    Args:
      cells: The rows of all candidates, by system, for each configuration.
      timed_trials: True if timed trials decide between similar predictions.
    """
    taken_s = [cell[chosen(cell, timed_trials)]["measured_s"] for cell in cells]
    best_s = [min(row["measured_s"] for row in cell.values()) for cell in cells]
    regrets = np.array(taken_s) / np.array(best_s) - 1
    slower = sum(
        seconds > 1.02 * cell["allreduce"]["measured_s"]
        for cell, seconds in zip(cells, taken_s, strict=True)
    )
    return (
        "yes" if timed_trials else "no",
        f"{regrets.mean():.2%}",
        f"{np.mean(regrets <= 0.05):.0%}",
        str(slower),
    )


def drawn_as(row):
    """Returns the system of a row in plots, where all numbers of batch rows are one system."""
    name = row["system"].partition(":")[0]
    return name if name in ("factors", "adam") else row["system"]


def plot(cells, path):
    """Plots predicted over measured times, one panel for each layout.

    Args:
      cells: Answers of `benchmarks.exchange`, by key.
      path: File to write.
    """
    rows = [row for row in compared(grid.measured(cells)) if row["is_known"]]
    layouts = list(dict.fromkeys(row["layout"] for row in rows))

    def draw(figure, axes):
        for axis, layout in zip(axes, layouts, strict=True):
            own = [row for row in rows if row["layout"] == layout]
            for system in figures.in_order({drawn_as(row) for row in own}):
                points = [row for row in own if drawn_as(row) == system]
                look = figures.line(system) | {"linestyle": "", "markersize": 3.5}
                measured_s = [row["measured_s"] for row in points]
                axis.plot(measured_s, [1 + error(row) for row in points], **look)
            axis.axhspan(0.8, 1.25, color="#f0f0f0", zorder=0)
            axis.axhline(1.0, **figures.REFERENCE)
            axis.set(
                title=figures.ranks(layout),
                xlabel="measured seconds of an exchange",
                ylabel="predicted / measured",
                xscale="log",
                yscale="log",
                ylim=(0.3, 3.3),
            )
            ticks = (0.5, 0.8, 1.0, 1.25, 2.0)
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axis.minorticks_off()
        figures.legend(figure)

    figures.save(path, len(layouts), draw)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=GRID, help="answers of benchmarks.exchange")
    parser.add_argument("--worst", type=int, default=0, help="number of errors to list (0)")
    parser.add_argument(
        "--plot", type=Path, default=harness.RESULTS / "predict.png", help="file to write"
    )
    parser.add_argument("--steps", action="store_true", help="compare steps instead of exchanges")
    parser.add_argument(
        "--constants", action="store_true", help="predict with other values of the constants"
    )
    options = parser.parse_args()
    if not options.results.exists():
        parser.error(
            f"--results must be an existing file. Received: {options.results}. Run "
            "python -m benchmarks.exchange --full --results docs/results/exchange_grid.json"
        )
    cells = json.loads(options.results.read_text())
    rows = grid.measured(cells)
    if options.constants:
        show_constants(rows)
        return
    if options.steps:
        found = list(predict_steps.compared(rows))
        show(found, "exposed communication", lambda row: row["shows"])
    else:
        everything = list(compared(rows))
        found = [row for row in everything if row["is_known"]]
        name = f"link below {LINK_BOUND:.0%} of the time"
        show(found, name, lambda row: row["link_share"] < LINK_BOUND)
        unknown = [row for row in everything if not row["is_known"]]
        if unknown:
            print(f"\nmeasured with an error above {LARGEST_ERROR:.0%}:")
            harness.show([HEADER, summary("all", unknown)])
        show_choices(found)
        plot(cells, options.plot)
    show_worst(found, options.worst)


if __name__ == "__main__":
    main()
