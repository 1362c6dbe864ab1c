"""Measures the README's table: time per step of `auto` and other frameworks on slow networks.

    python -m benchmarks.overview            # short: ResNet-50 at 10 Gb/s
    python -m benchmarks.overview --full     # three models at 1, 10 and 25 Gb/s; an hour

Steps, models and networks are those of `benchmarks.scaling`. Bandwidths and times are those of the
real cluster. An interrupted run resumes.
"""

from benchmarks import architectures, figures, harness, scaling

SYSTEMS = (
    *("horovod", "ddp", "ddp-powersgd", "jax"),
    *("hybcomm", "hitopk:0.01", "auto", "auto:fp16", "auto:topk"),
)
"""Systems in the figure, from top to bottom."""
COMMON = {
    "layouts": ["2x2"],
    "systems": ["alone", *SYSTEMS],
    "dilation": None,
    "flow_gbit": None,
    "steps": 3,
}
SHORT = COMMON | {"models": ["resnet50"], "gbits": [10.0]}
FULL = COMMON | {"models": ["resnet50", "vgg19", "transformer_110m"], "gbits": [1.0, 10.0, 25.0]}
SMALLEST = COMMON | scaling.SMALLEST
LIMIT = {"color": "black", "linestyle": "--", "linewidth": 1.5}


def parse_arguments():
    parser = harness.argument_parser("overview", __doc__)
    options = harness.parse(parser, SHORT, FULL, SMALLEST)
    options.systems = scaling.without_missing_peers(options.systems)
    return options


def by_case(cells):
    """Returns the values of the table and the plot.

    Args:
      cells: Answers of `scaling.run`, by key.

    Returns:
      (model, layout, Gb/s) -> seconds of a step by system, at the speed of the real accelerator.
    """
    return {
        case[:3]: {row["system"]: row["step_s"] / case.dilation for row in rows if "step_s" in row}
        for case, rows in scaling.groups(cells).items()
    }


def show(cells):
    """Prints a line per system, and then the choices and predictions of `auto`."""
    found = by_case(cells)
    print(f"\nmilliseconds per step, {harness.emulated(cells)}")
    header = ("system", *(f"{model}, {gbit:g} Gb/s" for model, _, gbit in found))
    lines = (
        (system, *(milliseconds(steps.get(system)) for steps in found.values()))
        for system in ("alone", *SYSTEMS)
    )
    harness.show([header, *lines])
    print("\nchosen schemes")
    header = ("model", "Gb/s", "system", "chosen", "predicted", "measured", "measured / predicted")
    harness.show([header, *choices(cells)])


def milliseconds(seconds):
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def choices(cells):
    """Yields a row per plan that was chosen by predicted step times."""
    for cell in cells.values():
        dilation = cell["task"]["dilation"]
        for system, figures_of in cell["systems"].items():
            if "chose" in figures_of:
                predicted_s = figures_of["predicted_s"] / dilation
                measured_s = scaling.row(system, figures_of, cell)["step_s"] / dilation
                yield (
                    cell["model"],
                    f"{cell['gbit']:g}",
                    system,
                    figures_of["chose"],
                    f"{1e3 * predicted_s:.0f} ms",
                    f"{1e3 * measured_s:.0f} ms",
                    f"{measured_s / predicted_s:.2f}",
                )


def plot(cells, path):
    """Plots step times as bars, with a panel per bandwidth and model."""
    found = by_case(cells)
    names = list(dict.fromkeys(model for model, *_ in found))
    gbits = sorted({gbit for *_, gbit in found})
    (layout,) = {layout for _, layout, _ in found}
    panels = [(model, gbit) for gbit in gbits for model in names]

    def draw(figure, axes):
        for index, (axis, (model, gbit)) in enumerate(zip(axes, panels, strict=True)):
            steps = found.get((model, layout, gbit), {})
            shown = {system: 1e3 * steps[system] if system in steps else None for system in SYSTEMS}
            if not any(shown.values()):
                continue
            figures.bars(axis, shown, names=index % len(names) == 0)
            compute_s = architectures.model(model).step_s
            axis.axvline(1e3 * compute_s, label="compute time, without communication", **LIMIT)
            axis.set_title(f"{figures.MODELS.get(model, model)}, {gbit:g} Gb/s")
            if index >= len(panels) - len(names):
                axis.set_xlabel("milliseconds per step")
        figure.suptitle(f"{figures.ranks(layout)} on emulated nodes; bold: tfposeidon")
        figures.legend(figure, title="")

    figures.save(path, len(panels), draw, columns=len(names), height_in=2.5)


def main():
    options = parse_arguments()
    harness.carry_out(options, scaling.planned(options), scaling.run, show, plot)


if __name__ == "__main__":
    main()
