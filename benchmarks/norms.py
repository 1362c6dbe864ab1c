"""Times the norms of all layers: native and TensorFlow's ops, on every rank and in parallel.

    python -m benchmarks.norms            # short: ResNet-50, 4 ranks
    python -m benchmarks.norms --full     # and CommLib's Transformer; 4, 8, 16 ranks; 10 minutes

LARS needs the norms of each variable and of its gradient. The parallel time (CommLib, section 5.4)
is the time of the largest share, computed on an idle machine, plus that of the all-gather of the
results. Concurrent shares are measured, too, but 16 ranks share two CPU cores here, so each takes
eight times as long as on its own machine. An interrupted run resumes.
"""

import math
import statistics
import time

import tensorflow as tf

from benchmarks import architectures, figures, harness
from tfposeidon import ops

SHORT = {"models": ["resnet50"], "layouts": ["4x1"]}
FULL = {"models": ["resnet50", "transformer_110m"], "layouts": ["4x1", "8x1", "16x1", "2x2", "4x4"]}
SMALLEST = {"models": ["googlenet"], "layouts": ["2x1"]}
RATE = "10gbit"
ROUNDS = 21


def parse_arguments():
    parser = harness.argument_parser("norms", __doc__)
    parser.add_argument(
        "--models",
        nargs="*",
        choices=sorted(architectures.MODELS),
        help="models whose variables are used",
    )
    parser.add_argument(
        "--layouts", nargs="*", metavar="MxN", help="clusters, as nodes x ranks per node"
    )
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns library and op jobs per model, and parallel jobs per model and layout."""
    jobs = [
        {"kind": kind, "model": model} for model in options.models for kind in ("library", "op")
    ]
    jobs += [
        {"kind": "parallel", "model": m, "layout": layout}
        for m in options.models
        for layout in options.layouts
    ]
    return harness.keyed(jobs)


def run(kind, model, **more):
    return {"library": library, "op": op, "parallel": parallel}[kind](model, **more) | {
        "kind": kind,
        "model": model,
    }


def library(model):
    """Measures the library's norms and one read, in the compiled program."""
    return harness.native("norms", *(math.prod(shape) for shape in shapes(model) * 2))


def op(model):
    """Times the native op and two TensorFlow ops, alternately, on values and gradients."""
    tensors = [
        tf.convert_to_tensor(variable) for variable in (*drawn(model), *drawn(model, seed=1))
    ]
    calls = {
        "native": lambda: ops.l2_norms(tensors),
        "tensorflow": lambda: tf.stack([tf.norm(tensor) for tensor in tensors]),
        "l2_loss": lambda: tf.sqrt(2.0 * tf.stack([tf.nn.l2_loss(tensor) for tensor in tensors])),
    }
    compiled = {name: tf.function(call, autograph=False) for name, call in calls.items()}
    times = {name: [] for name in compiled}
    # The first two turns trace and warm up.
    for turn in range(ROUNDS + 2):
        for name, call in compiled.items():
            begin = time.perf_counter()
            call().numpy()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}


def parallel(model, layout):
    """Measures shares of the norms and their all-gather on ranks of the lab."""
    answer = harness.in_lab(
        harness.cluster(layout, RATE), "norms", {"model": model, "rounds": ROUNDS}
    )
    return answer | {"layout": layout}


def shapes(model):
    """Returns the shapes of a model's variables, in the order of the layers."""
    return [
        shape
        for layer in architectures.model(model).layers
        for shape in (layer.kernel, *((n,) for n in layer.vectors))
    ]


def drawn(model, seed=0):
    """Returns variables with random values in the shapes of a model."""
    return [
        tf.Variable(tf.random.stateless_normal(shape, [i, seed]))
        for i, shape in enumerate(shapes(model))
    ]


# -------------------------------------------------------------------- tables


def show(cells):
    """Prints tables of library, op and ranks in parallel."""
    own = {
        kind: [cell for cell in cells.values() if cell["kind"] == kind]
        for kind in ("library", "op", "parallel")
    }
    if own["library"]:
        print("\nlibrary, compared with one read of the same values")
        header = ("model", "tensors", "values", "one read", "norms", "norms / read")
        harness.show([header, *map(library_row, own["library"])])
    if own["op"]:
        print("\nop, compared with tf.norm of each tensor, and the root of twice tf.nn.l2_loss")
        header = (
            "model",
            "tf.norm",
            "l2_loss",
            "l2_norms",
            "tf.norm / l2_norms",
            "l2_loss / l2_norms",
        )
        harness.show([header, *map(op_row, own["op"])])
    if own["parallel"]:
        print(f"\nin parallel, {RATE} between nodes: the largest share, and the all-gather")
        header = (
            "model",
            "ranks",
            "all on every rank",
            "share",
            "all-gather",
            "in parallel",
            "ratio",
        )
        header += ("faster from", "all ranks busy: on every rank", "in parallel")
        harness.show([header, *map(parallel_row, own["parallel"])])


