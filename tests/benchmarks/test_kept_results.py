"""Stored results can be shown, plotted and continued, and their pages match them."""

import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks import (
    accuracy,
    auto,
    cold_starts,
    dawnbench,
    elastic_averaging,
    exchange,
    figures,
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
    reading,
    redraw,
    scaling,
    selection,
    wrapper,
    xla,
)
from benchmarks.exchanges import scheme_named
from tfposeidon.lab import demo

OF_RESULTS = {
    module.__name__.partition(".")[2]: module
    for module in (
        accuracy,
        auto,
        cold_starts,
        dawnbench,
        elastic_averaging,
        exchange,
        gpu,
        hitopk_steps,
        large_batch,
        links,
        local_updates,
        local_accuracy,
        memory,
        norms,
        overview,
        poseidon,
        reading,
        scaling,
        selection,
        xla,
    )
}


ABRIDGED = ("selection",)
"""Results whose pages show only some of their lines."""


@pytest.mark.parametrize("name", OF_RESULTS)
def test_pages_show_the_tables_and_plots_of_stored_results(name, tmp_path, capsys):
    """A benchmark with an incomplete stored result would fail only after its measurements."""
    cells = json.loads((harness.RESULTS / f"{name}.json").read_text())
    OF_RESULTS[name].show(cells)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    pages = " ".join(" ".join(page.read_text().split()) for page in harness.RESULTS.glob("*.md"))
    missing = [line for line in printed if line not in pages]
    assert len(missing) < len(printed) if name in ABRIDGED else printed and not missing
    OF_RESULTS[name].plot(cells, tmp_path / "plot.png")


def test_every_system_has_its_own_color():
    colors = [style.color for style in figures.STYLES.values()]
    colors += [*figures.PARTS, figures.BASELINE]
    assert len(set(colors)) == len(colors)
    assert len({style.label for style in figures.STYLES.values()}) == len(figures.STYLES)


def test_a_system_with_options_looks_like_its_scheme():
    assert figures.style("torus2d:float16:other").color == figures.style("torus2d:float16").color
    assert figures.style("torus2d:float16:other").label == "torus2d:float16:other"
    assert figures.in_order(["torus2d", "unknown", "ddp"]) == ["ddp", "torus2d", "unknown"]


def test_an_explicit_default_is_not_a_separate_system():
    assert scheme_named("hitopk:0.01:mstopk") == scheme_named("hitopk:0.01")
    assert figures.style("hitopk:0.01:mstopk") == figures.style("hitopk:0.01")
    assert figures.in_order(["ps", "hitopk:0.01:mstopk"]) == ["hitopk:0.01:mstopk", "ps"]


def test_the_demo_has_the_colors_of_the_results():
    """The demo is installed without the benchmarks, so it has its own table of colors."""
    colors = {
        scheme: figures.STYLES["hitopk:0.01" if scheme == "hitopk" else scheme].color
        for scheme in demo.LABELS
    }
    assert colors == demo.COLORS


@pytest.mark.parametrize("path", sorted(harness.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_pages_name_machine_and_commit_of_their_results(path):
    texts = [page.read_text() for page in harness.RESULTS.glob("*.md")]
    text = "\n".join(text for text in texts if f"docs/results/{path.name}" in text)
    for cell in json.loads(path.read_text()).values():
        assert cell["machine"]["commit"].removesuffix("-dirty") in text
        assert cell["machine"]["kernel"] in text
        assert ("AMD EPYC" if "EPYC" in cell["machine"]["processor"] else "Intel Xeon") in text


# `predict` measures nothing.
COMMANDS = re.findall(
    r"\[`((?!predict)\w+)([^`]*)`\]\(results/",
    (harness.RESULTS.parent / "results.md").read_text(),
)


@pytest.mark.parametrize(("name", "arguments"), sorted(set(COMMANDS)))
def test_stored_commands_plan_the_stored_results(name, arguments, monkeypatch):
    module = {**OF_RESULTS, "wrapper": wrapper}[name]
    monkeypatch.setattr("sys.argv", [name, *arguments.split()])
    options = module.parse_arguments()
    kept = json.loads((harness.ROOT / options.results).read_text())
    if name == "exchange":
        # Jobs of `exchange` depend on the missing exchanges, so their keys differ from the stored
        # keys.
        asked = {cell for job in module.planned(options).values() for cell in job["cells"]}
        assert asked & {measured for cell in kept.values() for measured in cell["systems"]}
    # Stored keys of `accuracy` do not contain the layout yet.
    elif name != "accuracy":
        planned = getattr(module, "planned", scaling.planned)(options)
        missing = planned.keys() - kept.keys()
        # Most omitted parts were measured with one seed only, and variants were not measured. Some
        # cold starts were not repeated with fixed schemes, or not beside a busy core.
        later = {
            "dawnbench": r" part=(?!None).* seed=[12] ",
            "local_accuracy": "kind=variants",
            "cold_starts": "start=1[01] |=resnet50 .*load=True",
        }
        assert all(name in later and re.search(later[name], cell) for cell in missing), missing


def test_every_plot_can_be_drawn_again():
    for name, (draw, files) in redraw.PLOTS.items():
        assert callable(draw)
        assert (harness.RESULTS / f"{name}.png").exists()
        assert all((harness.RESULTS / f"{file}.json").exists() for file in files)
    drawn = {file.stem.removesuffix("_traffic") for file in harness.RESULTS.glob("*.png")}
    assert drawn == set(redraw.PLOTS)


def test_stored_results_use_the_current_method():
    """Results of an earlier method have the same keys, so a benchmark would not repeat them."""
    cells = {
        name: json.loads((harness.RESULTS / f"{name}.json").read_text()).values()
        for name in ("scaling", "norms")
    }
    assert all("l2_loss_s" in cell for cell in cells["norms"] if cell["kind"] == "op")
    unscaled = ("6dc15c3", "d3e6f76")
    peers = [cell for cell in cells["scaling"] if cell["worker"] in ("ddp", "mirrored")]
    assert not any(cell["machine"]["commit"].startswith(unscaled) for cell in peers)


@pytest.mark.parametrize("name", [*OF_RESULTS, "wrapper"])
def test_the_smallest_version_does_not_change_results(name, monkeypatch):
    parse_arguments = importlib.import_module(f"benchmarks.{name}").parse_arguments
    expected = {
        (): harness.RESULTS / f"{name}.json",
        ("--smallest",): harness.ROOT / "build" / "smallest" / f"{name}.json",
        ("--smallest", "--results", "here.json"): Path("here.json"),
    }
    for options, path in expected.items():
        monkeypatch.setattr("sys.argv", [name, *options])
        assert parse_arguments().results == path


def test_the_smallest_reading_has_few_jobs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reading", "--smallest"])
    options = reading.parse_arguments()
    assert set(options.parts) < set(reading.FULL["parts"])
    kinds = [job["kind"] for job in reading.planned(options).values()]
    assert kinds == options.parts
    reading.show_memory(
        [{"ranks": 1, "what": "datacache", "systems": {"datacache": {"held": 2e9, "data": 1e9}}}]
    )
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1", "1.00", "GB", "2.00", "GB"]
