"""The arithmetic of steps of emulated models, and of peers."""

import argparse
import importlib
import json

import pytest

from benchmarks import (
    harness,
    overview,
    scaling,
)
from benchmarks.workers import mirrored


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
