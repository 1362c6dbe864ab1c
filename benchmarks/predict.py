"""Compares predicted exchanges and steps with those that were measured; runs no ranks.

    python -m benchmarks.predict                 # the grid in docs/results/exchange_grid.json
    python -m benchmarks.predict --worst 20      # and the largest errors
    python -m benchmarks.predict --steps         # steps of scaling, sparse_scaling and poseidon

The grid comes from `python -m benchmarks.exchange --full --results
docs/results/exchange_grid.json`. Links and speeds of ranks are estimated, as before the first step
of a job, from the single collectives and the local work in it; no scheme's exchange decides about
them. Errors are (predicted - measured) / measured. Exchanges whose repeats differ by more than 10 %
are left out. Nothing is fitted to steps: emulated accelerators compute as long as they are told to,
and exchanges take what the same links and speeds predict.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks import exchange, figures, harness
from benchmarks.exchanges import DENSITY, PRODUCT_ROWS, factors_named, scheme_named
from tfposeidon import policies, schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.factors import FactorShape
from tfposeidon.lab import models
from tfposeidon.planning import probe, search, seconds
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES, make_plan
from tfposeidon.planning.simulation import Timeline
from tfposeidon.units import parse_rate

GRID = harness.RESULTS / "exchange_grid.json"
LINK_BOUND = 0.8
"""Share of an exchange that its link takes at least, above which hardly anything can be wrong."""
SMALL, LARGE = 2**8, (2**14, 2**20, 2**24)
"""Values in the single collectives that tell latencies, and of those that may tell rates."""
WORK = 2**22
PAIRS = round(DENSITY * WORK)
"""Elements, and pairs, of the local work that tells the speed of a rank."""
MEASURED_NEAR = {"100mbit": "200mbit"}
"""Rates at which no single collectives are measured, and those whose figures are scaled."""


def topology_of(layout):
    """Returns the ranks of a layout such as "4x2"."""
    nodes, per_node = map(int, layout.split("x"))
    return Topology.regular(0, nodes * per_node, per_node)


def measured(cells):
    """Returns the rows of `exchange.rows` by layout, rate, system and size."""
    return {
        (cell["layout"], cell["rate"], row["system"], row["size"]): row
        for cell in cells.values()
        if not cell.get("flow")
        for row in exchange.rows(cell)
    }


def links_of(rows, layout, rate):
    """Returns the links that single collectives on a layout tell; `None` where some are missing.

    Args:
      rows: Result of `measured`.
      layout: "MxN", nodes x ranks on each.
      rate: Rate of the links between nodes, such as "200mbit", or "unshaped".
    """
    topology, near = topology_of(layout), MEASURED_NEAR.get(rate, rate)
    probes, samples = [], {}
    for one in (*probe.small_probes(topology), *probe.large_probes(topology)):
        if one.name == "rate.flow":
            # The lab of the grid limits no connections.
            continue
        name = collective_name(one, topology)
        lengths = LARGE if one.tells_rate else (SMALL,)
        found = {length: rows.get((layout, near, name, str(length))) for length in lengths}
        found = {length: row for length, row in found.items() if row}
        if not found:
            return None
        # As long as the probe itself sends: the first that takes long enough.
        long = [n for n, row in found.items() if row["time_s"] >= probe.LONG_ENOUGH_S]
        length = long[0] if long else max(found)
        probes.append(dataclasses.replace(one, length=length))
        samples[one.name] = [found[length]["time_s"] - overhead_s(rows, layout)]
    links = probe.estimate(probes, samples, topology, rates_of(rows, layout))
    if near == rate:
        return links
    factor = parse_rate(rate) / parse_rate(near)
    across = dataclasses.replace(links.across, bytes_per_s=factor * links.across.bytes_per_s)
    return dataclasses.replace(links, across=across)


def collective_name(one, topology):
    """Returns the name of a probe's collective in `benchmarks.exchange`, as "all_gather@world"."""
    group = one.groups[topology.rank]
    kind = next(kind for kind in ("world", "node", "across") if getattr(topology, kind) == group)
    return f"{one.operation}@{kind}"