OPS = ("tensorflow", "l2_loss", "native")
"""Ops to compare, ours last."""


def library_row(cell):
    sizes = shapes(cell["model"]) * 2
    values = sum(math.prod(shape) for shape in sizes)
    times = (f"{1e3 * cell[name]:.2f} ms" for name in ("read_s", "norms_s"))
    ratio = cell["norms_s"] / cell["read_s"]
    return (cell["model"], str(len(sizes)), f"{values / 1e6:.1f} M", *times, f"{ratio:.2f}")


def op_row(cell):
    names = [f"{name}_s" for name in OPS]
    times = [f"{1e3 * cell[name]:.2f} ms" if name in cell else "" for name in names]
    ratios = [f"{cell[name] / cell['native_s']:.1f}" if name in cell else "" for name in names[:-1]]
    return (cell["model"], *times, *ratios)


def parallel_row(cell):
    seconds = {
        name: statistics.median(measured["step_s"]) for name, measured in cell["systems"].items()
    }
    both_s = seconds["share"] + seconds["all-gather"]
    milliseconds = {name: f"{1e3 * time_s:.2f} ms" for name, time_s in seconds.items()}
    return (
        cell["model"],
        cell["layout"],
        milliseconds["local"],
        milliseconds["share"],
        milliseconds["all-gather"],
        f"{1e3 * both_s:.2f} ms",
        f"{seconds['local'] / both_s:.2f}",
        f"{1e3 * crossover(seconds):.2f} ms",
        milliseconds["all local"],
        milliseconds["all in parallel"],
    )


def crossover(seconds):
    """Returns the time of norms on one rank from which the parallel form is not slower.

    Args:
      seconds: Measured seconds of "local", "share" and "all-gather".

    >>> crossover({"local": 8.0, "share": 2.0, "all-gather": 3.0})
    4.0
    """
    return seconds["all-gather"] / (1 - seconds["share"] / seconds["local"])


LINES = {
    "local": {
        "label": "every rank computes all norms",
        "color": figures.BASELINE,
        "linewidth": 2.4,
    },
    "share": {"label": "largest share of a rank", "color": figures.PARTS[1], "linewidth": 1.4},
    "all-gather": {"label": "all-gather of shares", "color": figures.PARTS[2], "linewidth": 1.4},
    "both": {
        "label": "in parallel: share + all-gather",
        "color": figures.PARTS[0],
        "linewidth": 2.4,
    },
}


def plot(cells, path):
    """Plots time in parallel and alone over the number of ranks, one panel for each model."""
    parallel = [cell for cell in cells.values() if cell["kind"] == "parallel"]
    names = list(dict.fromkeys(cell["model"] for cell in parallel))

    def draw(figure, axes):
        for axis, name in zip(axes, names, strict=True):
            own = {
                int(cell["layout"].partition("x")[0]): milliseconds(cell)
                for cell in parallel
                if cell["model"] == name and cell["layout"].endswith("x1")
            }
            ranks = sorted(own)
            for system, style in LINES.items():
                times = [own[count][system] for count in ranks]
                axis.plot(ranks, times, marker="o", **style)
            axis.set(
                title=figures.MODELS.get(name, name),
                xlabel="ranks, one per node",
                ylabel="milliseconds for all norms of a step",
                ylim=(0, None),
                xticks=ranks,
            )
            axis.grid(axis="y")
        figure.suptitle(
            f"norms of all variables and all gradients; {figures.rate(RATE)} between nodes"
        )
        figures.legend(figure, more=[LINES[name]["label"] for name in ("local", "both")], columns=2)

    if names:
        figures.save(path, len(names), draw, height_in=3.6)


def milliseconds(cell):
    """Returns medians of the times of a job, and the sum of those of share and all-gather."""
    found = {
        name: 1e3 * statistics.median(measured["step_s"])
        for name, measured in cell["systems"].items()
    }
    return found | {"both": found["share"] + found["all-gather"]}


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
