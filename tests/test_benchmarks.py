"""The arithmetic of the benchmarks; tests/jobs/test_benchmarks.py runs them."""

import argparse
import importlib
import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import (
    accuracy,
    best_scheme,
    exchange,
    figures,
    harness,
    hitopk_steps,
    large_batch,
    memory,
    norms,
    overview,
    poseidon,
    reading,
    redraw,
    scaling,
    selection,
    wrapper,
)
from benchmarks.exchanges import scheme_named
from benchmarks.workers import mirrored
from benchmarks.workers.task import summary
from tfposeidon import schemes
from tfposeidon.lab import demo, models


def test_an_interrupted_benchmark_goes_on(tmp_path):
    path, asked = tmp_path / "results.json", []

    def run(number):
        if number == 2 and len(asked) < 3:
            asked.append("interrupted")
            raise KeyboardInterrupt
        asked.append(number)
        return {"answer": number}

    planned = {f"job {number}": {"number": number} for number in range(4)}
    with pytest.raises(KeyboardInterrupt):
        harness.jobs(harness.Results(path), planned, run)
    assert asked == [0, 1, "interrupted"]
    harness.jobs(harness.Results(path), planned, run)
    assert asked == [0, 1, "interrupted", 2, 3]
    kept = json.loads(path.read_text())
    assert [kept[key]["answer"] for key in planned] == [0, 1, 2, 3]
    assert kept["job 0"]["machine"]["versions"]["numpy"]
    assert harness.Results(path, fresh=True).cells == {}


OF_RESULTS = {
    module.__name__.partition(".")[2]: module
    for module in (
        accuracy,
        exchange,
        hitopk_steps,
        large_batch,
        memory,
        norms,
        poseidon,
        reading,
        scaling,
        selection,
    )
}


@pytest.mark.parametrize("name", OF_RESULTS)
def test_results_that_are_kept_are_shown_and_plotted(name, tmp_path, capsys):
    """Those of an earlier version, which lack what is shown now, would end the benchmark late."""
    cells = json.loads((harness.RESULTS / f"{name}.json").read_text())
    OF_RESULTS[name].show(cells)
    assert capsys.readouterr().out
    OF_RESULTS[name].plot(cells, tmp_path / "plot.png")


def test_every_system_has_a_color_of_its_own():
    colors = [style.color for style in figures.STYLES.values()]
    colors += [*figures.PARTS, figures.BASELINE]
    assert len(set(colors)) == len(colors)
    assert len({style.label for style in figures.STYLES.values()}) == len(figures.STYLES)


def test_a_system_with_options_looks_like_its_scheme():
    assert figures.style("2dtar:float16:other").color == figures.style("2dtar:float16").color
    assert figures.style("2dtar:float16:other").label == "2dtar:float16:other"
    assert figures.in_order(["2dtar", "unknown", "ddp"]) == ["ddp", "2dtar", "unknown"]


def test_a_default_that_is_named_is_no_system_of_its_own():
    assert scheme_named("hitopk:0.01:mstopk") == scheme_named("hitopk:0.01")
    assert figures.style("hitopk:0.01:mstopk") == figures.style("hitopk:0.01")
    assert figures.in_order(["ps", "hitopk:0.01:mstopk"]) == ["hitopk:0.01:mstopk", "ps"]


def test_the_demo_has_the_colors_of_the_results():
    """It is installed without the benchmarks, so that it keeps a table of its own."""
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


COMMANDS = re.findall(
    r"\[`(\w+)([^`]*)`\]\(results/", (harness.RESULTS.parent / "results.md").read_text()
)


@pytest.mark.parametrize(("name", "arguments"), sorted(set(COMMANDS)))
def test_commands_beside_results_are_those_that_gave_them(name, arguments, monkeypatch):
    module = OF_RESULTS.get(name, wrapper)
    monkeypatch.setattr("sys.argv", [name, *arguments.split()])
    options = module.parse_arguments()
    kept = json.loads((harness.ROOT / options.results).read_text())
    if name == "exchange":
        # Whose jobs are planned by what is missing.
        asked = {cell for job in module.planned(options).values() for cell in job["cells"]}
        assert asked & {measured for cell in kept.values() for measured in cell["systems"]}
    # Keys of accuracy did not name the layout yet.
    elif name != "accuracy":
        assert module.planned(options).keys() & kept.keys()


