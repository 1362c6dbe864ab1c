"""Measures time and bytes of single exchanges, and compares them with the network's limit.

    python -m benchmarks.exchange            # short: 2 x 2 ranks, 200 Mb/s, 2^14 to 2^22 values
    python -m benchmarks.exchange --full     # the grid below: hours
    python -m benchmarks.exchange --layouts 2x2 4x2 --rates 200mbit --lengths 24
    python -m benchmarks.exchange --systems factors:32 --shapes 4096x4096    # 32 rows per rank
    python -m benchmarks.exchange --flow 100mbit --rates 400mbit        # a limit per connection
    python -m benchmarks.exchange --sparse   # 25.6 M values, sparse, dense and DDP; 20 minutes

The grid has 2x1 to 16x1 and 4x4 ranks, 100 Mb/s to unshaped, 2^10 to 2^26 values (2^24 above 8
ranks), all schemes, sufficient factors of 4 to 512 batch rows per rank, and the parts of exchanges:
single collectives ("all_gather@across") and local work ("select@work") with all ranks busy.
Exchanges are skipped if their limit or their products take more than 5 s, or if they exceed memory.

The limit is payload / rate for the node that sends most. For each scheme and network, latency and
bandwidth are fitted over the lengths (t = latency + payload / bandwidth, least squares of relative
errors; the burst that the shaper passes is not counted). At each size, systems are measured
alternately. Exchanges whose interquartile range exceeds 10 % of the median are listed separately.
An interrupted run resumes with the missing exchanges.
"""

import itertools
import math
import os
import statistics

import numpy as np

from benchmarks import figures, harness
from tfposeidon.lab.network import burst_bytes
from tfposeidon.text import parse_rate, readable_size

SYSTEMS = (
    "allreduce",
    "allreduce:float16",
    "alltoall",
    "alltoall:float16",
    "torus2d",
    "torus2d:float16",
)
SPARSE_SYSTEMS = (
    *("ps", "onebit", "topk:0.01"),
    *("hitopk:0.1", "hitopk:0.01", "hitopk:0.01:float16", "hitopk:0.001"),
)
FACTORS = (
    "factors:4",
    "factors:32",
    "factors:128",
    "factors:512",
    "adam:4",
    "adam:32",
    "adam:128",
    "adam:512",
)
COLLECTIVES = (
    *(
        "all_reduce@world",
        "all_reduce16@world",
        "all_gather@world",
        "all_gather@across",
        "all_gather@node",
    ),
    *("all_to_all@world", "all_to_all@across", "all_to_all@node"),
)
LOCAL_WORK = tuple(
    f"{kind}@work"
    for kind in ("nothing", "sum", "encode", "select", "select_many", "scatter", "multiply")
)
RATES = ("100mbit", "200mbit", "1gbit", "unshaped")
GRID = (
    (SYSTEMS, [str(2**power) for power in range(10, 27, 2)], RATES),
    (SPARSE_SYSTEMS, [str(2**power) for power in (12, 16, 20, 24)], RATES[1:]),
    (FACTORS, ["256x256", "1024x1024", "4096x4096"], RATES[1:]),
    (COLLECTIVES, [str(2**power) for power in (8, 14, 20, 24)], RATES[1:]),
    (LOCAL_WORK, [str(2**power) for power in (16, 22)], RATES[-1:]),
)
"""Systems, sizes and rates that `--full` measures."""
SPARSE = {
    "layouts": ["2x2", "4x2", "4x4"],
    "rates": ["200mbit", "1gbit"],
    "lengths": [25_557_032],
    "systems": [
        *("allreduce", "torus2d", "torus2d:float16", "topk:0.01", "topk:0.001"),
        *("hitopk:0.1", "hitopk:0.01", "hitopk:0.01:float16", "hitopk:0.001"),
        *("ddp", "ddp-fp16", "ddp-powersgd"),
    ],
}
SHORT = {
    "layouts": ["2x2"],
    "rates": ["200mbit"],
    "lengths": [14, 18, 22],
    "shapes": ["1024x1024"],
    "systems": SYSTEMS,
}
SMALLEST = {
    "layouts": ["2x1"],
    "rates": ["1gbit"],
    "lengths": [10],
    "shapes": ["64x64"],
    "systems": [
        *("allreduce", "alltoall:float16", "hitopk:0.1", "factors:4", "adam:4"),
        *("all_reduce@world", "all_to_all@across", *LOCAL_WORK),
    ],
}
FULL = {"layouts": ["2x1", "4x1", "2x2", "8x1", "4x2", "16x1", "4x4"], "rates": RATES}
# If the shaper's burst exceeds this share of an exchange's bytes, the limit is meaningless.
LARGEST_BURST = 0.01
# Longer vectors of sixteen ranks do not fit in memory.
LONGEST_ABOVE_8_RANKS = 2**24
# The bytes are those of all ranks; a gather of 2^24 values from each of 16 ranks would not fit.
MOST_GATHERED_BYTES = 4 * 2**30
LONGEST_LIMIT_S = 5.0
# Speed of a core in products of factors, used only to skip exchanges that take too long.
OPERATIONS_PER_S = 25e9
# Interquartile range / median of the times of an exchange. If the scheduler delays one exchange of
# twenty, the quartiles do not change.
LARGEST_SCATTER = 0.10
# DDP exchanges the gradients of this model, without computation.
PEER = {"model": "resnet50", "shrink": 1, "dilation": 0, "warm_up": 3, "steps": 3}


