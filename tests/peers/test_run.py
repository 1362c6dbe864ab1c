"""Tests `python -m tfposeidon run`: its options, and jobs whose ranks are shell scripts."""

import argparse
import asyncio
import io
import json
import os
import signal
import sys
import threading
import time

import pytest

from tfposeidon.peers import run, sources, store
from tfposeidon.peers.rendezvous import Client
from tfposeidon.peers.runner import Rank, Runner


def options(*words):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_line_describes_nodes():
    job = run.read_job(options("--nodes", "2", "--node-rank", "1", "--master", "a:5"), {})
    assert (job.rank, job.size, job.host, job.ports) == (1, 2, "a", (5,))
    assert job.name_of(1) == "node 1"


def test_the_platform_describes_nodes_and_the_default_is_one_node():
    cluster = {"worker": ["a:1", "b:1"]}
    variables = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    }
    job = run.read_job(options(), variables)
    assert (job.rank, job.size, job.host, job.unit) == (1, 2, "a", "node")
    alone = run.read_job(options(), {})
    assert (alone.size, alone.host, alone.ports) == (1, "127.0.0.1", (0,))


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--nodes", "2"], {}, "given together.*--node-rank None, --master None"),
        (["--nodes", "2", "--node-rank", "2", "--master", "a:5"], {}, "rank 2 of 2"),
        (["--nodes", "2", "--node-rank", "0", "--master", "a"], {}, "form host:port"),
        (
            [],
            {
                "RANK": "1",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            "torchrun: rank 1 of 4, with several processes per node.*Leave out",
        ),
    ],
)
def test_invalid_nodes_are_refused(words, variables, message):
    with pytest.raises(ValueError, match=message):
        run.read_job(options(*words), variables)


def test_only_a_single_node_generates_a_token():
    alone = run.read_job(options(), {})
    assert len(run.read_token(options(), {}, alone)) == 32
    assert run.read_token(options(), {}, alone) != run.read_token(options(), {}, alone)
    words = ("--nodes", "2", "--node-rank", "1", "--master", "a:5")
    assert run.read_token(options(*words), {}, run.read_job(options(*words), {})) is None


@pytest.mark.parametrize(
    ("asked", "variables", "gpus", "count"),
    [
        (None, {}, ["0", "1"], 2),
        (3, {}, ["0", "1"], 3),
        (3, {}, [], 3),
        (None, {"PET_NPROC_PER_NODE": "4"}, [], 4),
        (None, {"PET_NPROC_PER_NODE": "gpu"}, ["0"], 1),
    ],
)
def test_options_variables_and_gpus_determine_the_number_of_ranks(asked, variables, gpus, count):
    assert run.ranks_here(asked, variables, gpus) == count


@pytest.mark.parametrize("asked", [None, 0])
def test_the_number_of_ranks_is_required_without_gpus(asked):
    with pytest.raises(ValueError, match=rf"at least 1.*--per-node {asked} and 0 visible"):
        run.ranks_here(asked, {}, [])


@pytest.mark.parametrize(
    ("given", "gpus"),
    [("", []), ("-1", []), ("2,5", ["2", "5"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"])],
)
def test_a_variable_determines_the_visible_gpus(given, gpus):
    assert run.visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == gpus


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"A command is required\. Received: \[\]"),
        (["--"], r"A command is required\. Received: \['--'\]"),
        (["--", "/no/such/program"], r"must be an executable file.* Received: '/no/such/program'"),
    ],
)
def test_a_command_is_required(words, message):
    with pytest.raises(ValueError, match=message):
        run.read_command(words)
    assert run.read_command(["--", "true", "-x"]) == ["true", "-x"]


@pytest.mark.parametrize(
    ("count", "gpus", "visible"),
    [
        (2, ["2", "5"], ["2", "5"]),
        (1, ["GPU-a", "GPU-b"], ["GPU-a"]),
        # With more ranks than GPUs, tfposeidon.init() assigns them.
        (2, ["0"], [None, None]),
    ],
)
def test_each_rank_has_its_own_gpu(monkeypatch, count, gpus, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = run.read_job(options("--nodes", "2", "--node-rank", "1", "--master", "a:5"), {})
    found = [*run.environments(node, "secret", Client("a", 5, "key"), [3, count], gpus)]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for _, variables in found] == visible
    for index, (number, variables) in enumerate(found):
        rank = sources.find(variables)
        assert (rank.rank, rank.size, rank.node) == (3 + index, 3 + count, "node 1")
        assert (number, sources.token(variables)) == (rank.rank, "secret")


@pytest.fixture
def job():
    """Yields a store and a client of it."""
    server = store.listen("127.0.0.1", (0,), "job", None)
    with server.serving():
        yield server, Client("127.0.0.1", server.server_address[1], server.prefix)


def ranks(*scripts):
    return [
        Rank(number=number, node=2, command=["sh", "-c", script], environment={**os.environ})
        for number, script in enumerate(scripts, 4)
    ]


def first_failure(server):
    found = server.get(store.FAILURES, store.FIRST_FAILURE)
    return found and json.loads(found)


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        (None, "rank 4 ended with exit status 3"),
        # "ended" is the status after sys.exit(3) in a rank that called tfposeidon.init().
        ("ended", "rank 4 ended with exit status 3"),
        ("failed", None),
        ("broken", None),
    ],
)
def test_a_failed_rank_without_a_cause_is_reported_to_other_nodes(job, word, cause):
    server, client = job
    if word:
        server.put(store.FAILURES, store.EXIT_STATUS.format(4), json.dumps(word).encode())
    assert asyncio.run(run.run_ranks(ranks("exit 3"), client, None)) == 3
    assert (first_failure(server) or "").startswith(cause or "")
    assert (first_failure(server) is None) == (cause is None)


