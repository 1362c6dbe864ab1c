"""Colors, line styles and names of all systems that the benchmarks plot, and the saving of figures.

Each system has the same color in all figures. tfposeidon is solid and bold, other frameworks are
dashed or hatched; of two shades of a color, the darker one marks 16-bit compression. Figures are as
wide as a page of the documentation, so that no text on it is smaller than 8 points.
"""

import dataclasses
import math

WIDTH_IN = 9.0
DPI = 150
SETTINGS = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "hatch.linewidth": 1.2,
}
REFERENCE = {"color": "#444444", "linestyle": ":", "linewidth": 1.2}
"""Style of lines that mark limits instead of systems."""


@dataclasses.dataclass(frozen=True)
class Style:
    """Look of a system in every plot.

    Attributes:
      label: Name for the legend and for ticks.
      color: Hexadecimal color, which no other system has.
      ours: True if the system is part of this project, False for other frameworks.
      marker: Shape of the system's points.
    """

    label: str
    color: str
    ours: bool = True
    marker: str = "o"


STYLES = {
    "alone": Style("no exchange", "#000000", ours=False),
    "horovod": Style("Horovod", "#a3a3a3", ours=False),
    "horovod-fp16": Style("Horovod, 16 bits", "#5c5c5c", ours=False, marker="s"),
    "ddp": Style("PyTorch DDP", "#6fa8d6", ours=False),
    "ddp-fp16": Style("PyTorch DDP, 16 bits", "#1f5a96", ours=False, marker="s"),
    "ddp-powersgd": Style("PyTorch DDP, PowerSGD", "#00a3a3", ours=False, marker="D"),
    "jax": Style("Keras on JAX", "#b8860b", ours=False, marker="P"),
    "mirrored": Style("MirroredStrategy", "#d7b299", ours=False),
    "mirrored-packs": Style("MirroredStrategy, packs", "#9c6644", ours=False, marker="v"),
    "allreduce": Style("all-reduce", "#6abf8b"),
    "allreduce:float16": Style("all-reduce, 16 bits", "#177245", marker="s"),
    "alltoall": Style("all-to-all", "#eab32f"),
    "alltoall:float16": Style("all-to-all, 16 bits", "#a86f00", marker="s"),
    "torus2d": Style("2D torus", "#e8596c"),
    "torus2d:float16": Style("2D torus, 16 bits", "#9d0b28", marker="s"),
    "torus2d:bfloat16": Style("2D torus, bfloat16", "#5e0618", marker="s"),
    "topk:0.01": Style("top 1 %, all ranks", "#f08a3c", marker="^"),
    "topk:0.001": Style("top 0.1 %, all ranks", "#f7c39a", marker="^"),
    "hitopk:0.1": Style("hierarchical top 10 %", "#c9b3f0", marker="^"),
    "hitopk:0.01": Style("hierarchical top 1 %", "#7d4fd6", marker="^"),
    "hitopk:0.01:float16": Style("hierarchical top 1 %, 16 bits", "#3f1a8a", marker="^"),
    "hitopk:0.01:exact": Style("hierarchical top 1 %, exact", "#b58cff", marker="D"),
    "hitopk:0.001": Style("hierarchical top 0.1 %", "#d669c8", marker="^"),
    "hitopk:0.001:exact": Style("hierarchical top 0.1 %, exact", "#f2a9ea", marker="D"),
    "ps-late": Style("parameter server, after backward", "#e3a857"),
    "ps": Style("parameter server", "#5f9e3d"),
    "ps:server": Style("parameter server, sharded optimizer", "#a8c93a"),
    "ps-adam": Style("factor server (ps-adam)", "#8a7f3a"),
    "hybcomm": Style("HybComm", "#d6006e", marker="s"),
    "auto": Style("auto, exact", "#0072b2", marker="*"),
    "auto:fp16": Style("auto, 16 bits allowed", "#56b4e9", marker="*"),
    "auto:topk": Style("auto, top 1 % allowed", "#003f63", marker="*"),
    "factors": Style("sufficient factors", "#2e4a9e", marker="D"),
    "adam": Style("factor server (Project Adam)", "#a0522d", marker="v"),
    "onebit": Style("one bit", "#e06a00", marker="^"),
    "no reading": Style("no reading", "#c8c8c8", ours=False),
    "tf.data": Style("tf.data", "#a5c4e8", ours=False),
    "tf.data, tuned": Style("tf.data, tuned", "#3b6fb5", ours=False),
    "datacache": Style("datacache", "#b5179e"),
    "fit": Style("fit on one rank", "#7f8c8d"),
    "SGD, small batch": Style("SGD, small batch", "#1a1a1a", ours=False),
    "SGD, scaled rate": Style("SGD, scaled rate", "#d9d2c5", ours=False),
    "SGD, 2 x rate and warm-up": Style("SGD, 2 x rate and warm-up", "#b3cde3", ours=False),
    "SGD, 4 x rate and warm-up": Style("SGD, 4 x rate and warm-up", "#7aa5c9", ours=False),
    "SGD, 8 x rate and warm-up": Style("SGD, 8 x rate and warm-up", "#35618a", ours=False),
    "SGD, scaled rate and warm-up": Style("SGD, scaled rate and warm-up", "#bfb5a2", ours=False),
    "LARS": Style("LARS", "#c44900"),
    "LAMB": Style("LAMB", "#6a5acd"),
    "local SGD": Style("local SGD", "#1b4f9c"),
    "EASGD": Style("EASGD", "#b5651d", marker="s"),
    "local AdamW": Style("local AdamW", "#00838f", marker="v"),
    "DiLoCo": Style("DiLoCo", "#c2185b", marker="D"),
}
DEFAULTS = (":mstopk",)
"""Options that are defaults of a scheme, so that names with and without them are equal."""
PARTS = ("#264653", "#2a9d8f", "#e0b84c", "#c1666b")
"""Colors of steps of an exchange and of parts of a computation, which are not systems."""
BASELINE = "#b8b8b8"
"""Color of the reference curve in plots of parts."""
MODELS = {
    "googlenet": "GoogLeNet",
    "resnet50": "ResNet-50",
    "resnet50_96": "ResNet-50, 96 pixels",
    "resnet152": "ResNet-152",
    "transformer_110m": "Transformer, 110 M",
    "gpt2": "GPT-2",
    "vgg19": "VGG-19",
    "vgg19_32": "VGG-19, batch 32",
    "vgg19_22k": "VGG19-22K",
}