def parse_arguments():
    parser = harness.argument_parser("exchange", __doc__)
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    parser.add_argument(
        "--rates", nargs="*", help="rates of the links between nodes, such as 200mbit, or unshaped"
    )
    parser.add_argument("--flow", help="limit of each connection between nodes, such as 100mbit")
    parser.add_argument(
        "--lengths",
        nargs="*",
        type=int,
        metavar="POWER",
        help="lengths of the vector: powers of two, or, from 64 on, numbers of values",
    )
    parser.add_argument(
        "--shapes", nargs="*", metavar="MxN", help="shapes of the matrices for sufficient factors"
    )
    parser.add_argument(
        "--systems",
        nargs="*",
        help="schemes with options, such as hitopk:0.01:float16 or factors:32, or other frameworks",
    )
    parser.add_argument(
        "--sparse", action="store_true", help="measure sparse and dense exchanges of 25.6 M values"
    )
    return harness.parse(parser, SHORT, FULL, SMALLEST, {"sparse": SHORT | SPARSE})


def planned(options, kept=None):
    """Returns the jobs for the missing exchanges.

    Args:
      options: Options of the command line.
      kept: Answers of earlier jobs, by key; none by default.

    Returns:
      One job per layout, rate and worker, by key.
    """
    kept = kept or {}
    found, left_out = {}, 0
    for layout, rate in itertools.product(options.layouts, options.rates):
        there = measured_before(kept, layout, rate, options.flow)
        for worker, wanted in wanted_by_worker(options, rate).items():
            if is_grid(options):
                every = len(wanted)
                wanted = [cell for cell in wanted if is_within_limits(cell, layout, rate)]
                left_out += every - len(wanted)
            if cells := [cell for cell in wanted if cell not in there]:
                job = {"layout": layout, "rate": rate, "flow": options.flow, "worker": worker}
                found[key_of(job, kept)] = job | {"cells": cells}
    if left_out:
        print(
            f"{left_out} exchanges of the grid are skipped: their limit or their products take "
            f"more than {LONGEST_LIMIT_S:g} s, or they do not fit into memory"
        )
    return found


def key_of(job, kept):
    """Returns a key that the results do not have yet."""
    key = " ".join(f"{name}={value}" for name, value in job.items() if value is not None)
    parts = (key if part == 1 else f"{key} part={part}" for part in itertools.count(1))
    return next(one for one in parts if one not in kept)


def measured_before(kept, layout, rate, flow):
    """Returns the exchanges on one cluster that earlier jobs measured."""
    return {
        name
        for cell in kept.values()
        if (cell["layout"], cell["rate"], cell.get("flow")) == (layout, rate, flow)
        for name in cell["systems"]
    }


def is_grid(options):
    """Returns whether the options select the grid instead of single exchanges."""
    return options.full and not (options.systems or options.lengths or options.shapes)


def wanted_by_worker(options, rate):
    """Returns "system size" of the exchanges that the options select, by worker."""
    if is_grid(options):
        return {"exchange": list(grid(rate))}
    found = harness.by_worker(options.systems or SYSTEMS, "exchange")
    return {worker: list(asked_for(systems, options)) for worker, systems in found.items()}


def asked_for(systems, options):
    """Yields "system size" for each exchange that the options name."""
    named = options.lengths or SHORT["lengths"]
    lengths = [2**length if length < 64 else length for length in named]
    for system in systems:
        name = system.partition(":")[0]
        if name in ("factors", "adam"):
            sizes = options.shapes or SHORT["shapes"]
        else:
            # Other frameworks exchange the gradients of one model.
            sizes = lengths[:1] if name.partition("-")[0] in harness.PEER_WORKERS else lengths
        for size in sizes:
            yield f"{system} {size}"


def grid(rate):
    """Yields "system size" for each exchange of the grid at one rate."""
    for systems, sizes, rates in GRID:
        # At a rate that is not in the grid, measure all its exchanges.
        if rate in rates or rate not in RATES:
            yield from (f"{system} {size}" for size in sizes for system in systems)