def test_every_plot_can_be_drawn_again():
    for name, (draw, files) in redraw.PLOTS.items():
        assert callable(draw)
        assert (harness.RESULTS / f"{name}.png").exists()
        assert all((harness.RESULTS / f"{file}.json").exists() for file in files)
    drawn = {file.stem.removesuffix("_traffic") for file in harness.RESULTS.glob("*.png")}
    assert drawn == set(redraw.PLOTS)


def test_no_results_are_kept_that_another_way_of_measuring_would_give():
    """They lie under the keys of what is measured now, so that it would be left out."""
    cells = {
        name: json.loads((harness.RESULTS / f"{name}.json").read_text()).values()
        for name in ("scaling", "norms")
    }
    assert all("l2_loss_s" in cell for cell in cells["norms"] if cell["kind"] == "op")
    unscaled = ("6dc15c3", "d3e6f76")
    peers = [cell for cell in cells["scaling"] if cell["worker"] in ("ddp", "mirrored")]
    assert not any(cell["machine"]["commit"].startswith(unscaled) for cell in peers)


@pytest.mark.parametrize("name", [*OF_RESULTS, "wrapper"])
def test_the_smallest_version_leaves_results_alone(name, monkeypatch):
    parse_arguments = importlib.import_module(f"benchmarks.{name}").parse_arguments
    expected = {
        (): harness.RESULTS / f"{name}.json",
        ("--smallest",): harness.ROOT / "build" / "smallest" / f"{name}.json",
        ("--smallest", "--results", "here.json"): Path("here.json"),
    }
    for options, path in expected.items():
        monkeypatch.setattr("sys.argv", [name, *options])
        assert parse_arguments().results == path


