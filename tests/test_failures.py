"""One rank's trouble ends the job on all, with the rank and the cause on the screen."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, finish, horovodrun

SCRIPT = Path(__file__).parent / "on_ranks" / "failing.py"
LAST_LINES = 60

EXPECTED = {
    "raise": ["tfposeidon: the job ends. rank 1 failed first: ValueError: broken on purpose"],
    "kill": ["Process name: 1", "Exit code: 137"],
    "late": ["while it waited for tensor 'tp0.", "No word from rank(s) [1]: late, stopped, killed"],
    "stop": ["No word from rank(s) [1]: late, stopped, killed (out of memory?) or cut off"],
    "leave": ["The script of rank(s) [1] had already ended"],
}


@pytest.mark.parametrize("trouble", EXPECTED)
def test_trouble_on_one_rank_ends_the_job(trouble):
    done = horovodrun(2, SCRIPT, trouble, timeout_s=90)
    assert done.returncode != 0
    last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
    for text in EXPECTED[trouble]:
        assert text in last, done.stdout
    assert "the job went on" not in done.stdout
    # Horovod's own report of a stall, which needs the third correction.
    assert ("1!: [tp0." in done.stdout) == (trouble == "late"), done.stdout
    _check_gone(done.stdout)


def _check_gone(output):
    pid = int(output.split("PID ")[1].split()[0])
    deadline = time.monotonic() + 15
    while os.path.exists(f"/proc/{pid}/status") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not os.path.exists(f"/proc/{pid}/status"), "a rank was left behind"


def test_a_killed_rank_started_by_hand():
    """Without horovodrun to watch over them, the survivors say what they know."""
    done = subprocess.run(
        [sys.executable, "-c", BY_HAND, sys.executable, str(SCRIPT)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "codes [1, -9]" in done.stdout, done.stdout + done.stderr
    assert "No word from rank(s) [1]" in done.stderr


BY_HAND = """
import subprocess, sys, os
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.common.util.hosts import parse_hosts, get_host_assignments
from horovod.runner.gloo_run import create_slot_env_vars
plan = get_host_assignments(parse_hosts("127.0.0.1:2"), 2)
server = RendezvousServer(0)
port = server.start()
server.init(plan)
common = dict(os.environ, HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
    HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_IFACE="lo")
ranks = [subprocess.Popen([*sys.argv[1:], "kill"], env={**common, **create_slot_env_vars(slot)}) for slot in plan]
print("codes", [rank.wait() for rank in ranks])
server.stop()
"""


def test_hosts_of_different_size_are_nodes_of_different_size():
    done = horovodrun(3, "-m", "tfposeidon", "check", hosts="localhost:2,127.0.0.1:1", timeout_s=90)
    assert done.returncode == 0, done.stdout
    assert "3 rank(s) on 2 node(s) (2 + 1)" in done.stdout


def test_a_job_without_troubles_ends_in_good_order():
    process = horovodrun(1, "-c", "import tfposeidon as tp; print(tp.init(), tp.rank(), tp.size())", background=True)
    done = finish(process, 60)
    assert done.returncode == 0
    assert "1 rank(s) on 1 node(s) (1 x 1) 0 1" in done.stdout
