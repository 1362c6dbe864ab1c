"""A server and workers at their own pace: slow ones end no job, lost ones leave a snapshot."""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.launch import ROOT, ahead, horovodrun

SCRIPT = ROOT / "tests" / "on_ranks" / "asynchronous_job.py"


def _run(kind, cause=None):
    """A job of a server and two workers; where a worker is lost, a second one that goes on."""
    with tempfile.TemporaryDirectory() as folder:
        done = horovodrun(3, SCRIPT, kind, folder)
        snapshots = sorted(Path(folder).glob("snapshot-*"))
        meta = json.loads((snapshots[-1] / "meta.json").read_text()) if snapshots else {}
        again = None if kind == "slow" else horovodrun(3, SCRIPT, "none", folder)
    return done, meta, again


def _digests(output):
    return re.findall(r"rank \d has (\w+)", output)


@ahead(functools.partial(_run, "slow"))
def test_a_worker_slower_than_the_stall_limit_ends_no_job(outcome):
    done, _, _ = outcome
    assert done.returncode == 0, done.stdout
    assert len(_digests(done.stdout)) == 3
    assert len(set(_digests(done.stdout))) == 1
    assert "worker 2 is alive, and has not exchanged for" in done.stdout


@ahead(_run)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("kill", "Process name: 2"),
        ("raise", "rank 2 failed first: ValueError: broken on purpose"),
    ],
)
def test_a_lost_worker_ends_the_job_once_the_server_has_saved(kind, cause, outcome):
    done, meta, again = outcome
    assert done.returncode != 0
    assert cause in done.stdout, done.stdout
    assert "the job ends; the server has saved the centre" in done.stdout, done.stdout
    # As a mean, workers are in the second epoch; the server may still evaluate the first.
    assert meta["epoch"] in (0, 1), meta
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout
    assert len(set(_digests(again.stdout))) == 1