def test_the_smallest_reading_has_all_parts(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reading", "--smallest"])
    options = reading.parse_arguments()
    assert options.parts == reading.FULL["parts"]
    kinds = [job["kind"] for job in reading.planned(options).values()]
    assert kinds.count("memory") == kinds.count("jobs") == 1
    reading.show_memory(
        [{"ranks": 1, "what": "datacache", "systems": {"datacache": {"held": 2e9, "data": 1e9}}}]
    )
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1", "1.00", "GB", "2.00", "GB"]


@pytest.mark.parametrize("count", [6, 9, 10, 17, 99, 100, 101])
def test_the_medians_interval_is_even_and_covers_95_percent(count):
    low, high = wrapper.median_interval(range(count))
    assert low == count - 1 - high
    missed = [
        2 * sum(math.comb(count, heads) for heads in range(first + 1)) / 2**count
        for first in (low, low + 1)
    ]
    assert missed[0] <= 0.05 < missed[1]


def test_fit_finds_latency_and_bandwidth():
    latency_s, bandwidth = 0.004, 2e8
    rows = [
        {"shaped_bytes": 2**p, "time_s": latency_s + 8 * 2**p / bandwidth} for p in range(10, 27)
    ]
    assert exchange.fit(rows) == pytest.approx((latency_s, bandwidth))


def test_exchange_row_says_how_far_the_limit_is():
    figures = {
        "step_s": [3.0, 1.1, 1.1],
        "busiest_bytes": 25_000_000,
        "sent_bytes": 26e6,
        "predicted_bytes": 26e6,
    }
    cell = {"rate": "200mbit", "systems": {"2dtar:float16 1024": figures}}
    (row,) = exchange.rows(cell)
    assert (row["system"], row["length"], row["limit_s"]) == ("2dtar:float16", 1024, 1.0)
    assert row["distance"] == pytest.approx(1.1)
    assert row["shaped_bytes"] == 25_000_000 - 25_000
    (row,) = exchange.rows(cell | {"systems": {"asa 1024": figures | {"busiest_bytes": 2_000_000}}})
    assert row["distance"] is None, "the shaper's burst is more than 1 % of that"
    (row,) = exchange.rows(cell | {"rate": "unshaped"})
    assert row["limit_s"] is None


def test_scaling_row_tells_exposed_from_hidden_communication():
    task = {"model": "resnet50", "dilation": 4.0}
    compute_s = 4 * 256 / 1150
    cell = {"task": task, "rate_bits_per_s": 1e8}
    figures = {
        "step_s": [2 * compute_s],
        "ranks_s": [[2 * compute_s, compute_s]],
        "sent_bytes": compute_s * 1e8 / 8,
    }
    row = scaling.row("asa", figures, cell)
    assert row["exposed_s"] == pytest.approx(compute_s)
    assert row["efficiency"] == pytest.approx(0.5)
    assert row["stalled"] == pytest.approx([0.5, 0.0])
    assert row["ideal_s"] == pytest.approx(compute_s * 4 / 3)
    assert scaling.row("ddp", {"error": "Traceback\nValueError: no"}, cell) == {
        "system": "ddp",
        "error": "ValueError: no",
    }


def test_links_shrink_with_the_square_of_the_factor(monkeypatch):
    """So that factor and matrix bytes keep their ratio to the link."""
    seen = {}
    monkeypatch.setattr(
        harness,
        "in_lab",
        lambda options, worker, task: seen.update(options=options, task=task) or {},
    )
    scaling.run("vgg19", "4x2", 25.0, "ddp", ["ddp"], dilation=4, steps=3)
    assert "--inter 390625kbit" in seen["options"]
    assert (seen["task"]["shrink"], seen["task"]["warm_up"]) == (4, 3)


def test_peers_run_in_programs_of_their_own():
    systems = ["alone", "2dtar:float16", "ddp-fp16", "mirrored-packs", "ddp"]
    assert harness.by_worker(systems, "keras_fit") == {
        "keras_fit": ["alone", "2dtar:float16"],
        "ddp": ["ddp-fp16", "ddp"],
        "mirrored": ["mirrored-packs"],
    }


def test_exchange_gives_peers_jobs_of_their_own():
    options = argparse.Namespace(
        layouts=["4x4"],
        rates=["1gbit"],
        lengths=[10, 25_557_032],
        systems=["hitopk:0.1", "sfb:4", "ddp"],
        shapes=["64x32"],
        flow=None,
        full=False,
    )
    ours, ddp = exchange.planned(options).values()
    assert ours["worker"] == "exchange"
    assert ours["cells"] == ["hitopk:0.1 1024", "hitopk:0.1 25557032", "sfb:4 64x32"]
    assert (ddp["worker"], ddp["cells"]) == ("ddp", ["ddp 1024"])


def test_exchanges_go_on_with_what_is_missing(tmp_path):
    options = argparse.Namespace(
        layouts=["2x1"],
        rates=["100mbit"],
        lengths=[10, 12],
        systems=["asa"],
        shapes=[],
        flow=None,
        full=False,
    )
    results = harness.Results(tmp_path / "results.json")
    ((key, job),) = exchange.planned(options, results.cells).items()
    assert job["cells"] == ["asa 1024", "asa 4096"]

    def run(**job):
        error = harness.JobError("killed")
        error.answer = {"systems": {"asa 1024": {}}, "layout": "2x1", "rate": "100mbit"}
        raise error

    assert harness.jobs(results, {key: job}, run) == [key]
    ((again, job),) = exchange.planned(options, results.cells).items()
    assert (again, job["cells"]) == (f"{key} part=2", ["asa 4096"])


def test_the_grid_has_the_extremes_of_each_kind():
    unshaped = list(exchange.grid("unshaped"))
    assert len(unshaped) == len(set(unshaped))
    for one in ("allreduce 67108864", "hitopk:0.001 16777216", "sfb:512 4096x4096"):
        assert one in unshaped
    assert not exchange.is_within_limits("asa 67108864", "4x4", "unshaped")
    assert exchange.is_within_limits("asa 67108864", "4x2", "unshaped")
    assert not exchange.is_within_limits("asa 67108864", "2x1", "100mbit"), "more than 5 s"


def test_schemes_are_named_with_their_options():
    assert scheme_named("2dtar") == schemes.Torus2D()
    assert scheme_named("2dtar:float16") == schemes.Torus2D(wire_dtype="float16")
    expected = schemes.HierarchicalTopK(density=0.001, select="exact", wire_dtype="bfloat16")
    assert scheme_named("hitopk:0.001:exact:bfloat16") == expected


@pytest.mark.parametrize("distribution", ["laplace", "cauchy", "mixture"])
def test_selection_measures_ops(distribution, capsys):
    figures = selection.run("ops", distribution, 5000, 0.01)
    assert figures["kept"]["exact"]["recall"] == figures["kept"]["dgc"]["recall"] == 1.0
    assert 0 < figures["kept"]["mstopk"]["norm"] <= figures["kept"]["exact"]["norm"] <= 1
    selection.show({"one": figures})
    assert "mstopk / exact" in capsys.readouterr().out


@pytest.mark.slow
def test_selection_measures_the_library():
    figures = selection.run("library", "laplace", 5000, 0.01)
    assert figures["k"] == 50
    assert all(
        figures[f"{name}_s"] > 0
        for name in ("read", "exact", "mstopk", "add", "feedback", "zero", "scatter")
    )


def test_steps_add_up(capsys):
    systems = {"hitopk:0.01": {"steps_s": [0.1, 0.02, 0.03, 0.05]}}
    hitopk_steps.show({"one": {"layout": "2x2", "rate": "1gbit", "systems": systems}})
    assert "2x2 1gbit hitopk:0.01" in (line := capsys.readouterr().out.splitlines()[-1])
    assert line.split()[-2:] == ["200", "ms"]


def test_accuracy_row_counts_those_that_arrived():
    runs = [
        {"reached_steps": 40, "reached_s": 2.0, "accuracies": [0.9, 0.98]},
        {"reached_steps": None, "reached_s": None, "accuracies": [0.9]},
    ]
    assert accuracy.cells_of("asa", runs)[:4] == ("asa", "2", "1", "40 (40 to 40)")


def test_accuracy_plots_runs_from_before_losses_were_noted(tmp_path):
    old = {"accuracies": [0.9, 0.98], "seconds": [1, 2], "reached_steps": None, "reached_s": None}
    for run in (old, old | {"losses": [1.0, 0.5], "iterations": [23, 46]}):
        accuracy.plot({"one": {"systems": {"onebit": run}}}, tmp_path / "accuracy.png")


def test_one_bit_goes_over_nodes_of_one_rank(monkeypatch):
    monkeypatch.setattr("sys.argv", ["accuracy", "--one-bit", "--seeds", "0"])
    options = accuracy.parse_arguments()
    ((_, job),) = accuracy.planned(options).items()
    assert job["layout"] == "4x1"
    assert job["goes_on"]


def test_memory_is_that_beyond_an_optimizer_without_slots(tmp_path, capsys):
    def cell(optimizer, slots, resident):
        systems = {optimizer: {"slots": slots, "resident": resident}}
        return {"layout": "2x1", "optimizer": optimizer, "update": "server", "systems": systems}

    cells = {"a": cell("sgd", [0, 0], [1000, 1200]), "b": cell("adam", [100, 200], [2000, 2200])}
    assert list(memory.rows(cells)) == [(("2x1", "adam", "server"), 150, 1000)]
    memory.show(cells)
    assert "2x1    adam       server  0.0 MB" in capsys.readouterr().out
    memory.plot(cells, tmp_path / "memory.png")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"error": "Traceback\nValueError: no"}, "ValueError: no"),
        ({"step_s": [0.5]}, "500.0 ms"),
        ({"a": 1}, "a 1"),
    ],
)
def test_summary(answer, text):
    assert summary(answer).strip() == text