def test_a_failure_on_another_node_replaces_only_exit_status_0(job):
    server, client = job
    server.put(store.FAILURES, store.FIRST_FAILURE, b'"rank 0 failed first"')
    assert asyncio.run(run.run_ranks(ranks("sleep 0.5"), client, None)) == 1
    assert asyncio.run(run.run_ranks(ranks("sleep 0.5; exit 5"), client, None)) == 5


def test_nodes_follow_the_job_after_a_lost_connection(job, monkeypatch):
    server, client = job
    server.put(store.FAILURES, store.FIRST_FAILURE, b'"rank 0 failed first"')
    original, problems = Client.get, [ConnectionResetError("reset")]

    def fails_once(*arguments):
        if problems:
            raise problems.pop()
        return original(*arguments)

    monkeypatch.setattr(Client, "get", fails_once)
    monkeypatch.setattr(run, "FOLLOW_S", 0.1)
    assert asyncio.run(run.run_ranks(ranks("sleep 1"), client, None)) == 1
    assert not problems


@pytest.fixture
def handled():
    """Handles SIGINT, which shells ignore in background processes."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def sends(number, is_ready):
    """Sends a signal to this process when `is_ready` returns true."""

    def send():
        while not is_ready():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_is_reported_to_other_nodes(job, handled, tmp_path, number):
    server, client = job
    started = [tmp_path / "a", tmp_path / "b"]
    thread = sends(number, lambda: all(file.exists() for file in started))
    running = ranks(*(f"touch {file}; sleep 60" for file in started))
    status = asyncio.run(run.run_ranks(running, client, None))
    thread.join()
    assert status == 128 + number
    assert [rank.status for rank in running] == [-signal.SIGTERM] * 2
    assert first_failure(server) == f"run of node 2 received {number.name}."


def test_a_signal_during_the_start_ends_the_started_ranks(job, handled, tmp_path, monkeypatch):
    create = asyncio.create_subprocess_exec

    async def create_slowly(*command, **options):
        process = await create(*command, **options)
        await asyncio.sleep(0.5)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    started = tmp_path / "started"
    thread = sends(signal.SIGTERM, started.exists)
    running = ranks(f"touch {started}; sleep 60", "sleep 60")
    assert asyncio.run(run.run_ranks(running, job[1], None)) == 128 + signal.SIGTERM
    thread.join()
    assert [rank.status for rank in running] == [-signal.SIGTERM] * 2


def test_a_second_signal_kills_ranks_that_ignore_the_first(job, handled, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TERMINATION_S", 60.0)
    started, asked = tmp_path / "started", tmp_path / "asked"
    running = ranks(f"trap 'touch {asked}' TERM; touch {started}; while :; do sleep 0.1; done")
    threads = [sends(signal.SIGINT, file.exists) for file in (started, asked)]
    assert asyncio.run(run.run_ranks(running, job[1], None)) == 128 + signal.SIGINT
    for thread in threads:
        thread.join()
    assert running[0].status == -signal.SIGKILL


def test_signals_that_nohup_ignores_stay_ignored(job, tmp_path):
    started = tmp_path / "started"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = sends(signal.SIGHUP, started.exists)
        command = ranks(f"touch {started}; sleep 0.5")
        assert asyncio.run(run.run_ranks(command, job[1], None)) == 0
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, previous)


def output_of(script, sink, monkeypatch, folder=None):
    monkeypatch.setattr(sys, "stdout", sink)
    asyncio.run(Runner("test", folder=folder).run(ranks(script)))


def test_characters_unsupported_by_the_output_are_replaced(monkeypatch, tmp_path):
    sink = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    output_of(r"printf '\303\244b\n'", sink, monkeypatch)
    assert sink.buffer.getvalue() == b"[4] ?b\n"
    output_of(r"printf '\303\244\377\n'", sink, monkeypatch, tmp_path)
    assert (tmp_path / "rank-4.log").read_bytes() == "\u00e4\ufffd\n".encode()


def test_a_full_disk_ends_the_job_with_a_message(job, monkeypatch, capsys):
    server, client = job
    begin = time.monotonic()
    with open("/dev/full", "w") as sink:
        monkeypatch.setattr(sys, "stdout", sink)
        status = asyncio.run(run.run_ranks(ranks("echo a; sleep 60"), client, None))
    assert status == 128 + signal.SIGPIPE
    assert time.monotonic() - begin < 30
    assert first_failure(server) == "run of node 2 could not write its output."
    assert "could not be written: [Errno 28] No space left" in capsys.readouterr().err


def test_closed_output_does_not_interrupt_the_end_of_the_job(job, monkeypatch, tmp_path):
    """A rank that ignores SIGTERM and writes more output is still killed."""
    monkeypatch.setattr(run, "TERMINATION_S", 1.0)
    script = (
        f"trap 'echo b >&2' TERM; echo $$ > {tmp_path}/pid; echo a; while true; do sleep 1; done"
    )
    with open("/dev/full", "w") as out, open("/dev/full", "w") as error:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        asyncio.run(run.run_ranks(ranks(script), job[1], None))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_failed_rank_ends_the_job_if_stderr_is_not_writable(job, monkeypatch):
    with open("/dev/full", "w") as error:
        monkeypatch.setattr(sys, "stderr", error)
        assert asyncio.run(run.run_ranks(ranks("exit 3"), job[1], None)) == 3


def test_an_unwritable_log_is_reported_to_other_nodes(job, tmp_path):
    (tmp_path / "rank-4.log").mkdir()
    with pytest.raises(IsADirectoryError):
        asyncio.run(run.run_ranks(ranks("sleep 60"), job[1], tmp_path))
    assert first_failure(job[0]).startswith("run of node 2 failed: [Errno 21] Is a directory")