def is_within_limits(cell, layout, rate):
    """Returns whether an exchange fits in memory, and is short enough to be measured."""
    # Import here, because only the grid needs TensorFlow.
    from benchmarks.exchanges import busiest_node_bytes, stages_named
    from tfposeidon.communication.topology import Topology
    from tfposeidon.schemes.stages import Transfer, Work

    system, size = cell.rsplit(" ", 1)
    nodes, per_node = map(int, layout.split("x"))
    if "x" not in size and nodes * per_node > 8 and int(size) > LONGEST_ABOVE_8_RANKS:
        return False
    topology = Topology.regular(0, nodes * per_node, per_node)
    stages = [
        stage
        for rank in range(topology.size)
        for stage in stages_named(system, size, topology.seen_from(rank))
    ]
    gathered_bytes = sum(
        sum(stage.parts_bytes)
        for stage in stages
        if isinstance(stage, Transfer) and stage.operation == "all_gather"
    )
    if gathered_bytes > MOST_GATHERED_BYTES:
        return False
    # All ranks of the lab multiply on the same cores.
    products = sum(
        stage.operations for stage in stages if isinstance(stage, Work) and stage.kind == "multiply"
    )
    limit_s = products / (os.cpu_count() * OPERATIONS_PER_S)
    if rate != "unshaped":
        limit_s += 8 * busiest_node_bytes(system, size, topology) / parse_rate(rate)
    return limit_s <= LONGEST_LIMIT_S


def run(layout, rate, flow, worker, cells):
    cluster = harness.cluster(layout, rate) + (f" --flow {flow}" if flow else "")
    # Factors with different numbers of rows are different systems.
    systems = list(dict.fromkeys(cell.rsplit(" ", 1)[0] for cell in cells))
    task = {"cells": cells} if worker == "exchange" else PEER | {"systems": systems}
    place = {"layout": layout, "rate": rate} | ({"flow": flow} if flow else {})
    try:
        answer = harness.in_lab(cluster, worker, task)
    except harness.JobError as error:
        # The exchanges measured so far are saved; the next run measures the others.
        if worker == "exchange" and error.partial:
            error.answer = error.partial | place
        raise
    if worker == "ddp":
        size = cells[0].rsplit(" ", 1)[1]
        answer["systems"] = {
            f"{name} {size}": peer_figures(measured) for name, measured in answer["systems"].items()
        }
    return answer | place


def peer_figures(measured):
    """Returns the measurements of another framework, with the counted bytes as predicted bytes."""
    return measured | {
        "predicted_bytes": measured["sent_bytes"],
        "busiest_bytes": measured["sent_bytes"],
    }


def rows(cell):
    """Yields a table row for each scheme and length in a job."""
    rate = None if cell["rate"] == "unshaped" else parse_rate(cell["rate"])
    for name, measured in cell["systems"].items():
        system, size = name.rsplit(" ", 1)
        times = measured["step_s"]
        time_s = statistics.median(times)
        scatter = float(np.subtract(*np.percentile(times, [75, 25]))) / time_s
        limit_s = 8 * measured["busiest_bytes"] / rate if rate else None
        # The shaper passes a burst at once when an exchange begins, so short exchanges have no
        # limit.
        free_bytes = burst_bytes(rate) if rate else 0
        limited = rate is not None and free_bytes < LARGEST_BURST * measured["busiest_bytes"]
        yield {
            "system": system,
            "size": size,
            "length": math.prod(map(int, size.split("x"))),
            "time_s": time_s,
            "scatter": scatter,
            # Standard error of the median, from the quartiles of a normal distribution.
            "standard_error": 0.93 * scatter / len(times) ** 0.5,
            "bytes": measured["busiest_bytes"],
            "counted": measured["sent_bytes"] / measured["predicted_bytes"]
            if measured["predicted_bytes"]
            else None,
            "limit_s": limit_s,
            "distance": time_s / limit_s if limited else None,
            "shaped_bytes": max(0.0, measured["busiest_bytes"] - free_bytes),
        }


def fit(rows):
    """Fits latency and bandwidth of one scheme on one network.

    Args:
      rows: Rows of `rows`, of several lengths.

    Returns:
      Latency in seconds, and bandwidth in bits per second.
    """
    sizes, times = (
        np.array([row[name] for row in rows], float) for name in ("shaped_bytes", "time_s")
    )
    # With relative errors, short exchanges determine the latency and long ones the bandwidth.
    terms = np.stack([np.ones_like(sizes), 8 * sizes], axis=1) / times[:, None]
    (latency_s, bit_s), *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
    return latency_s, 1 / bit_s if bit_s > 0 else math.inf