def test_best_scheme_says_what_poseidon_says():
    """GoogLeNet's classifier goes to the store on 16 nodes (section 5.2), VGG19-22K by factors."""
    (googlenet,) = best_scheme.rows_of(models.model("googlenet"), 128, [2, 16])
    assert googlenet[:4] == ("googlenet", "128", "dense1", "1024 x 1000")
    assert [text.split()[0] for text in googlenet[4:]] == ["sfb", "ps"]
    layers = list(best_scheme.rows_of(models.model("vgg19_22k"), 32, [32]))
    assert [row[4].split()[0] for row in layers] == ["sfb"] * 3


def _poseidon_cell(model, layout, gbit, systems):
    task = {"model": model, "shrink": 1, "dilation": 4, "systems": list(systems)}
    compute_s = 4 * models.model(model).step_s
    figures = {
        system: {
            "step_s": [compute_s / share],
            "ranks_s": [[compute_s / share]],
            "sent_bytes": 1e6,
            "node_bytes": [[1, 2]],
        }
        for system, share in systems.items()
    }
    return {
        "model": model,
        "layout": layout,
        "gbit": gbit,
        "rate_bits_per_s": 1e9,
        "task": task,
        "systems": figures,
    }


def test_poseidons_figures(capsys, tmp_path):
    cells = {
        "a": _poseidon_cell(
            "vgg19_22k", "16x1", 10.0, {"ps-late": 0.25, "ps": 0.5, "hybcomm": 0.97}
        ),
        "b": _poseidon_cell("vgg19_22k", "8x1", 40.0, {"ps": 1.0}),
        "c": _poseidon_cell("vgg19_32", "8x1", 40.0, {"ps": 1.0, "ps-adam": 0.5, "hybcomm": 1.0}),
    }
    assert poseidon.speedups(cells)["vgg19_22k", 10.0, "16x1"]["hybcomm"] == pytest.approx(15.52)
    poseidon.show(cells)
    shown = capsys.readouterr().out
    assert "4.0 (75%)" in shown
    assert "ps-late 4, hybcomm 16" in shown
    assert "ps-adam: a node sends 1 B to 1 B a step, and receives 2 B to 2 B" in shown
    poseidon.plot(cells, tmp_path / "poseidon.png")