def canonical(system):
    """Returns the name of a system without the options that are its scheme's defaults.

    >>> canonical("hitopk:0.01:mstopk")
    'hitopk:0.01'
    """
    for option in DEFAULTS:
        system = system.replace(option, "")
    return system


def style(system):
    """Returns the style of a system; options do not change the color of its scheme."""
    system = name = canonical(system)
    while name not in STYLES and ":" in name:
        name = name.rpartition(":")[0]
    if name == system:
        return STYLES.get(system, Style(system, "#777777"))
    return dataclasses.replace(STYLES.get(name, Style(system, "#777777")), label=system)


def in_order(systems):
    """Returns systems in the order of legends: other frameworks, then ours by scheme."""
    known = {name: index for index, name in enumerate(STYLES)}
    return sorted(systems, key=lambda name: known.get(canonical(name), len(known)))


def line(system):
    """Returns the keywords with which `Axes.plot` draws a system."""
    own = style(system)
    return {
        "label": own.label,
        "color": own.color,
        "linestyle": "-" if own.ours else "--",
        "linewidth": 2.2 if own.ours else 1.4,
        "marker": own.marker,
        "markersize": 5,
    }


def bar(system):
    """Returns the keywords with which `Axes.barh` draws a system."""
    own = style(system)
    return {"color": own.color} | ({} if own.ours else {"hatch": "///", "edgecolor": "white"})


