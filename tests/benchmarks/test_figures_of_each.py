"""Tests the numbers that the other benchmarks compute from their measurements."""

import math

import numpy as np
import pytest

from benchmarks import (
    accuracy,
    hitopk_steps,
    large_batch,
    local_accuracy,
    memory,
    norms,
    selection,
    wrapper,
)
from benchmarks.workers import local_accuracy as local_worker


@pytest.mark.parametrize("count", [6, 9, 10, 17, 99, 100, 101])
def test_the_median_interval_is_symmetric_and_covers_95_percent(count):
    low, high = wrapper.median_interval(range(count))
    assert low == count - 1 - high
    missed = [
        2 * sum(math.comb(count, heads) for heads in range(first + 1)) / 2**count
        for first in (low, low + 1)
    ]
    assert missed[0] <= 0.05 < missed[1]


@pytest.mark.parametrize("distribution", ["laplace", "cauchy", "mixture"])
def test_selection_reports_recall_and_norm_of_each_op(distribution, capsys):
    figures = selection.run("ops", distribution, 5000, 0.01)
    assert figures["kept"]["exact"]["recall"] == figures["kept"]["dgc"]["recall"] == 1.0
    assert 0 < figures["kept"]["mstopk"]["norm"] <= figures["kept"]["exact"]["norm"] <= 1
    selection.show({"one": figures})
    assert "mstopk / exact" in capsys.readouterr().out


@pytest.mark.slow
def test_selection_times_each_function_of_the_library():
    figures = selection.run("library", "laplace", 5000, 0.01)
    assert figures["k"] == 50
    assert all(
        figures[f"{name}_s"] > 0
        for name in ("read", "exact", "mstopk", "add", "feedback", "zero", "scatter")
    )


def test_the_seconds_of_the_four_steps_add_up(capsys):
    systems = {"hitopk:0.01": {"steps_s": [0.1, 0.02, 0.03, 0.05]}}
    hitopk_steps.show({"one": {"layout": "2x2", "rate": "1gbit", "systems": systems}})
    assert "2x2 1gbit hitopk:0.01" in (line := capsys.readouterr().out.splitlines()[-1])
    assert line.split()[-2:] == ["200", "ms"]


def test_accuracy_rows_count_runs_that_reached_the_target():
    runs = [
        {"reached_steps": 40, "reached_s": 2.0, "accuracies": [0.9, 0.98]},
        {"reached_steps": None, "reached_s": None, "accuracies": [0.9]},
    ]
    assert accuracy.cells_of("alltoall", runs)[:4] == ("alltoall", "2", "1", "40 (40 to 40)")


def test_accuracy_plots_runs_without_recorded_losses(tmp_path):
    old = {"accuracies": [0.9, 0.98], "seconds": [1, 2], "reached_steps": None, "reached_s": None}
    for run in (old, old | {"losses": [1.0, 0.5], "iterations": [23, 46]}):
        accuracy.plot({"one": {"systems": {"onebit": run}}}, tmp_path / "accuracy.png")


def test_one_bit_is_measured_on_nodes_of_one_rank(monkeypatch):
    monkeypatch.setattr("sys.argv", ["accuracy", "--one-bit", "--seeds", "0"])
    options = accuracy.parse_arguments()
    ((_, job),) = accuracy.planned(options).items()
    assert job["layout"] == "4x1"
    assert job["goes_on"]


def test_memory_is_relative_to_an_optimizer_without_state(tmp_path, capsys):
    def cell(optimizer, slots, resident):
        systems = {optimizer: {"slots": slots, "resident": resident}}
        return {"layout": "2x1", "optimizer": optimizer, "update": "server", "systems": systems}

    cells = {"a": cell("sgd", [0, 0], [1000, 1200]), "b": cell("adam", [100, 200], [2000, 2200])}
    assert list(memory.rows(cells)) == [(("2x1", "adam", "server"), 150, 1000)]
    memory.show(cells)
    assert "2x1    adam       server  0.0 MB" in capsys.readouterr().out
    memory.plot(cells, tmp_path / "memory.png")