def show(cells):
    """Prints a table per job, fitted latencies and bandwidths, and exchanges whose times vary."""
    for cell in cells.values():
        found = list(rows(cell))
        print(
            f"\n{cell['layout']} ranks, {cell['rate']} between nodes"
            f"{', ' + cell['flow'] + ' per connection' if cell.get('flow') else ''}; "
            f"{cell['dropped_packets']} packets dropped"
        )
        steady = [row for row in found if row["scatter"] <= LARGEST_SCATTER]
        if steady:
            harness.show([HEADER, *map(cells_of, steady)])
        for system in dict.fromkeys(row["system"] for row in steady):
            own = [row for row in steady if row["system"] == system]
            if len(own) > 2 and any(row["bytes"] for row in own):
                latency_s, bandwidth = fit(own)
                print(
                    f"  {system}: {1e3 * latency_s:.1f} ms + payload at {bandwidth / 1e6:.0f} Mb/s"
                )
        if len(steady) < len(found):
            print(f"  times that differ by more than {LARGEST_SCATTER:.0%}:")
            scattered = [row for row in found if row["scatter"] > LARGEST_SCATTER]
            harness.show([(*HEADER, "scatter"), *map(scattered_cells_of, scattered)])


HEADER = (
    "scheme",
    "values",
    "time",
    "payload on the link",
    "counted / predicted",
    "limit",
    "time / limit",
)


def scattered_cells_of(row):
    return (*cells_of(row), f"{row['scatter']:.0%}")


def cells_of(row):
    return (
        row["system"],
        readable_length(row["size"]),
        f"{1e3 * row['time_s']:.1f} ms",
        readable_size(row["bytes"]),
        f"{row['counted']:.3f}" if row["counted"] else "",
        f"{1e3 * row['limit_s']:.1f} ms" if row["limit_s"] else "",
        f"{row['distance']:.2f}" if row["distance"] else "",
    )


def readable_length(size):
    """Returns a size for tables: "2^10", "25.6 M" or "64x64"."""
    if "x" in size:
        return size
    length = int(size)
    is_power = length.bit_count() == 1
    return f"2^{math.log2(length):.0f}" if is_power else f"{length / 1e6:.1f} M"


def plot(cells, path):
    """Plots times of exchanges, one panel for each layout and network.

    With several lengths, a panel shows time over length; otherwise it shows a bar per system.
    """
    found = {}
    for cell in cells.values():
        shown = [row for row in rows(cell) if "@" not in row["system"] and "x" not in row["size"]]
        if shown and not cell.get("flow"):
            found.setdefault((cell["layout"], cell["rate"]), []).extend(shown)
    if len({row["length"] for own in found.values() for row in own}) > 1:
        figures.save(path, len(found), lambda figure, axes: draw_lines(figure, axes, found))
        return
    systems = figures.in_order({row["system"] for own in found.values() for row in own})
    height_in = 0.8 + 0.21 * len(systems)

    def draw(figure, axes):
        draw_bars(axes, found, systems)
        (length,) = {row["length"] for own in found.values() for row in own}
        figure.suptitle(f"an exchange of {length / 1e6:.1f} M float32 values; bold: tfposeidon")

    figures.save(path, len(found), draw, height_in=height_in)


def draw_lines(figure, axes, found):
    """Plots time over length, with a line per system."""
    for axis, ((layout, rate), own) in zip(axes, found.items(), strict=True):
        for system in figures.in_order({row["system"] for row in own}):
            points = sorted(
                (row["length"], row["time_s"]) for row in own if row["system"] == system
            )
            axis.plot(*zip(*points, strict=True), **figures.line(system))
        axis.set(
            title=f"{figures.ranks(layout)}, {figures.rate(rate)}",
            xlabel="values",
            ylabel="seconds per exchange",
            xscale="log",
            yscale="log",
        )
        axis.grid()
    figures.legend(figure)


def draw_bars(axes, found, systems):
    """Draws a bar for each system, on one scale for all layouts with the same rate."""
    longest = {}
    for (_, rate), own in found.items():
        longest[rate] = max([longest.get(rate, 0), *(1e3 * row["time_s"] for row in own)])
    for index, (axis, ((layout, rate), own)) in enumerate(zip(axes, found.items(), strict=True)):
        times = {row["system"]: 1e3 * row["time_s"] for row in own}
        milliseconds = {system: times.get(system) for system in systems}
        figures.bars(axis, milliseconds, names=index % 2 == 0, limit=longest[rate])
        axis.set_title(f"{figures.ranks(layout)}, {figures.rate(rate)} between nodes")
        axis.set_xlabel("milliseconds per exchange")


def main():
    options = parse_arguments()
    harness.carry_out(options, lambda results: planned(options, results.cells), run, show, plot)


if __name__ == "__main__":
    main()
