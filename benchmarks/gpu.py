"""Compares the native library on a CUDA GPU with memory copies and PyTorch's `topk`.

    python -m benchmarks.gpu           # short: 25.6 M elements
    python -m benchmarks.gpu --full    # 256 K to 128 M elements; two minutes

The benchmark requires a GPU and nvcc, but not TensorFlow; it also measures PyTorch, if installed.
Each time is compared with its minimum: the bytes that must be read and written, at the bandwidth of
a copy of the same vector in the same run. An interrupted run resumes.
"""

import itertools
import shutil
import statistics
import sys
import time

from benchmarks import figures, harness

LAPLACE, MIXTURE = "laplace", "mixture"
COMMON = {"densities": [0.001, 0.01], "distributions": [LAPLACE, MIXTURE]}
SHORT = COMMON | {"elements": [25_557_032]}
FULL = COMMON | {"elements": [2**18, 2**20, 2**22, 2**24, 25_557_032, 2**27]}
SMALLEST = {"elements": [2**14], "densities": [0.01], "distributions": [LAPLACE]}
ROUNDS = 21


def parse_arguments():
    parser = harness.argument_parser("gpu", __doc__)
    parser.add_argument("--elements", nargs="*", type=int, help="lengths of the vectors")
    parser.add_argument("--densities", nargs="*", type=float, help="selected fractions")
    parser.add_argument("--distributions", nargs="*", choices=COMMON["distributions"])
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per distribution, length and density."""
    names = ("distribution", "elements", "density")
    cases = itertools.product(options.distributions, options.elements, options.densities)
    return harness.keyed(dict(zip(names, case, strict=True)) for case in cases)


def run(distribution, elements, density):
    """Measures one vector."""
    found = harness.native("gpu", elements, density, distribution, cuda=True)
    return (
        found
        | in_pytorch(elements, found["k"])
        | {"distribution": distribution, "elements": elements, "density": density}
    )


def in_pytorch(elements, k):
    """Returns seconds of PyTorch's selection by magnitude; without PyTorch, an empty dictionary."""
    try:
        import torch
    except ImportError:
        return {}
    x = torch.distributions.Laplace(0.0, 1e-3).sample((elements,)).cuda()
    residual = x.flip(0)

    def select():
        return x[torch.topk(x.abs(), k, sorted=False).indices]

    def feedback():
        total = residual + x
        indices = torch.topk(total.abs(), k, sorted=False).indices
        values = total[indices]
        total[indices] = 0
        return values, total

    calls = {"pytorch_s": select, "pytorch_feedback_s": feedback}
    seconds = {name: [] for name in calls}
    for turn, (name, call) in itertools.product(range(-3, ROUNDS), calls.items()):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn >= 0:
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


PASSES = {
    "exact": 1,
    "mstopk": 2,
    "pytorch": 1,
    "feedback": 3,
    "pytorch_feedback": 3,
    "correction": 5,
    "scatter": 1,
    "encode": 1.5,
    "sum_rows": 0.75,  # Four 16-bit rows, each a quarter of the vector, and their float32 sum.
    "norms": 1,
}
"""Bytes that each operation must read and write, as a multiple of the vector; a copy has 2."""


def least_s(cell, name):
    """Returns the minimum seconds of an operation at the bandwidth of a copy.

    >>> least_s({"copy_s": 2.0}, "feedback")
    3.0
    """
    return PASSES[name] / 2 * cell["copy_s"]


LABELS = {
    "exact": "exact",
    "mstopk": "mstopk",
    "pytorch": "PyTorch's topk",
    "feedback": "feedback",
    "pytorch_feedback": "PyTorch's",
    "correction": "correction",
    "scatter": "scatter of 16",
    "encode": "to 16 bits",
    "sum_rows": "sum of 4",
    "norms": "norms",
}


def show(cells):
    """Prints a table per GPU: microseconds, and multiples of the minimum."""
    for gpu in dict.fromkeys(cell["gpu"] for cell in cells.values()):
        print(
            f"\n{gpu}: microseconds; in brackets: multiples of the minimum at the copy's bandwidth"
        )
        header = ("values", "elements", "density", "copy", *LABELS.values(), "memory")
        own = [cell for cell in cells.values() if cell["gpu"] == gpu]
        harness.show([header, *map(row, own)])


def row(cell):
    """Returns the table row of a vector."""

    def told(name):
        if f"{name}_s" not in cell:
            return ""
        taken_s = cell[f"{name}_s"]
        return f"{1e6 * taken_s:,.0f} ({taken_s / least_s(cell, name):.1f})"

    return (
        cell["distribution"],
        f"{cell['elements'] / 1e6:.2f} M",
        f"{cell['density']:g}",
        f"{1e6 * cell['copy_s']:,.0f}",
        *map(told, LABELS),
        f"{cell['memory_bytes'] / 1e6:.1f} MB",
    )


LINES = {
    "exact": {"label": "exact", "color": figures.PARTS[0], "linewidth": 2.2},
    "mstopk": {"label": "MSTopK", "color": figures.PARTS[1], "linewidth": 2.2},
    "feedback": {"label": "exact with error feedback", "color": figures.PARTS[3], "linewidth": 2.2},
    "pytorch": {"label": "PyTorch's topk", "color": figures.BASELINE, "linestyle": "--"},
    "pytorch_feedback": {"label": "PyTorch's topk with error feedback", "color": "black"}
    | {"linestyle": "--", "linewidth": 1},
    "copy": {"label": "a copy", "color": "black", "linewidth": 1, "linestyle": ":"},
}

MILLIONS, MILLISECONDS = (0.25, 1, 4, 16, 64), (0.01, 0.03, 0.1, 0.3, 1, 3)
"""Ticks of the axes."""


def plot(cells, path):
    """Plots times over the length, with a panel per density."""
    densities = sorted({cell["density"] for cell in cells.values()})

    def draw(figure, axes):
        for axis, density in zip(axes, densities, strict=True):
            own = sorted(
                (
                    cell
                    for cell in cells.values()
                    if (cell["density"], cell["distribution"]) == (density, LAPLACE)
                ),
                key=lambda cell: cell["elements"],
            )
            for name, style in LINES.items():
                points = [
                    (cell["elements"] / 1e6, 1e3 * cell[f"{name}_s"])
                    for cell in own
                    if f"{name}_s" in cell
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(MILLIONS, [f"{size:g}" for size in MILLIONS])
            axis.set_yticks(MILLISECONDS, [f"{size:g}" for size in MILLISECONDS])
            axis.minorticks_off()
            axis.set(
                title=f"top {100 * density:g} %", xlabel="million elements", ylabel="milliseconds"
            )
            axis.grid(axis="y")
        gpus = sorted({cell["gpu"] for cell in cells.values()})
        figures.legend(figure, columns=3, title=f"{', '.join(gpus)}; solid: tfposeidon")

    figures.save(path, len(densities), draw)


def main():
    options = parse_arguments()
    if shutil.which("nvidia-smi") is None:
        sys.exit("benchmarks.gpu requires a CUDA GPU. Received: no nvidia-smi on PATH.")
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
