"""Redraws the plots of docs/results from the JSON files in that folder; nothing is measured.

    python -m benchmarks.redraw                    # all plots, a few seconds
    python -m benchmarks.redraw scaling exchange   # some of them

Each benchmark also draws its plot when it ends. Plots require Matplotlib: `pip install -e
'.[plots]'`.
"""

import argparse
import json

from benchmarks import (
    accuracy,
    auto,
    cold_starts,
    dawnbench,
    elastic_averaging,
    exchange,
    gpu,
    harness,
    hitopk_steps,
    large_batch,
    links,
    local_accuracy,
    local_updates,
    memory,
    norms,
    overview,
    poseidon,
    predict,
    reading,
    scaling,
    selection,
    wrapper,
    xla,
)

PLOTS = {
    "accuracy": (accuracy.plot, ["accuracy"]),
    "auto": (auto.plot, ["auto"]),
    "cold_starts": (cold_starts.plot, ["cold_starts"]),
    "dawnbench": (dawnbench.plot, ["dawnbench"]),
    "elastic_averaging": (elastic_averaging.plot, ["elastic_averaging"]),
    "exchange": (exchange.plot, ["exchange"]),
    "gpu": (gpu.plot, ["gpu"]),
    "hitopk_steps": (hitopk_steps.plot, ["hitopk_steps"]),
    "large_batch": (large_batch.plot, ["large_batch"]),
    "links": (links.plot, ["links"]),
    "local_updates": (local_updates.plot, ["local_updates"]),
    "local_accuracy": (local_accuracy.plot, ["local_accuracy"]),
    "memory": (memory.plot, ["memory"]),
    "norms": (norms.plot, ["norms"]),
    "onebit_accuracy": (accuracy.plot, ["onebit_accuracy"]),
    "overview": (overview.plot, ["overview"]),
    "poseidon": (poseidon.plot, ["poseidon"]),
    "predict": (predict.plot, ["exchange_grid"]),
    "reading": (reading.plot, ["reading"]),
    "scaling": (scaling.plot, ["scaling", "sparse_scaling"]),
    "selection": (selection.plot, ["selection"]),
    "sparse_accuracy": (accuracy.plot, ["sparse_accuracy"]),
    "sparse_exchange": (exchange.plot, ["sparse_exchange"]),
    "sparse_scaling": (scaling.plot, ["sparse_scaling"]),
    "wrapper": (wrapper.plot, ["wrapper"]),
    "xla": (xla.plot, ["xla"]),
}
"""Function and result files of each plot."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "plots", nargs="*", metavar="NAME", help=f"plots to draw: {', '.join(PLOTS)} (all)"
    )
    for name in parser.parse_args().plots or PLOTS:
        draw, files = PLOTS[name]
        cells = {}
        for file in files:
            cells |= json.loads((harness.RESULTS / f"{file}.json").read_text())
        draw(cells, harness.RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
