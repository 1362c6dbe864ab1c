"""Measures time and bytes of single exchanges of one vector, beside the limit of the link.

    python -m benchmarks.exchange            # short: 2 x 2 ranks, 200 Mb/s, 2^14 to 2^22 values
    python -m benchmarks.exchange --full     # 2x1 to 4x4, 100 Mb/s to unshaped, to 2^26; hours
    python -m benchmarks.exchange --layouts 2x2 4x2 --rates 200mbit --lengths 24
    python -m benchmarks.exchange --sparse   # 25.6 M values, sparse, dense and DDP; 20 minutes

The limit is payload / rate for the node that sends most. Over the lengths of each scheme and link a
latency and a bandwidth are fitted (t = latency + payload / bandwidth, least squares of relative
errors; without what the shaper lets through at once). An interrupted run goes on.
"""

import itertools
import math
import statistics

import numpy as np

from benchmarks import figures, harness
from tfposeidon.lab.cluster import burst_bytes
from tfposeidon.units import parse_rate, readable_size

SYSTEMS = ("allreduce", "allreduce:float16", "asa", "asa16", "2dtar", "2dtar:float16")
SPARSE = {
    "layouts": ["2x2", "4x2", "4x4"],
    "rates": ["200mbit", "1gbit"],
    "lengths": [25_557_032],
    "systems": [
        *(
            "allreduce",
            "2dtar",
            "2dtar:float16",
            "topk:0.01",
            "topk:0.001",
            "hitopk:0.1",
            "hitopk:0.01",
        ),
        *("hitopk:0.01:float16", "hitopk:0.001", "ddp", "ddp-fp16", "ddp-powersgd"),
    ],
}
SHORT = {"layouts": ["2x2"], "rates": ["200mbit"], "lengths": [14, 18, 22]}
SMALLEST = {
    "layouts": ["2x1"],
    "rates": ["1gbit"],
    "lengths": [10],
    "systems": ["allreduce", "asa16", "hitopk:0.1"],
}
FULL = {
    "layouts": ["2x1", "4x1", "2x2", "4x2", "4x4"],
    "rates": ["100mbit", "200mbit", "1gbit", "unshaped"],
    "lengths": list(range(10, 27, 2)),
}
# Share of what an exchange sends; where the shaper's burst is more, the limit says nothing.
LARGEST_BURST = 0.01
# With longer vectors sixteen ranks do not fit into memory.
LONGEST_ABOVE_8_RANKS = 2**24
# What DDP exchanges: the gradients of a model, without computing anything.
PEER = {"model": "resnet50", "shrink": 1, "dilation": 0, "warm_up": 3, "steps": 3}


def parse_arguments():
    parser = harness.argument_parser("exchange", __doc__)
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks on each"
    )
    parser.add_argument(
        "--rates", nargs="*", help="rates of the links between nodes, such as 200mbit, or unshaped"
    )
    parser.add_argument(
        "--lengths",
        nargs="*",
        type=int,
        metavar="POWER",
        help="lengths of the vector: powers of two, or, from 64 on, numbers of values",
    )
    parser.add_argument(
        "--systems", nargs="*", help="schemes with options, such as hitopk:0.01:float16, and peers"
    )
    parser.add_argument(
        "--sparse", action="store_true", help="measure sparse and dense exchanges of 25.6 M values"
    )
    common = {"systems": SYSTEMS}
    return harness.parse(parser, common | SHORT, common | FULL, SMALLEST, {"sparse": SPARSE})


def planned(options):
    """Returns one job for each layout, rate and program that measures."""
    found = []
    for layout, rate in itertools.product(options.layouts, options.rates):
        lengths = [2**length if length < 64 else length for length in options.lengths]
        if ranks(layout) > 8 and not options.sparse:
            lengths = [length for length in lengths if length <= LONGEST_ABOVE_8_RANKS]
        for worker, systems in harness.by_worker(options.systems, "exchange").items():
            found.append(
                {
                    "layout": layout,
                    "rate": rate,
                    "lengths": lengths,
                    "systems": systems,
                    "worker": worker,
                }
            )
    return harness.keyed(found)


def ranks(layout):
    """Returns the number of ranks of "MxN"."""
    nodes, per_node = map(int, layout.split("x"))
    return nodes * per_node


