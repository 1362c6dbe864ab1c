"""Reads the grid of exchanges: times, and the network profiles and speeds of ranks."""

import dataclasses
import statistics

from benchmarks import exchange
from benchmarks.exchanges import DENSITIES, PRODUCT_ROWS
from tfposeidon.autotune import measurement
from tfposeidon.autotune.measurement import LONG_ENOUGH_S, probes_of
from tfposeidon.communication.topology import Topology
from tfposeidon.text import parse_rate

SMALL, LARGE = 2**8, (2**14, 2**20, 2**24)
"""Lengths of the collectives that determine latencies, and of those that determine bandwidths."""
WORK, NO_WORK = 2**22, 2**16
PAIRS = tuple(round(DENSITIES[kind] * WORK) for kind in ("select", "select_many"))
"""Lengths of the local work that determines the speed of a rank, and pairs in this work."""
HALF_PER_SUM = 45.0
"""Time of a float16 sum in Horovod's ring, relative to a float32 sum; fitted."""
MEASURED_NEAR = {"100mbit": "200mbit"}
"""Rate without measured single collectives -> the rate whose measurements are scaled instead."""


def topology_of(layout):
    """Returns the ranks of a layout such as "4x2"."""
    nodes, per_node = map(int, layout.split("x"))
    return Topology.regular(0, nodes * per_node, per_node)


def measured(cells):
    """Returns the rows of `exchange.rows`, by layout, rate, system and size."""
    return {
        (cell["layout"], cell["rate"], row["system"], row["size"]): row
        for cell in cells.values()
        if not cell.get("flow")
        for row in exchange.rows(cell)
    }


def links_of(rows, layout, rate):
    """Returns the network profile from single collectives, or `None` if some are missing.

    Args:
      rows: Result of `measured`.
      layout: "MxN", nodes x ranks on each.
      rate: Bandwidth between nodes, such as "200mbit", or "unshaped".
    """
    if (layout, "unshaped", exchange.LOCAL_WORK[-1], str(WORK)) not in rows:
        # The layout is not completely measured.
        return None
    topology, near = topology_of(layout), MEASURED_NEAR.get(rate, rate)
    probes, samples = [], {}
    for one in probes_of(topology):
        if one.name == "rate.flow":
            # The grid was measured without a limit per connection.
            continue
        name, find = collective_name(one, topology), large_time if one.tells_rate else small_time
        found = find(rows, layout, near, name)
        if found is None and one.name == "rate.half":
            # The first layouts of the grid were measured without this probe.
            continue
        if found is None:
            return None
        length, seconds = found
        probes.append(dataclasses.replace(one, length=length))
        samples[one.name] = [seconds - overhead_s(rows, layout)]
    links = measurement.estimate_links(probes, samples, topology, rates_of(rows, layout))
    # Each time is already a median, so assume no uncertainty.
    links = dataclasses.replace(links, uncertainty=0.0)
    if near == rate:
        return links
    factor = parse_rate(rate) / parse_rate(near)
    across = dataclasses.replace(links.across, bytes_per_s=factor * links.across.bytes_per_s)
    return dataclasses.replace(links, across=across)


def small_time(rows, layout, rate, name):
    """Returns length and seconds of a collective dominated by latency, or `None`.

    The time hardly depends on bytes, so the median over all rates is more accurate.
    """
    found = [
        row["time_s"]
        for other in exchange.RATES
        if (row := rows.get((layout, other, name, str(SMALL))))
    ]
    return (SMALL, statistics.median(found)) if found else None


def large_time(rows, layout, rate, name):
    """Returns length and seconds of the shortest collective that takes as long as a probe.

    If none takes that long, returns the longest one; without any collective, `None`.
    """
    _, latency_s = small_time(rows, layout, rate, name) or (SMALL, 0.0)
    found = [
        (length, row["time_s"])
        for length in LARGE
        if (row := rows.get((layout, rate, name, str(length))))
    ]
    long = [one for one in found if one[1] >= latency_s + LONG_ENOUGH_S]
    return (long or found[-1:] or [None])[0]


def collective_name(one, topology):
    """Returns the name of a probe's collective in `benchmarks.exchange`, as "all_gather@world"."""
    group = one.groups[topology.rank]
    kind = next(kind for kind in ("world", "node", "across") if getattr(topology, kind) == group)
    return f"{one.operation}{'16' if one.dtype == 'float16' else ''}@{kind}"


def overhead_s(rows, layout):
    """Returns the seconds of an empty function, which all measured times include."""
    return rows[layout, "unshaped", "nothing@work", str(NO_WORK)]["time_s"]


def rates_of(rows, layout):
    """Returns the speed of a rank while all ranks of the lab work.

    Args:
      rows: Result of `measured`.
      layout: "MxN", nodes x ranks on each.
    """
    times = {
        kind: rows[layout, "unshaped", f"{kind}@work", str(WORK)]["time_s"]
        - overhead_s(rows, layout)
        for kind in ("sum", "encode", "select", "select_many", "multiply")
    }
    rates = measurement.rates_of(times, WORK, PAIRS, (PRODUCT_ROWS, round(WORK**0.5)))
    # The fit replaces `half_s` if a float16 all-reduce was measured.
    return dataclasses.replace(rates, half_s=HALF_PER_SUM * rates.sum_s)


def links_at(rows, layout, bits_per_s):
    """Returns the network profile of a layout at a rate that the grid does not contain.

    Latencies and compute speeds are those of the unshaped network, and the share of the rate that
    is achieved is that at 200 Mb/s.
    """
    links, shaped = links_of(rows, layout, "unshaped"), links_of(rows, layout, "200mbit")
    if links is None or shaped is None:
        return None
    factor = bits_per_s / parse_rate("200mbit")
    across = dataclasses.replace(shaped.across, bytes_per_s=factor * shaped.across.bytes_per_s)
    return dataclasses.replace(links, across=across)
