"""Measures the accuracy of a job's network profile, compared with the rates set in the lab.

    python -m benchmarks.links            # short: 2 x 2 ranks, 200 Mb/s
    python -m benchmarks.links --full     # 2x1 to 4x4 ranks, 100 Mb/s to 1 Gb/s; 15 minutes

Each job measures its profile several times, as `tp.init()` does, without load and with a process
that keeps one core busy. Rates are compared with the lab's, and latencies with the median of the
measurements without load. An interrupted run resumes.
"""

import itertools
import statistics

from benchmarks import figures, harness
from tfposeidon.communication.network_profile import HEADERS
from tfposeidon.text import parse_rate

REPEATS = 7
FARTHEST = 8.0
"""Largest ratio that the plot shows; its inverse is the smallest."""
SYSTEMS = ("quiet", "loaded")
COMMON = {"repeats": REPEATS, "systems": SYSTEMS}
SHORT = COMMON | {"layouts": ["2x2"], "rates": ["200mbit"]}
FULL = COMMON | {
    "layouts": ["2x1", "4x1", "2x2", "8x1", "4x2", "16x1", "4x4"],
    "rates": ["100mbit", "200mbit", "1gbit"],
}
SMALLEST = {"layouts": ["2x1"], "rates": ["1gbit"], "repeats": 2, "systems": SYSTEMS}
ASKED_FOR = {"quiet": {"rate": 0.10, "latency": 0.25}, "loaded": {"rate": 0.20, "latency": 0.50}}
"""Targets for relative errors, for up to 8 ranks."""


def parse_arguments():
    parser = harness.argument_parser("links", __doc__)
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    parser.add_argument("--rates", nargs="*", help="rates of the links between nodes")
    parser.add_argument("--repeats", type=int, help=f"measurements of each kind ({REPEATS})")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per cluster."""
    return harness.keyed(
        {"layout": layout, "rate": rate, "repeats": options.repeats}
        for layout, rate in itertools.product(options.layouts, options.rates)
    )


def run(layout, rate, repeats):
    """Measures the network profile of one cluster."""
    task = {"systems": SYSTEMS, "repeats": repeats}
    answer = harness.in_lab(harness.cluster(layout, rate), "links", task)
    return answer | {"layout": layout, "rate": rate}


def rows(cells):
    """Yields the results of each job, without and with a load.

    Args:
      cells: Answers of `run`, by key.
    """
    for cell in cells.values():
        given_bytes_per_s = parse_rate(cell["rate"]) / 8 / HEADERS
        quiet = [links["across"]["latency_s"] for links in cell["systems"]["quiet"]["links"]]
        latency_s = statistics.median(quiet)
        for system, found in cell["systems"].items():
            across = [links["across"] for links in found["links"]]
            rates = [link["bytes_per_s"] / given_bytes_per_s - 1 for link in across]
            latencies = [link["latency_s"] / latency_s - 1 for link in across]
            yield {
                "layout": cell["layout"],
                "rate": cell["rate"],
                "system": system,
                "rate_errors": rates,
                "latency_errors": latencies,
                "latency_s": statistics.median(link["latency_s"] for link in across),
                "uncertainty": statistics.median(links["uncertainty"] for links in found["links"]),
                "took_s": statistics.median(found["step_s"]),
                "longest_s": max(found["step_s"]),
            }


def share_within(errors, limit):
    """Returns the share of errors up to a limit."""
    return sum(abs(error) <= limit for error in errors) / len(errors)


def show(cells):
    """Prints a line per cluster, without and with a load."""
    header = (
        *("ranks", "rate", "", "rate, median", "worst", "within", "latency", "worst", "within"),
        *("uncertainty", "seconds", "longest"),
    )
    harness.show([header, *map(cells_of, rows(cells))])
    print(
        "\nwithin: rates within 10 % and latencies within 25 %; with a load on one core 20 and 50 %"
    )


def cells_of(row):
    asked_for = ASKED_FOR[row["system"]]
    rates, latencies = row["rate_errors"], row["latency_errors"]
    return (
        *(row["layout"], row["rate"], row["system"]),
        f"{statistics.median(rates):+.0%}",
        f"{max(rates, key=abs):+.0%}",
        f"{share_within(rates, asked_for['rate']):.0%}",
        f"{1e6 * row['latency_s']:.0f} us",
        f"{max(latencies, key=abs):+.0%}",
        f"{share_within(latencies, asked_for['latency']):.0%}",
        f"{row['uncertainty']:.0%}",
        f"{row['took_s']:.1f} s",
        f"{row['longest_s']:.1f} s",
    )


def plot(cells, path):
    """Plots measured rates and latencies relative to their references, a point per measurement."""
    found = list(rows(cells))
    panels = ("rate", "latency")
    titles = ("measured rate / rate of the lab", "measured latency / median without load")

    def draw(figure, axes):
        names = list(dict.fromkeys((row["layout"], row["rate"]) for row in found))
        for axis, panel, title in zip(axes, panels, titles, strict=True):
            for row, color in itertools.product(found, COLORS.items()):
                system, (shade, offset) = color
                if row["system"] == system:
                    height = names.index((row["layout"], row["rate"])) + offset
                    # Larger errors are drawn at the edge.
                    errors = [
                        min(max(1 + error, 1 / FARTHEST), FARTHEST)
                        for error in row[f"{panel}_errors"]
                    ]
                    label = system if row is found[offset > 0] else None
                    axis.plot(errors, [height] * len(errors), "o", color=shade, ms=4, label=label)
            limit = ASKED_FOR["quiet"][panel]
            axis.axvspan(1 - limit, 1 + limit, color="#e8e8e8", zorder=0)
            texts = [f"{layout.replace('x', ' x ')}, {rate}" for layout, rate in names]
            axis.set_yticks(range(len(names)), texts)
            axis.set(title=title, xscale="log", ylim=(len(names) - 0.4, -0.6))
            axis.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", *"1248"])
            axis.minorticks_off()
            axis.tick_params(labelleft=axis is axes[0])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)

    rows_of_plot = len({(row["layout"], row["rate"]) for row in found})
    figures.save(path, len(panels), draw, height_in=1.2 + 0.25 * rows_of_plot)


COLORS = {"quiet": ("#0072b2", -0.12), "loaded": ("#d55e00", 0.12)}
"""Color of each kind of point, and its offset from the line."""


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