def overhead_s(rows, layout):
    """Returns the seconds of a function that does nothing, which are in all measured times."""
    return rows[layout, "unshaped", "nothing@work", str(WORK)]["time_s"]


def rates_of(rows, layout):
    """Returns the speed of a rank while all ranks of the lab work.

    Args:
      rows: Result of `measured`.
      layout: "MxN", nodes x ranks on each.
    """
    times = {
        kind: rows[layout, "unshaped", f"{kind}@work", str(WORK)]["time_s"]
        - overhead_s(rows, layout)
        for kind in ("sum", "encode", "select", "scatter", "multiply")
    }
    return probe.rates_of(times, WORK, PAIRS, (PRODUCT_ROWS, round(WORK**0.5)))


def compared(rows):
    """Yields each exchange of a scheme with its prediction.

    Args:
      rows: Result of `measured`.

    Yields:
      Dictionaries with layout, rate, system, size, measured and predicted seconds, and the share
      that the link takes at least.
    """
    links = {}
    for (layout, rate, system, size), row in rows.items():
        if "@" in system or row["scatter"] > exchange.LARGEST_SCATTER:
            continue
        if (layout, rate) not in links:
            links[layout, rate] = links_of(rows, layout, rate)
        known = links[layout, rate]
        if known is None:
            continue
        topology = topology_of(layout)
        yield {
            "layout": layout,
            "rate": rate,
            "system": system,
            "size": size,
            "measured_s": row["time_s"],
            "predicted_s": overhead_s(rows, layout) + predicted(system, size, topology, known),
            "link_share": (row["limit_s"] or 0.0) / row["time_s"],
        }


def predicted(system, size, topology, links):
    """Returns the predicted seconds of an exchange.

    Args:
      system: Name of the scheme, with options, as in `benchmarks.exchange`.
      size: Number of values, or the shape of a matrix.
      topology: The ranks of the job.
      links: Links of the job.
    """
    if "x" in size:
        scheme, factors = factors_named(system, size)
        length = factors.left * factors.right
        return seconds.exchange_seconds(scheme, length, 4, [factors], topology, links)
    return seconds.exchange_seconds(scheme_named(system), int(size), 4, [], topology, links)


STEPS = ("scaling", "sparse_scaling", "poseidon")
SHOWS = 1.15
"""Steps of as many times the computation or more, in which communication shows."""


def descriptions_of(model):
    """Returns the gradients of an emulated model, and the layer of each."""
    found = []
    for layer in model.layers:
        factors = None
        if layer.kind == "dense":
            rows = model.batch * layer.rows
            factors = FactorShape(rows, *layer.kernel, dtype="float32")
        found.append((Description(f"{layer.name}/kernel", layer.kernel, "float32", factors), layer))
        found += [
            (Description(f"{layer.name}/vector{index}", (length,), "float32"), layer)
            for index, length in enumerate(layer.vectors)
        ]
    return found


def timeline_of(model, dilation, links):
    """Returns when an emulated model has its gradients.

    The accelerator is emulated, and products of dense layers are made by the CPU besides.
    """
    times = model.times()
    now_s = dilation * sum(forward_s for forward_s, _ in times)
    cpu_s, ready = 0.0, {}
    for layer, (_, backward_s) in reversed(list(zip(model.layers, times, strict=True))):
        now_s += dilation * backward_s
        ready[layer.name] = now_s
        if layer.kind == "dense":
            operations = 2 * model.batch * layer.rows * layer.kernel[0] * layer.kernel[1]
            cpu_s = max(cpu_s, now_s) + operations * links.rates.operation_s
            ready[layer.name] = cpu_s
    return tuple(ready[layer.name] for _, layer in descriptions_of(model)), max(now_s, cpu_s)


def predicted_step(cell, system, links):
    """Returns the predicted seconds of a measured step, and those without an exchange."""
    task = cell["task"]
    model = models.model(task["model"])
    model = model.shrunk(task["shrink"]) if task["shrink"] != 1 else model
    ready_s, compute_s = timeline_of(model, task["dilation"], links)
    name = system.removesuffix("-late")
    if name != system:
        ready_s = (compute_s,) * len(ready_s)
    scheme, bucket_bytes = SYSTEMS.get(name), DEFAULT_BUCKET_BYTES / task["shrink"] ** 2
    if name in HOROVOD:
        # A gradient each, which Horovod fuses.
        scheme, bucket_bytes = HOROVOD[name], 0
    plan = make_plan(
        [description for description, _ in descriptions_of(model)],
        policies.parse(scheme or scheme_named(name)),
        topology_of(cell["layout"]),
        round(bucket_bytes),
    )
    timeline = Timeline(ready_s=ready_s, compute_s=compute_s)
    return search.predict(plan, links, timeline).step_s, compute_s


