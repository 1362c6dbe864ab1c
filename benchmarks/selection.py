"""Compares selection, error feedback and scatter-add with one pass over the same data.

    python -m benchmarks.selection           # short: 4 M and 25.6 M elements
    python -m benchmarks.selection --full    # 256 K to 128 M, four kinds of values; 12 minutes

Selection is compared with one read, error feedback with one addition, and scatter-add with one zero
fill. The C++ library is compiled and measured alone; the ops are measured inside TensorFlow, with
TensorFlow's own selection. Ratios compare functions that alternate in one run. An interrupted run
resumes.
"""

import itertools
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from benchmarks import figures, harness
from tfposeidon import ops

SHORT = {"elements": [2**22, 25_557_032], "distributions": ["laplace"]}
FULL = {
    "elements": [2**18, 2**20, 2**22, 2**24, 25_557_032, 2**27],
    "distributions": ["laplace", "cauchy", "mixture", "gradient"],
}
DENSITIES = (0.001, 0.01)
SMALLEST = {"elements": [2**12], "distributions": ["laplace"], "densities": [0.01]}
# Longest vector for TensorFlow's own selection, which takes seconds for longer ones.
MOST_FOR_TENSORFLOW = 2**25
ROUNDS = 15


def parse_arguments():
    parser = harness.argument_parser("selection", __doc__)
    parser.add_argument("--elements", nargs="*", type=int, help="lengths of the vectors")
    parser.add_argument(
        "--distributions",
        nargs="*",
        choices=FULL["distributions"],
        help="distributions of the values",
    )
    common = {"densities": DENSITIES}
    return harness.parse(parser, common | SHORT, common | FULL, SMALLEST)


def planned(options):
    """Returns one job per library or ops, distribution, length and density."""
    cases = itertools.product(
        ("library", "ops"), options.distributions, options.elements, options.densities
    )
    return harness.keyed(
        dict(zip(("kind", "distribution", "elements", "density"), case, strict=True))
        for case in cases
    )


def run(kind, distribution, elements, density):
    """Measures one vector, and prints a line with ratios."""
    measured = {"library": library, "ops": in_tensorflow}[kind](distribution, elements, density)
    read_s, add_s, zero_s = (measured[f"{name}_s"] for name in ("read", "add", "zero"))
    print(
        f"    exact {measured['exact_s'] / read_s:.2f} reads, "
        f"mstopk {measured['mstopk_s'] / read_s:.2f} reads, "
        f"feedback {measured['feedback_s'] / add_s:.2f} additions, "
        f"scatter {measured['scatter_s'] / zero_s:.2f} fills"
    )
    return measured | {
        "kind": kind,
        "distribution": distribution,
        "elements": elements,
        "density": density,
    }


# ------------------------------------------------------------------- library


def library(distribution, elements, density):
    """Measures the compiled library."""
    if distribution == "gradient":
        return harness.native(
            "selection", elements, density, "file", more=[drawn(distribution, elements)]
        )
    return harness.native("selection", elements, density, distribution)


# ----------------------------------------------------------------------- ops


def in_tensorflow(distribution, elements, density):
    """Measures our ops and TensorFlow's on one vector, and the quality of each method."""
    k = max(1, round(density * elements))
    x, residual = (
        tf.constant(drawn(distribution, elements)),
        tf.constant(drawn(distribution, elements, seed=1)),
    )
    ranks = 16
    counts = [k] * ranks
    indices = tf.concat(
        [
            ops.top_k(tf.random.stateless_normal([elements], [r, 0]), k, "exact")[1]
            for r in range(ranks)
        ],
        0,
    )
    sent = tf.ones([ranks * k])
    # Use a variable, because TensorFlow would fill a constant vector only once, while it traces.
    level = tf.Variable(0.0)
    calls = {
        "read": lambda: tf.reduce_max(x),
        "exact": lambda: ops.top_k(x, k, "exact"),
        "mstopk": lambda: ops.top_k(x, k, "mstopk"),
        "dgc": lambda: ops.top_k(x, k, "dgc"),
        "add": lambda: residual + x,
        "feedback": lambda: ops.error_feedback_top_k(residual, x, k, "exact"),
        "zero": lambda: tf.fill([elements], level),
        "scatter": lambda: ops.scatter_add(sent, indices, elements, counts),
    }
    if elements <= MOST_FOR_TENSORFLOW:
        calls["tensorflow"] = lambda: tf.math.top_k(tf.abs(x), k)
        calls["tensorflow_scatter"] = lambda: tf.math.unsorted_segment_sum(sent, indices, elements)
    compiled = {name: tf.function(call, autograph=False) for name, call in calls.items()}
    times = {name: [] for name in compiled}
    # The first two turns trace and warm up.
    for turn in range(ROUNDS + 2):
        for name, call in compiled.items():
            # Use fewer repetitions for TensorFlow's ops, which take much longer.
            if name.startswith("tensorflow") and turn > 5:
                continue
            begin = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    measured = {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}
    return measured | kept(x, k)


def kept(x, k):
    """Returns each method's recall of the largest elements, and its share of the vector's norm."""
    largest = set(ops.top_k(x, k, "exact")[1].numpy().tolist())
    norm = float(tf.norm(tf.cast(x, tf.float64)))
    figures = {}
    for method in ops.METHODS:
        values, indices = ops.top_k(x, k, method)
        share = float(tf.norm(tf.cast(values, tf.float64))) / norm
        figures[method] = {
            "recall": len(largest & set(indices.numpy().tolist())) / k,
            "norm": share,
        }
    return {"kept": figures}


# -------------------------------------------------------------------- values