def test_parallel_norms_pay_off_beyond_the_crossover():
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


def test_large_batches_are_compared_with_the_small_batch(capsys):
    last = [0.99, 0.5, *(0.98 for _ in large_batch.RULES)][: len(large_batch.RULES)]
    runs = {rule: [0.9, accuracy] for rule, accuracy in zip(large_batch.RULES, last, strict=True)}
    large_batch.show(
        {rule: {"rule": rule, "accuracies": accuracies} for rule, accuracies in runs.items()}
    )
    lines = capsys.readouterr().out.splitlines()
    below = ["0.00", "49.00", *("1.00" for _ in large_batch.RULES)][: len(large_batch.RULES)]
    assert [line.split()[-1] for line in lines[3:]] == below


def test_norms_are_compared_with_both_methods_of_tensorflow(capsys):
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
    systems = {
        "alltoall 4": {"ours_s": [1.0 + i / 1000 for i in range(100)], "theirs_s": [1.0] * 100}
    }
    wrapper.show({"one": {"systems": systems}})
    assert "1.050  1.039 to 1.060      1.025 to 1.074" in capsys.readouterr().out
    wrapper.plot({"one": {"systems": systems}}, tmp_path / "wrapper.png")


def local_cell(seeds, systems):
    """Returns an answer of `local_accuracy`, from the period and accuracies of each system."""
    figures = {
        name: {
            "accuracies": [[0.5, accuracy] for accuracy in accuracies],
            "steps": [64, 128],
            "rounds": [64 // every, 128 // every],
            "round_bytes": 1000,
        }
        for name, (every, accuracies) in systems.items()
    }
    about = {"part": "accuracy", "data": "digits", "shares": "alike", "task": {"seeds": seeds}}
    return about | {"systems": figures}


def test_local_updates_are_compared_seed_by_seed(tmp_path, capsys):
    """The comparison uses the seeds that both systems have, whichever jobs measured them."""
    cells = {
        "later": local_cell([2], {"all-reduce": (1, [0.8])}),
        "others": local_cell([1, 0], {"local SGD, every 16": (16, [0.89, 0.98])}),
        "first": local_cell([0, 1], {"all-reduce": (1, [0.98, 0.9])}),
        "time": {"part": "time", "data": "digits", "shares": "alike", "task": {"seeds": [0]}}
        | {"systems": {"local SGD, every 16": {"step_s": [0.01, 0.02, 0.03]}}},
    }
    ((_, systems),) = local_accuracy.outcomes(cells).items()
    own, base = systems["local SGD, every 16"], systems["all-reduce"]
    assert sorted(own.beside(base)) == pytest.approx([-1.0, 0.0])
    assert own.sent_bytes == base.sent_bytes / 16
    local_accuracy.show(cells)
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[4:7] == ["8", "8", "1/16"]
    assert line[-4:] == ["20.0", "ms", "2.6", "s"]
    local_accuracy.plot(cells, tmp_path / "local_accuracy.png")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.1, 0.1, 0.0], "yes"),
        ([-2.0, -2.1, -1.9], "no"),
        ([-1.0, 1.0, 0.0], "by its mean"),
        ([-2.0, 0.5, -1.0], "not by its mean"),
    ],
)
def test_a_system_is_near_if_its_interval_is_within_half_a_point(differences, verdict):
    assert local_accuracy.judged(np.array(differences)) == verdict


def test_iid_shares_have_all_classes_and_non_iid_shares_have_few():
    samples = local_worker.digits(0)
    alike, own = (
        [local_worker.part_of(samples, shares, rank, 4) for rank in range(4)]
        for shares in ("alike", "own classes")
    )
    assert {len(part.y) for part in (*alike, *own)} == {len(samples.y) // 4}
    assert all(len(set(part.y)) == 10 for part in alike)
    assert all(len(set(part.y)) <= 4 for part in own)
    assert not set(own[0].y) & set(own[3].y)
    assert sorted(np.concatenate([p.test_y for p in own])) == sorted(samples.test_y)
