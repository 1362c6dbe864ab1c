"""Tests jobs, stored results and exit statuses of the benchmarks."""

import argparse
import json

import pytest

from benchmarks import (
    harness,
)
from benchmarks.workers.task import summary


def test_an_interrupted_benchmark_resumes(tmp_path):
    path, asked = tmp_path / "results.json", []

    def run(number):
        if number == 2 and len(asked) < 3:
            asked.append("interrupted")
            raise KeyboardInterrupt
        asked.append(number)
        return {"answer": number}

    planned = {f"job {number}": {"number": number} for number in range(4)}
    with pytest.raises(KeyboardInterrupt):
        harness.jobs(harness.Results(path), planned, run)
    assert asked == [0, 1, "interrupted"]
    harness.jobs(harness.Results(path), planned, run)
    assert asked == [0, 1, "interrupted", 2, 3]
    kept = json.loads(path.read_text())
    assert [kept[key]["answer"] for key in planned] == [0, 1, 2, 3]
    assert kept["job 0"]["machine"]["versions"]["numpy"]
    assert harness.Results(path, fresh=True).cells == {}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"error": "Traceback\nValueError: no"}, "ValueError: no"),
        ({"step_s": [0.5]}, "500.0 ms"),
        ({"a": 1}, "a 1"),
    ],
)
def test_a_summary_is_the_error_or_the_figures(answer, text):
    assert summary(answer).strip() == text


def test_a_failed_job_sets_the_exit_status_of_the_benchmark(tmp_path):
    def run(number):
        raise harness.JobError("no")

    options = argparse.Namespace(results=tmp_path / "results.json", fresh=False)
    with pytest.raises(SystemExit, match="1 of 1 jobs failed: job 0"):
        harness.carry_out(options, {"job 0": {"number": 0}}, run, lambda _: None, lambda *_: None)