SYSTEMS = {"hybcomm": "hybcomm", "ps-adam": [("dense[0-9]+/kernel", "adam"), (".*", "ps")]}
HOROVOD = {
    "horovod": "allreduce",
    "horovod-fp16": schemes.AllReduce(wire_dtype="float16"),
}


def links_at(rows, layout, bits_per_s):
    """Returns the links of a layout at a rate that the grid does not have.

    Latencies and speeds are those of unshaped links, and the share of the rate that payload gets is
    that at 200 Mb/s.
    """
    links, shaped = links_of(rows, layout, "unshaped"), links_of(rows, layout, "200mbit")
    if links is None or shaped is None:
        return None
    factor = bits_per_s / parse_rate("200mbit")
    across = dataclasses.replace(shaped.across, bytes_per_s=factor * shaped.across.bytes_per_s)
    return dataclasses.replace(links, across=across)


def compared_steps(rows):
    """Yields each measured step with its prediction; rows as those of `compared`."""
    for file in STEPS:
        for cell in json.loads((harness.RESULTS / f"{file}.json").read_text()).values():
            if cell["worker"] != "keras_fit":
                continue
            links = links_at(rows, cell["layout"], cell["rate_bits_per_s"])
            if links is None:
                continue
            for system, found in cell["systems"].items():
                if system == "alone" or "step_s" not in found:
                    continue
                step_s, compute_s = predicted_step(cell, system, links)
                measured_s = statistics.median(found["step_s"])
                yield {
                    "file": file,
                    "layout": cell["layout"],
                    "rate": f"{cell['gbit']:g} Gb/s",
                    "system": system,
                    "size": cell["model"],
                    "measured_s": measured_s,
                    "predicted_s": step_s,
                    "shows": measured_s > SHOWS * compute_s,
                }


def error(row):
    return row["predicted_s"] / row["measured_s"] - 1


def summary(name, rows):
    """Returns a row of the table: median, 90th percentile and worst of the errors' sizes."""
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


def show(rows, some, holds):
    """Prints errors of all rows, and of groups of them.

    Args:
      rows: Rows with their predictions.
      some: Name of a group that is hard to predict.
      holds: Function that tells whether a row belongs to it.
    """
    groups = {"all": lambda row: True, some: holds}
    for key in ("file", "layout", "rate"):
        if key not in rows[0]:
            continue
        for value in dict.fromkeys(row[key] for row in rows):
            groups[value] = lambda row, key=key, value=value: row[key] == value
    for value in figures.in_order({row["system"] for row in rows}):
        groups[value] = lambda row, value=value: row["system"] == value
    found = {name: [row for row in rows if holds(row)] for name, holds in groups.items()}
    harness.show([HEADER, *(summary(name, own) for name, own in found.items() if own)])


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=GRID, help="answers of benchmarks.exchange")
    parser.add_argument("--worst", type=int, default=0, help="number of errors to list (0)")
    parser.add_argument("--steps", action="store_true", help="compare steps, not exchanges")
    options = parser.parse_args()
    if not options.results.exists():
        parser.error(
            f"there must be measured exchanges. Received: {options.results}, which is missing. Run "
            "python -m benchmarks.exchange --full --results docs/results/exchange_grid.json"
        )
    rows = measured(json.loads(options.results.read_text()))
    if options.steps:
        found = list(compared_steps(rows))
        show(found, "communication shows", lambda row: row["shows"])
    else:
        found = list(compared(rows))
        name = f"link below {LINK_BOUND:.0%} of the time"
        show(found, name, lambda row: row["link_share"] < LINK_BOUND)
    show_worst(found, options.worst)


if __name__ == "__main__":
    main()