def drawn(distribution, elements, seed=0):
    """Returns `[elements]` float32 values of a distribution."""
    generator = np.random.default_rng([seed, elements])
    if distribution == "laplace":
        return generator.laplace(scale=1e-3, size=elements).astype("float32")
    if distribution == "cauchy":
        return (1e-3 * generator.standard_cauchy(elements)).astype("float32")
    if distribution == "mixture":
        scale = np.where(generator.random(elements) < 0.01, 1e-1, 1e-4)
        return (scale * generator.normal(size=elements)).astype("float32")
    return real_gradient(elements, seed)


def real_gradient(elements, seed):
    """Returns a gradient of a network on scikit-learn's digits after a few steps.

    The network is wide enough for 26 M weights; longer vectors repeat its gradient.
    """
    from sklearn.datasets import load_digits

    keras.utils.set_random_seed(seed)
    images, labels = load_digits(return_X_y=True)
    layers = [keras.layers.Dense(3580, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    model.fit(images[:640] / 16, labels[:640], batch_size=64, verbose=0)
    with tf.GradientTape() as tape:
        value = loss(labels[640:704], model(images[640:704] / 16))
    gradient = np.concatenate(
        [
            g.numpy().ravel()
            for g in tape.gradient(value, [v.value for v in model.trainable_variables])
        ]
    )
    # Roll the gradient, so that short vectors have values of several layers.
    return np.resize(np.roll(gradient, -len(gradient) // 3), elements)


# -------------------------------------------------------------------- tables


def show(cells):
    """Prints tables of library and ops."""
    for kind in ("library", "ops"):
        own = [cell for cell in cells.values() if cell["kind"] == kind]
        if own:
            print(
                f"\n{kind}: exact, mstopk, dgc, TensorFlow in reads; feedback in additions; "
                "scatter-add in zero fills"
            )
            header = (
                "values",
                "elements",
                "density",
                "read",
                "exact",
                "mstopk",
                "mstopk / exact",
                "dgc",
                "TensorFlow",
            )
            header += (
                "addition",
                "feedback",
                "zero fill",
                "scatter",
                "recall, norm of mstopk",
                "norm of exact",
            )
            harness.show([header, *map(cells_of, own)])


def cells_of(cell):
    def milliseconds(name):
        return f"{1e3 * cell[f'{name}_s']:.2f} ms"

    def ratio(name, to):
        return f"{cell[f'{name}_s'] / cell[f'{to}_s']:.2f}" if f"{name}_s" in cell else ""

    kept = cell.get("kept")
    return (
        cell["distribution"],
        f"{cell['elements'] / 1e6:.2f} M",
        f"{cell['density']:g}",
        milliseconds("read"),
        *(ratio(name, "read") for name in ("exact", "mstopk")),
        ratio("mstopk", "exact"),
        *(ratio(name, "read") for name in ("dgc", "tensorflow")),
        milliseconds("add"),
        ratio("feedback", "add"),
        milliseconds("zero"),
        ratio("scatter", "zero"),
        f"{kept['mstopk']['recall']:.4f}, {kept['mstopk']['norm']:.4f}" if kept else "",
        f"{kept['exact']['norm']:.4f}" if kept else "",
    )


def ratios(density):
    """Returns the ratios of a panel: names of two times, and label and color of their ratio.

    A selection has the color of the scheme that uses it.
    """
    top = f"top {100 * density:g} %"
    exact, mstopk = (
        figures.style(f"hitopk:{density:g}:{method}").color for method in ("exact", "mstopk")
    )
    return (
        ("exact", "read", f"exact {top} / one read", exact),
        ("mstopk", "read", f"MSTopK, {top} / one read", mstopk),
        ("feedback", "add", "error feedback / one addition", figures.PARTS[2]),
        ("scatter", "zero", "scatter-add / one zero fill", figures.PARTS[3]),
    )


def plot(cells, path):
    """Plots time ratios over length: median and range over distributions, by kind and density."""
    found = {}
    for cell in cells.values():
        found.setdefault((cell["kind"], cell["density"]), []).append(cell)
    cases = [case for case in itertools.product(("library", "ops"), DENSITIES) if case in found]
    most = max(
        cell[f"{name}_s"] / cell[f"{to}_s"]
        for kind, density in cases
        for cell in found[kind, density]
        for name, to, *_ in ratios(density)
    )

    def draw(figure, axes):
        ours = []
        for axis, (kind, density) in zip(axes, cases, strict=True):
            for name, to, label, color in ratios(density):
                draw_ratio(axis, found[kind, density], (name, to), label=label, color=color)
                ours.append(label)
            axis.axhline(1, **figures.REFERENCE)
            names = {"library": "C++ library", "ops": "TensorFlow ops"}
            axis.set(
                title=f"{names[kind]}, the top {100 * density:g} % of all values",
                xlabel="values in the vector",
                ylabel="time / time of one pass",
                xscale="log",
                ylim=(0, 1.04 * most),
            )
            axis.grid(axis="y")
        title = "lines: median of the distributions of values; bands: their range; dotted: one pass"
        figures.legend(figure, columns=3, more=ours, title=title)

    figures.save(path, len(cases), draw)


def draw_ratio(axis, cells, names, label, color):
    """Plots the ratio of two times over length: median and range of the distributions."""
    found = {}
    name, to = names
    for cell in cells:
        found.setdefault(cell["elements"], []).append(cell[f"{name}_s"] / cell[f"{to}_s"])
    lengths = sorted(found)
    medians = [statistics.median(found[length]) for length in lengths]
    axis.plot(lengths, medians, "o-", color=color, label=label, linewidth=2, markersize=5)
    low, high = ([pick(found[length]) for length in lengths] for pick in (min, max))
    axis.fill_between(lengths, low, high, color=color, alpha=0.13, linewidth=0)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
