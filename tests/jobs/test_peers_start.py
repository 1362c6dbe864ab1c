"""Ranks find each other by their platform's variables, without a launcher and without SSH."""

import contextlib
import socket
import sys
import time

import pytest

from tests.jobs.starting import FAILING_KIND, FAILING_RANK, KINDS, LATE, NODE_KINDS
from tests.launch import ROOT, ahead, finish, lab, start

SCRIPT = str(ROOT / "tests" / "jobs" / "starting.py")
LIMIT_S = 300


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(kind, *what, environments=({}, {})):
    """Starts processes with the variables of two ranks, and returns the finished processes."""
    port = str(free_port())
    running = []
    for rank, extra in enumerate(environments):
        variables = KINDS[kind](rank, 2, ["127.0.0.1"] * 2)
        environment = {**variables, "TFPOSEIDON_PORT": port, **extra}
        running.append(start([sys.executable, SCRIPT, *what], environment))
    done = [finish(process, LIMIT_S) for process in running]
    _check_no_store_left(int(port))
    return done


def _check_no_store_left(port):
    """Checks that the store of rank 0 has ended, or ends soon."""
    deadline = time.monotonic() + 20
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.2)
        raise AssertionError("the store of rank 0 must end with the job")


TOKEN = {"TFPOSEIDON_TOKEN": "the-token-of-this-job"}


@ahead(lambda: started("torchrun", "sum", environments=[TOKEN, TOKEN]))
def test_two_ranks_start_on_one_machine(outcome):
    for rank, done in enumerate(outcome):
        assert done.returncode == 0, done.stdout
        assert f"rank {rank} of 2 rank(s) on 1 node(s) (1 x 2)" in done.stdout
        assert "sum 1" in done.stdout
        assert "2 secrets are on no command line" in done.stdout


@ahead(lambda: started("TF_CONFIG", "kill"))
def test_the_other_ranks_name_a_killed_rank_0(outcome):
    killed, other = outcome
    assert killed.returncode == -9
    assert other.returncode == 1
    assert "tfposeidon: the job ends. rank 0 (process " in other.stdout, other.stdout
    assert "ended without a message: it may have been killed" in other.stdout


WRONG = [{"TFPOSEIDON_TOKEN": "right", "START_TIMEOUT_S": "10"}, {"TFPOSEIDON_TOKEN": "wrong"}]


@ahead(lambda: started("TF_CONFIG", "sum", environments=WRONG))
def test_a_wrong_token_is_refused_and_a_missing_peer_is_named(outcome):
    waiting, refused = outcome
    assert refused.returncode == 1
    assert "PermissionError: All processes of a job must have the same token" in refused.stdout
    assert waiting.returncode == 1
    assert "no registration of rank 1 (127.0.0.1:7001) at 127.0.0.1:" in waiting.stdout, (
        waiting.stdout
    )


def run(*options):
    return [sys.executable, "-m", "tfposeidon", "run", *options, "--", sys.executable, SCRIPT]


def two_nodes():
    nodes = ("--per-node", "1", "--nodes", "2", "--master", f"127.0.0.1:{free_port()}")
    commands = [[*run(*nodes, "--node-rank", str(node)), "sum"] for node in range(2)]
    running = [start(command) for command in commands]
    return [finish(process, LIMIT_S) for process in running]


@ahead(two_nodes)
def test_run_starts_ranks_on_two_nodes(outcome):
    for node, done in enumerate(outcome):
        assert done.returncode == 0, done.stdout
        assert f"[{node}] rank {node} of 2 rank(s) on 2 node(s) (2 x 1)" in done.stdout


@ahead(lambda: finish(start([*run("--per-node", "2"), "kill"]), LIMIT_S))
def test_run_returns_the_status_of_the_first_failed_rank(outcome):
    assert outcome.returncode == 128 + 9, outcome.stdout
    assert "tfposeidon run: rank 0 was ended by SIGKILL" in outcome.stdout
    assert "[1] tfposeidon: the job ends. rank 0 was ended by SIGKILL" in outcome.stdout
    assert "[1] 2 secrets are on no command line" in outcome.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_be_numbered_alternately_on_two_nodes(kind):
    done = lab("--nodes 2 --per-node 2", sys.executable, SCRIPT, "lab", kind, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("nodes ((0, 2), (1, 3)), sum 6") == 4, done.stdout
    assert (f"rank {LATE.get(kind)} starts late" in done.stdout) == (kind in LATE)


@ahead(lambda: lab("--nodes 2", sys.executable, SCRIPT, "nodes", timeout_s=LIMIT_S))
def test_run_uses_variables_that_describe_nodes(outcome):
    """In the last job, a rank of node 1 fails, and `run` on node 0 prints the cause."""
    said = outcome.stdout
    assert outcome.returncode == 0, said
    for kind in NODE_KINDS:
        statuses = (1, 3) if kind == FAILING_KIND else (0, 0)
        for rank in range(4):
            assert f"[{rank}] {kind}: rank {rank} of nodes ((0, 1), (2, 3)) at eth0" in said, said
        for node, status in enumerate(statuses):
            assert f"{kind} ended with {status} on node {node}" in said, said
    assert f"tfposeidon run: the job ends. rank {FAILING_RANK} ended with exit status 3" in said
