"""A killed process leaves a complete snapshot."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests.launch import ROOT, ahead
from tests.state.test_snapshots import WIRE
from tfposeidon.state.snapshots import Snapshots

WRITER = """
import sys, numpy as np
from tests.state.test_snapshots import WIRE, Snapshots, write
files = Snapshots(sys.argv[1], WIRE)
for step in range(int(sys.argv[2]), 10**6):
    print(step, flush=True)
    write(files, {"step": step}, {"a": [np.full(200_000, step)]}, {"b": [np.full(50_000, -step)]})
"""


def kills():
    """Kills three writers; returns the step and the newest complete snapshot after each kill."""
    pauses = random.Random(0)
    found, newest = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            command = [sys.executable, "-c", WRITER, folder, str(newest + 1)]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/without:{ROOT}"}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            for _ in range(3):
                process.stdout.readline()
            time.sleep(pauses.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            snapshot = Snapshots(folder, WIRE).read_latest()
            found.append((newest, snapshot))
            newest = snapshot.meta["step"]
    return found


@ahead(kills)
def test_a_kill_at_any_time_leaves_a_complete_snapshot(outcome):
    assert len(outcome) == 3
    for before, snapshot in outcome:
        step = snapshot.meta["step"]
        assert step > before, "complete snapshots must remain"
        assert (snapshot.shared["a"][0] == step).all()
        assert (snapshot.own[0]["b"][0] == -step).all()