def test_poseidons_jobs_are_those_of_the_figures(monkeypatch):
    monkeypatch.setattr("sys.argv", ["poseidon", "--full"])
    options = poseidon.parse_arguments()
    jobs = list(poseidon.planned(options).values())
    assert len(jobs) == 3 * 4 + 3 * 3 + 3 + 1
    assert jobs[0]["layout"] == "16x1"
    assert {job["gbit"] for job in jobs if job["model"] == "googlenet"} == {40.0, 2.0, 5.0, 10.0}


def test_norms_in_parallel_pay_from_where_both_take_as_long():
    seconds = {"local": 8.0, "share": 2.0, "all-gather": 3.0}
    from_s = norms.crossover(seconds)
    assert from_s == pytest.approx(
        from_s * seconds["share"] / seconds["local"] + seconds["all-gather"]
    )
    cell = {
        "model": "resnet50",
        "layout": "4x1",
        "systems": {name: {"step_s": [s]} for name, s in seconds.items()},
    }
    cell["systems"] |= {name: {"step_s": [1.0]} for name in ("all local", "all in parallel")}
    assert norms.parallel_row(cell)[5:8] == ("5000.00 ms", "1.60", "4000.00 ms")
    assert len(norms.shapes("resnet50")) == 161


def test_large_batches_are_compared_with_the_small_one(capsys):
    last = [0.99, 0.5, *(0.98 for _ in large_batch.RULES)][: len(large_batch.RULES)]
    runs = {rule: [0.9, accuracy] for rule, accuracy in zip(large_batch.RULES, last, strict=True)}
    large_batch.show(
        {rule: {"rule": rule, "accuracies": accuracies} for rule, accuracies in runs.items()}
    )
    lines = capsys.readouterr().out.splitlines()
    below = ["0.00", "49.00", *("1.00" for _ in large_batch.RULES)][: len(large_batch.RULES)]
    assert [line.split()[-1] for line in lines[3:]] == below


def test_norms_are_compared_with_both_of_tensorflows(capsys):
    cell = {
        "kind": "op",
        "model": "resnet50",
        "tensorflow_s": 0.02,
        "l2_loss_s": 0.014,
        "native_s": 0.01,
    }
    norms.show({"one": cell})
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["2.0", "1.4"]


def test_ratios_of_the_wrapper_are_those_of_pairs(tmp_path, capsys):
    systems = {"asa 4": {"ours_s": [1.0 + i / 1000 for i in range(100)], "theirs_s": [1.0] * 100}}
    wrapper.show({"one": {"systems": systems}})
    assert "1.050  1.039 to 1.060      1.025 to 1.074" in capsys.readouterr().out
    wrapper.plot({"one": {"systems": systems}}, tmp_path / "wrapper.png")


def test_a_failed_job_is_the_benchmarks_exit_status(tmp_path):
    def run(number):
        raise harness.JobError("no")

    options = argparse.Namespace(results=tmp_path / "results.json", fresh=False)
    with pytest.raises(SystemExit, match="1 of 1 jobs failed: job 0"):
        harness.carry_out(options, {"job 0": {"number": 0}}, run, lambda _: None, lambda *_: None)


def test_packs_of_mirrored_strategy_shrink_with_the_model():
    """With the square of the factor, as links do: one of full size would hold all gradients."""
    task = argparse.Namespace(shrink=4)
    assert mirrored.pack_bytes(task, "mirrored-packs") == 25 * 2**20 // 16
    assert mirrored.pack_bytes(task, "mirrored") == 0


def test_buckets_of_ddp_shrink_with_the_model():
    pytest.importorskip("torch")
    ddp = importlib.import_module("benchmarks.workers.ddp")
    assert ddp.bucket_caps_mib(argparse.Namespace(shrink=4)) == [1 / 16, 25 / 16]


@pytest.mark.parametrize("model", overview.MODELS)
def test_overview_has_a_bar_for_each_system_of_its_results(model):
    cells = json.loads((overview.RESULTS / "scaling.json").read_text())
    steps, alone_s = overview.rows(cells, model, "4x2", 4.0)
    assert set(steps) >= {"horovod", "ddp", "ddp-powersgd", "2dtar", "2dtar:float16"}
    assert all(alone_s < step_s < 20 * alone_s for step_s in steps.values())
    assert set(steps) <= set(overview.SYSTEMS)
