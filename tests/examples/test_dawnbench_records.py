"""Tests the clock, the records and the plot of the DAWNBench example."""

import json
from types import SimpleNamespace

import keras
import pytest

import keras_callbacks
import tfposeidon as tp


@pytest.fixture
def records_of(example, tmp_path, monkeypatch):
    """Returns functions that start a run with records, train it and wait, on a simulated clock."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(example.records.time, "perf_counter", lambda: clock.now_s)
    tp.init()
    phases = [
        keras_callbacks.Phase(epochs=2, size=12, batch=4),
        keras_callbacks.Phase(epochs=1, size=14, batch=2),
    ]
    resize = keras_callbacks.ProgressiveResize(phases, learning_rate=0.1)

    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(), "torus2d")

    def begin(epoch):
        path = tmp_path / "records.jsonl"
        kept = example.records.Records(path, resize, "val_accuracy", target=0.9)
        kept.set_model(SimpleNamespace(optimizer=optimizer))
        kept.resume(epoch)
        return kept

    def train(kept, epoch, accuracy, trained_s, evaluated_s):
        kept.on_epoch_begin(epoch)
        clock.now_s += trained_s
        kept.on_test_begin()
        clock.now_s += evaluated_s
        kept.on_test_end()
        kept.on_epoch_end(epoch, {"val_accuracy": accuracy, "loss": 1.0})

    def wait(seconds):
        clock.now_s += seconds

    return SimpleNamespace(begin=begin, train=train, wait=wait)


def test_the_time_excludes_evaluation_and_start(records_of, capsys):
    """Time between epochs counts. Evaluation and time before the first epoch do not."""
    kept = records_of.begin(0)
    records_of.wait(50)
    records_of.train(kept, 0, accuracy=0.5, trained_s=10, evaluated_s=100)
    records_of.wait(3)
    records_of.train(kept, 1, accuracy=0.92, trained_s=10, evaluated_s=100)
    records_of.train(kept, 2, accuracy=0.95, trained_s=20, evaluated_s=100)
    assert [line["seconds"] for line in kept.lines] == [10, 23, 43]
    assert [(line["pixels"], line["batch"]) for line in kept.lines] == [(12, 4), (12, 4), (14, 2)]
    assert kept.reached["epoch"] == 1
    assert kept.interruptions(kept.reached) == ""
    told = capsys.readouterr().out.splitlines()
    assert ["is reached" in line for line in told] == [False, True, False]
    assert [json.loads(line) for line in kept.path.read_text().splitlines()] == kept.lines


def test_the_time_continues_after_an_interruption(records_of):
    kept = records_of.begin(0)
    assert kept.reached is None
    for epoch in range(2):
        records_of.train(kept, epoch, accuracy=0.95, trained_s=10, evaluated_s=1)
    # The snapshot is that of the first epoch, so the second epoch is trained again.
    records_of.wait(1000)
    again = records_of.begin(1)
    records_of.train(again, 1, accuracy=0.5, trained_s=7, evaluated_s=1)
    assert [line["seconds"] for line in again.lines] == [10, 17]
    assert [line["interrupted"] for line in again.lines] == [0, 1]
    assert "interrupted in 1 epoch(s)" in again.interruptions(again.lines[-1])
    third = records_of.begin(2)
    assert third.lines == again.lines
    records_of.train(third, 2, accuracy=0.5, trained_s=1, evaluated_s=1)
    assert [line["interrupted"] for line in third.lines] == [0, 1, 2]


@pytest.mark.slow
def test_the_plot_is_drawn(records_of, example, tmp_path):
    pytest.importorskip("matplotlib")
    kept = records_of.begin(0)
    for epoch, accuracy in enumerate((0.5, 0.95)):
        records_of.train(kept, epoch, accuracy, trained_s=10, evaluated_s=1)
    example.records.plot(kept, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
