"""Consecutive jobs on different numbers of ranks share an epoch of a cache."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest

from tests import drawn
from tests.launch import ROOT, ahead, horovodrun

SAMPLES = 101
CASES = ROOT / "tests" / "jobs"


@contextlib.contextmanager
def _images():
    with tempfile.TemporaryDirectory() as folder:
        drawn.folder(Path(folder) / "images", SAMPLES)
        yield Path(folder)


def three_jobs():
    """Returns the samples that three jobs read, and the final state of the cache."""
    with _images() as folder:
        for ranks, steps in ((1, 2), (3, 2), (2, 100)):
            done = horovodrun(ranks, CASES / "part_of_an_epoch.py", folder, SAMPLES, steps)
            assert done.returncode == 0, done.stdout[-4000:]
        numbers = [
            int(line) for file in folder.glob("numbers-*.txt") for line in file.read_text().split()
        ]
        return numbers, json.loads((folder / "state.json").read_text())


@ahead(three_jobs)
def test_three_jobs_on_different_ranks_share_an_epoch(outcome):
    numbers, state = outcome
    assert sorted(numbers) == list(range(SAMPLES))
    assert (state["epoch"], state["samples"]) == (1, 0)


CAUSES = {
    "raise": "rank 1 failed first: ValueError: broken on purpose",
    "source": "A sample must be readable. Received: [Errno 5] Input/output error for",
}


def failing(trouble):
    with _images() as folder:
        return horovodrun(2, CASES / "failing_cache.py", folder, trouble)


@ahead(failing)
@pytest.mark.parametrize("trouble", CAUSES)
def test_a_failed_rank_ends_the_job(trouble, outcome):
    """The other rank waits for the failed rank in exchanges of the cache, too."""
    done = outcome
    assert done.returncode != 0, done.stdout[-4000:]
    assert CAUSES[trouble] in done.stdout, done.stdout[-4000:]
    assert "the job went on" not in done.stdout
