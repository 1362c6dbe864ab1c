"""Slow workers do not end a job, and lost ranks leave a snapshot of the server."""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.launch import ROOT, ahead, horovodrun

SCRIPT = ROOT / "tests" / "jobs" / "asynchronous_job.py"


STEPS, EPOCHS = 8, 4
"""Steps of a worker in an epoch, and epochs."""


def _run(kind, cause=None, server=0, goes_on=False, ranks=3):
    """Runs a job of a server and workers; with `goes_on`, a second job resumes it."""
    with tempfile.TemporaryDirectory() as folder:
        done = horovodrun(ranks, SCRIPT, kind, folder, server)
        snapshots = sorted(Path(folder).glob("snapshot-*"))
        meta = json.loads((snapshots[-1] / "meta.json").read_text()) if snapshots else {}
        again = horovodrun(ranks, SCRIPT, "none", folder, server) if goes_on else None
    return done, meta, again


def _digests(output):
    return re.findall(r"rank \d has (\w+)", output)


@ahead(functools.partial(_run, "slow"))
def test_a_worker_slower_than_the_stall_limit_does_not_end_the_job(outcome):
    done, _, _ = outcome
    assert done.returncode == 0, done.stdout
    assert len(_digests(done.stdout)) == 3
    assert len(set(_digests(done.stdout))) == 1
    assert "worker 2 is alive but has not exchanged weights for" in done.stdout


@ahead(_run)
@pytest.mark.parametrize(
    ("kind", "cause", "server", "goes_on", "ranks"),
    [
        ("kill", "Process name: 2", 0, False, 3),
        # If rank 0 is a worker, the server still logs lines about the job.
        ("raise", "rank 2 failed first: ValueError: broken on purpose", 1, True, 3),
        ("raise at the server", "rank 0 failed first: ValueError: broken on purpose", 0, False, 2),
        ("terminate", "the job ends. rank 0 received SIGTERM", 0, False, 2),
    ],
)
def test_a_lost_rank_ends_the_job_after_the_server_has_saved(
    kind, cause, server, goes_on, ranks, outcome
):
    done, meta, again = outcome
    assert done.returncode != 0
    assert cause in done.stdout, done.stdout
    assert "the job ends; the server has saved the global weights" in done.stdout, done.stdout
    assert "already finished" not in done.stdout, done.stdout
    # Epochs count the mean over workers, so the other worker may be at any step.
    assert (0 if kind in ("kill", "raise") else 2) <= meta["epoch"] < EPOCHS, meta
    if not goes_on:
        return
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout
    assert len(set(_digests(again.stdout))) == 1
    _check_steps(meta["epoch"], again.stdout)


def _check_steps(epoch, resumed):
    """Checks that the server counts the steps of both runs."""
    ((begun, before),) = re.findall(r"the server begins epoch (\d) after (\d+) steps", resumed)
    (after,) = re.findall(r"the server ends after (\d+) steps", resumed)
    assert int(begun) == epoch
    # The incomplete epoch is repeated.
    assert epoch * STEPS <= int(before) <= EPOCHS * STEPS
    assert int(after) == int(before) + (EPOCHS - epoch) * STEPS


@ahead(functools.partial(_run, "raise in a loop", ranks=2))
def test_a_custom_loop_saves_the_global_weights(outcome):
    done, _, _ = outcome
    assert done.returncode != 0
    assert "rank 1 failed first: ValueError: broken on purpose" in done.stdout, done.stdout
    assert "the job ends; the server has saved the global weights" in done.stdout, done.stdout
    assert "center moved: True" in done.stdout, done.stdout
