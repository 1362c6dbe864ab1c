"""Tests the numbers that `benchmarks.scaling` computes, and the settings of other frameworks."""

import argparse
import importlib
import re

import pytest

from benchmarks import (
    harness,
    overview,
    scaling,
)
from benchmarks.workers import mirrored


def test_scaling_rows_separate_exposed_and_hidden_communication():
    task = {"model": "resnet50", "dilation": 4.0}
    compute_s = 4 * 256 / 1150
    cell = {"task": task, "rate_bits_per_s": 1e8}
    figures = {
        "step_s": [2 * compute_s],
        "ranks_s": [[2 * compute_s, compute_s]],
        "sent_bytes": compute_s * 1e8 / 8,
    }
    row = scaling.row("alltoall", figures, cell)
    assert row["exposed_s"] == pytest.approx(compute_s)
    assert row["efficiency"] == pytest.approx(0.5)
    assert row["stalled"] == pytest.approx([0.5, 0.0])
    assert row["ideal_s"] == pytest.approx(compute_s * 4 / 3)
    assert scaling.row("ddp", {"error": "Traceback\nValueError: no"}, cell) == {
        "system": "ddp",
        "error": "ValueError: no",
    }


def test_links_shrink_with_the_square_of_the_factor(monkeypatch):
    """The bytes of factors and of matrices then keep their ratio to the bandwidth."""
    seen = {}
    monkeypatch.setattr(
        harness,
        "in_lab",
        lambda options, worker, task: seen.update(options=options, task=task) or {},
    )
    scaling.run("vgg19", "4x2", 25.0, "ddp", ["ddp"], dilation=4, steps=3)
    assert "--inter 390625kbit" in seen["options"]
    assert (seen["task"]["shrink"], seen["task"]["warm_up"]) == (4, 3)


def test_other_frameworks_run_in_separate_programs():
    systems = ["alone", "torus2d:float16", "ddp-fp16", "mirrored-packs", "ddp"]
    assert harness.by_worker(systems, "keras_fit") == {
        "keras_fit": ["alone", "torus2d:float16"],
        "ddp": ["ddp-fp16", "ddp"],
        "mirrored": ["mirrored-packs"],
    }


def test_packs_of_mirrored_strategy_shrink_with_the_model():
    """Packs shrink with the square of the factor; one full-size pack would hold all gradients."""
    task = argparse.Namespace(shrink=4)
    assert mirrored.pack_bytes(task, "mirrored-packs") == 25 * 2**20 // 16
    assert mirrored.pack_bytes(task, "mirrored") == 0


def test_buckets_of_ddp_shrink_with_the_model():
    pytest.importorskip("torch")
    ddp = importlib.import_module("benchmarks.workers.ddp")
    assert ddp.bucket_caps_mib(argparse.Namespace(shrink=4)) == [1 / 16, 25 / 16]


def cell_of(**systems):
    """Returns an answer of `scaling.run` with these seconds of a step on the dilated cluster."""
    figures = {
        name: {"step_s": [step_s], "ranks_s": [[step_s]], "sent_bytes": 0}
        for name, step_s in systems.items()
    }
    figures["auto"] |= {"chose": "torus2d in buckets of 4 MiB", "predicted_s": 1.6}
    task = {"model": "resnet50", "dilation": 4.0}
    place = {"model": "resnet50", "layout": "2x2", "gbit": 10.0, "rate_bits_per_s": 1e8}
    return place | {"task": task, "systems": figures}


def test_overview_shows_times_of_the_real_cluster(tmp_path, capsys):
    cells = {"key": cell_of(alone=1.0, horovod=3.2, auto=2.0)}
    assert overview.by_case(cells) == {
        ("resnet50", "2x2", 10.0): {"alone": 0.25, "horovod": 0.8, "auto": 0.5}
    }
    overview.show(cells)
    printed = capsys.readouterr().out
    assert re.search(r"auto +500", printed)
    assert re.search(r"torus2d in buckets of 4 MiB +400 ms +500 ms +1.25", printed)
    overview.plot(cells, tmp_path / "plot.png")


def test_slow_links_are_dilated_only_on_request(monkeypatch):
    monkeypatch.setattr("sys.argv", ["overview", "--full"])
    jobs = scaling.planned(overview.parse_arguments()).values()
    dilations = {(job["gbit"], job["dilation"]) for job in jobs}
    assert dilations == {(1.0, 1.0), (10.0, 4.0), (25.0, 4.0)}