def run(layout, rate, lengths, systems, worker):
    task = {"lengths": lengths} if worker == "exchange" else PEER
    answer = harness.in_lab(harness.cluster(layout, rate), worker, task | {"systems": systems})
    if worker == "ddp":
        answer["systems"] = {
            f"{name} {lengths[0]}": peer_figures(measured)
            for name, measured in answer["systems"].items()
        }
    return answer | {"layout": layout, "rate": rate}


def peer_figures(measured):
    """Returns figures of a peer like ours; what it should send is what it sends."""
    return measured | {
        "predicted_bytes": measured["sent_bytes"],
        "busiest_bytes": measured["sent_bytes"],
    }


def rows(cell):
    """Yields the figures of each scheme and length of a job."""
    rate = None if cell["rate"] == "unshaped" else parse_rate(cell["rate"])
    for name, measured in cell["systems"].items():
        system, length = name.rsplit(" ", 1)
        time_s = statistics.median(measured["step_s"])
        limit_s = 8 * measured["busiest_bytes"] / rate if rate else None
        # The shaper lets a burst through at once when an exchange begins, so that there is no limit
        # for short ones.
        free_bytes = burst_bytes(rate) if rate else 0
        limited = rate is not None and free_bytes < LARGEST_BURST * measured["busiest_bytes"]
        yield {
            "system": system,
            "length": int(length),
            "time_s": time_s,
            "bytes": measured["busiest_bytes"],
            "counted": measured["sent_bytes"] / measured["predicted_bytes"]
            if measured["predicted_bytes"]
            else None,
            "limit_s": limit_s,
            "distance": time_s / limit_s if limited else None,
            "shaped_bytes": max(0.0, measured["busiest_bytes"] - free_bytes),
        }


def fit(rows):
    """Fits latency and bandwidth of one scheme over one link.

    Args:
      rows: Rows of `rows`, of several lengths.

    Returns:
      Latency in seconds, and bandwidth in bits per second.
    """
    sizes, times = (
        np.array([row[name] for row in rows], float) for name in ("shaped_bytes", "time_s")
    )
    # Relative errors count, so that short exchanges tell the latency and long ones the bandwidth.
    terms = np.stack([np.ones_like(sizes), 8 * sizes], axis=1) / times[:, None]
    (latency_s, bit_s), *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
    return latency_s, 1 / bit_s if bit_s > 0 else math.inf


def show(cells):
    """Prints a table for each job, and the fitted latencies and bandwidths."""
    for cell in cells.values():
        found = list(rows(cell))
        print(
            f"\n{cell['layout']} ranks, {cell['rate']} between nodes; "
            f"{cell['dropped_packets']} packets dropped"
        )
        header = (
            "scheme",
            "values",
            "time",
            "payload on the link",
            "counted / predicted",
            "limit",
            "time / limit",
        )
        harness.show([header, *map(cells_of, found)])
        for system in dict.fromkeys(row["system"] for row in found):
            own = [row for row in found if row["system"] == system]
            if len(own) > 2 and any(row["bytes"] for row in own):
                latency_s, bandwidth = fit(own)
                print(
                    f"  {system}: {1e3 * latency_s:.1f} ms + payload at {bandwidth / 1e6:.0f} Mb/s"
                )


def cells_of(row):
    return (
        row["system"],
        f"2^{math.log2(row['length']):.0f}"
        if row["length"].bit_count() == 1
        else f"{row['length'] / 1e6:.1f} M",
        f"{1e3 * row['time_s']:.1f} ms",
        readable_size(row["bytes"]),
        f"{row['counted']:.3f}" if row["counted"] else "",
        f"{1e3 * row['limit_s']:.1f} ms" if row["limit_s"] else "",
        f"{row['distance']:.2f}" if row["distance"] else "",
    )


def plot(cells, path):
    """Saves one panel for each layout and link.

    Where several lengths were measured, it shows time over length, and otherwise a bar for each
    system.
    """
    found = {}
    for cell in cells.values():
        found.setdefault((cell["layout"], cell["rate"]), []).extend(rows(cell))
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
    """Draws time over length, a line for each system."""
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
    """Draws a bar for each system, to one scale for all layouts of a link."""
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
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
