"""Jobs one after the other, on other numbers of ranks, that share an epoch of a cache."""

import json

import pytest

from tests import drawn
from tests.launch import ROOT, horovodrun

SAMPLES = 101


@pytest.mark.timeout(300)
def test_one_two_four_two_ranks_within_an_epoch(tmp_path):
    drawn.folder(tmp_path / "images", SAMPLES)
    script = ROOT / "tests" / "on_ranks" / "part_of_an_epoch.py"
    for ranks, steps in ((1, 2), (2, 1), (4, 3), (2, 100)):
        done = horovodrun(ranks, script, tmp_path, SAMPLES, steps, timeout_s=120)
        assert done.returncode == 0, done.stdout[-4000:]
    numbers = [int(line) for file in tmp_path.glob("numbers-*.txt") for line in file.read_text().split()]
    assert sorted(numbers) == list(range(SAMPLES))
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["epoch"], state["samples"]) == (1, 0)
