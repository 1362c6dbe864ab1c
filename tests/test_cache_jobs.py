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


CAUSES = {
    "raise": "rank 1 failed first: ValueError: broken on purpose",
    "source": "A sample must be readable. Received: [Errno 5] Input/output error for",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("trouble", CAUSES)
def test_a_rank_that_fails_ends_the_job(tmp_path, trouble):
    """Although the other one waits for it in rounds of the cache, too."""
    drawn.folder(tmp_path / "images", SAMPLES)
    done = horovodrun(2, ROOT / "tests" / "on_ranks" / "failing_cache.py", tmp_path, trouble, timeout_s=90)
    assert done.returncode != 0, done.stdout[-4000:]
    assert CAUSES[trouble] in done.stdout, done.stdout[-4000:]
    assert "the job went on" not in done.stdout
