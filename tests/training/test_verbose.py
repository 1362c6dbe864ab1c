"""With `verbose="auto"`, terminals show progress bars, and other outputs one line per epoch."""

import io
import sys

import keras
import pytest

import tfposeidon as tp
from tests.helpers import models

CONTROL = ("\b", "\r", "\x1b")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _model(distributed=True):
    keras.utils.set_random_seed(0)
    model = models.mlp()
    optimizer = keras.optimizers.SGD(0.1)
    if distributed:
        optimizer = tp.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=models.LOSS)
    return model


def _fit(model, **options):
    model.fit(*models.mlp.data(16), batch_size=4, epochs=2, **options)


def _has_bar(text):
    return any(character in text for character in CONTROL)


def test_fit_prints_one_line_per_epoch_into_a_pipe(capsys):
    _fit(_model())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    results = [line for line in lines if "loss:" in line]
    assert len(results) == 2
    assert all(line.startswith("4/4 - ") for line in results)
    assert not _has_bar("\n".join(lines))


def test_validation_within_fit_prints_no_line(capsys):
    _fit(_model(), validation_data=models.mlp.data(8))
    results = [line for line in capsys.readouterr().out.splitlines() if "loss:" in line]
    assert len(results) == 2
    assert all("val_loss:" in line for line in results)


@pytest.mark.parametrize(("verbose", "bar", "words"), [(0, False, 0), (1, True, 1), (2, False, 1)])
def test_explicit_verbosity_is_not_changed(capsys, verbose, bar, words):
    _fit(_model(), verbose=verbose)
    text = capsys.readouterr().out
    assert _has_bar(text) == bar
    assert bool(text) == bool(words)


def test_positional_verbosity_is_not_changed(capsys):
    x, y = models.mlp.data(16)
    _model().fit(x, y, 4, 1, 0)
    assert capsys.readouterr().out == ""


def test_terminals_show_the_progress_bar(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    _fit(_model())
    assert _has_bar(terminal.getvalue())


def test_notebooks_show_the_progress_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    _fit(_model())
    assert _has_bar(capsys.readouterr().out)


def test_models_with_other_optimizers_print_as_keras_does(capsys):
    _fit(_model(distributed=False))
    assert _has_bar(capsys.readouterr().out)