def bars(axis, values, form="{:,.0f}", names=True, limit=None):
    """Draws a horizontal bar per system, with its value next to it.

    Args:
      axis: Axes to draw on.
      values: System -> value, or None if it was not measured.
      form: Format of the values.
      names: True to write the names of systems next to the bars.
      limit: Right end of the axis; by default a little more than the longest bar.
    """
    longest = limit or max(value for value in values.values() if value is not None)
    for index, (system, value) in enumerate(values.items()):
        axis.barh(index, value or 0, height=0.72, **bar(system))
        text = "not run" if value is None else form.format(value)
        axis.annotate(text, (value or 0, index), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(values)), [style(system).label for system in values])
    for text, system in zip(axis.get_yticklabels(), values, strict=True):
        text.set_fontweight("bold" if style(system).ours else "normal")
    axis.set(xlim=(0, 1.18 * longest), ylim=(len(values) - 0.4, -0.6))
    axis.tick_params(left=False, labelleft=names)


def legend(figure, columns=4, more=(), title=None):
    """Puts one legend for all panels below the figure, with our systems in bold.

    Args:
      figure: Figure with labeled lines or bars.
      columns: Number of entries in a line; fewer if these are wider than the figure.
      more: Labels to print in bold, in addition to those of our systems.
      title: Line above the entries; by default it explains bold and dashed, if both occur.
    """
    found = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = [own.label for own in STYLES.values()]
    labels = sorted(found, key=lambda name: order.index(name) if name in order else len(order))
    ours = {own.label for own in STYLES.values() if own.ours} | set(more)
    theirs = {own.label for own in STYLES.values() if not own.ours}
    if title is None and theirs & set(labels):
        title = "bold: tfposeidon; dashed or hatched: other frameworks"
    for count in range(columns, 0, -1):
        drawn = figure.legend(
            [found[label] for label in labels],
            labels,
            title=title,
            loc="outside lower center",
            ncols=count,
            handlelength=3,
        )
        for text in drawn.get_texts():
            text.set_fontweight("bold" if text.get_text() in ours else "normal")
        if drawn.get_window_extent().width <= figure.bbox.width or count == 1:
            return
        drawn.remove()


def save(path, panels, draw, columns=2, height_in=3.0):
    """Saves a grid of panels as wide as the page.

    Without panels nothing is saved, and without Matplotlib only a hint is printed.

    Args:
      path: File to write.
      panels: Number of panels; if the last row has a single panel, it has the whole width.
      draw: Function that takes the figure and the list of its axes, and draws on the axes.
      columns: Number of panels in a row.
      height_in: Height of a row, in inches.
    """
    if not panels:
        return
    try:
        import matplotlib as mpl
    except ImportError:
        print("Plots were skipped: Matplotlib is missing. Run: pip install matplotlib")
        return
    # Use the backend that only writes files, because there may be no display.
    mpl.use("Agg")
    from matplotlib import pyplot

    mosaic = layout(panels, columns)
    with mpl.rc_context(SETTINGS):
        figure, axes = pyplot.subplot_mosaic(
            mosaic, figsize=(WIDTH_IN, height_in * len(mosaic)), layout="constrained"
        )
        draw(figure, [axes[index] for index in range(panels)])
        figure.savefig(path, dpi=DPI)
        pyplot.close(figure)
    print(f"wrote {path}")


def layout(panels, columns):
    """Returns the rows of a grid of panels.

    >>> layout(5, 2)
    [[0, 1], [2, 3], [4, 4]]
    """
    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    return [
        [min(row * columns + column, panels - 1) for column in range(columns)]
        for row in range(rows)
    ]


def ranks(cluster):
    """Returns a readable layout.

    >>> ranks("4x2")
    '4 x 2 ranks'
    """
    return f"{cluster.replace('x', ' x ')} ranks"


def rate(text):
    """Returns a readable link rate.

    >>> rate("200mbit"), rate("unshaped")
    ('200 Mb/s', 'unshaped')
    """
    for unit, name in (("kbit", "kb/s"), ("mbit", "Mb/s"), ("gbit", "Gb/s")):
        if text.endswith(unit):
            return f"{text.removesuffix(unit)} {name}"
    return text
