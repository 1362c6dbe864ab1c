"""Examples refuse to run on more ranks than a step has samples."""

import importlib

import pytest

import tfposeidon as tp
from tests.launch import ROOT


@pytest.mark.parametrize("name", ["custom_loop", "gan", "transformer"])
def test_more_ranks_than_samples_are_refused(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module(name)
    monkeypatch.setattr(tp, "size", lambda: 65)
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=r"65.*Received|Received.*65 ranks"):
        example.main()


@pytest.mark.parametrize("name", ["custom_loop", "gan"])
def test_minimal_examples_stay_below_their_line_limit(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 100
