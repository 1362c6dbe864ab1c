"""Tests the reports of tests on ranks: failures, hangs, dead ranks, and later tests."""

import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.launch import ROOT, ahead, finish, start

SAMPLES = ROOT / "tests" / "ranks" / "samples.py"
PASSED = {
    "that_passes[2]",
    "after_an_exchange_that_failed[2]",
    "after_a_failure[2x1]",
    "after_a_death[2]",
}
FAILED = {
    "that_fails_on_one_rank[2x1-1]": [
        'f"rank {tp.rank()} is wrong"',
        "samples.py:",
        "AssertionError: rank 1 is wrong",
        "failed on 1 of 2 ranks; above is rank 1, the first",
    ],
    "that_waits_for_a_failed_rank[2]": [
        "AssertionError: rank 1 left first",
        "rank(s) [0] did not end within 30 s of the failure",
    ],
    "that_leaves_others_in_an_exchange[2]": ["AssertionError: rank 1 left first"],
    "that_disagrees[2]": ["ranks disagree on the outcome: {0: 'skipped', 1: 'passed'}"],
    "that_hangs[2]": [
        "rank(s) [0, 1] did not end within 3 s",
        "--- stacks of rank 0 ---",
        "--- stacks of rank 1 ---",
        "in _sleep_long",
    ],
    "that_dies[2]": ["the job ended with exit code 1 during this test", "Exit code: 137"],
}


def samples():
    """Runs the samples in a separate session; returns the report of each, empty for a pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        options = ["-p", "no:cacheprovider", f"--junitxml={path}"]
        done = finish(start([sys.executable, "-m", "pytest", str(SAMPLES), *options]))
        assert done.returncode == 1, done.stdout
        cases = ElementTree.parse(path).iter("testcase")
        return {
            case.get("name").removeprefix("test_"): "".join(case.itertext()).strip()
            for case in cases
        }


@ahead(samples)
def test_each_test_on_ranks_reports_its_own_outcome(outcome):
    given = {name for name in outcome if name.startswith("that_a_mark_sets_options")}
    assert len(given) == 1
    assert outcome.keys() == PASSED | FAILED.keys() | given
    for name in PASSED | given:
        assert not outcome[name], f"{name}: {outcome[name]}"
    for name, texts in FAILED.items():
        for text in texts:
            assert text in outcome[name], f"{name}: {text!r} is not in\n{outcome[name]}"
