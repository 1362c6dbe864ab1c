"""Tests the key-value store and the registration of ranks, with threads as ranks."""

import dataclasses
import json
import os
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from tests.peers.test_sources import SLURM
from tfposeidon.communication import launcher
from tfposeidon.peers import rendezvous, sources, store
from tfposeidon.peers.rendezvous import Client, Entry
from tfposeidon.peers.sources import Job

IDENTITY = "test a:1"
PREFIX = store.prefix_of(IDENTITY, "secret")


@pytest.fixture
def server():
    found = store.listen("127.0.0.1", (0,), IDENTITY, "secret")
    with found.serving():
        yield found


def job(server, rank=0, size=2, **others):
    defaults = {
        "host": "127.0.0.1",
        "ports": server.server_address[1:],
        "identity": IDENTITY,
        "members": tuple(f"host{one}:1" for one in range(size)),
    }
    return Job("test", rank, size, **{**defaults, **others})


def own(rank):
    return {"node": f"node {rank}"}


THERE = {"host": "there", "process": 7, "start": "first"}


def meet(server, rank, size=2, limit_s=5.0):
    mine = job(server, rank, size)
    reached = rendezvous.connect(mine, "secret", limit_s)
    return rendezvous.register_process(
        reached, "ranks", mine, own(rank), time.monotonic() + limit_s
    )


def test_all_ranks_receive_all_entries(server):
    with ThreadPoolExecutor(8) as ranks:
        found = [*ranks.map(lambda rank: meet(server, rank, 8), range(8))]
    assert [[{"node": entry["node"]} for entry in entries] for entries in found] == [
        [own(rank) for rank in range(8)]
    ] * 8


def test_a_missing_rank_is_named(server):
    message = r"Received: no registration of rank 1 \(host1:1\) at 127\.0\.0\.1:\d+"
    with pytest.raises(TimeoutError, match=message):
        meet(server, 0, limit_s=0.2)


def test_slurm_timeouts_name_srun(server):
    hint = sources.find(SLURM).hint
    mine = job(server, 0, hint=hint)
    reached = rendezvous.connect(mine, "secret", 5.0)
    message = r"Start all tasks of the step with srun, or unset SLURM_STEP_ID"
    with pytest.raises(TimeoutError, match=message):
        rendezvous.register_process(reached, "ranks", mine, own(0), time.monotonic() + 0.1)
    with pytest.raises(TimeoutError, match=message):
        rendezvous.connect(job(server, 1, identity="another", hint=hint), None, 0.1)


def published(server, rank):
    while server.get("ranks", str(rank)) is None:
        time.sleep(0.01)


@pytest.mark.parametrize("other", [{"process": 8}, {"host": "here"}, {"start": "second"}])
def test_two_processes_with_one_rank_are_named_in_the_error(server, other):
    """This includes a restarted container with the same host name and process number."""
    mine = {"host": socket.gethostname(), "process": os.getpid(), "start": rendezvous.START}
    first = {**mine, **own(1), "size": 2, **other}
    server.put("ranks", "1", json.dumps(first).encode())
    message = (
        f"process {first['process']} on {first['host']} and process {os.getpid()} on "
        f"{socket.gethostname()}"
    )
    with pytest.raises(RuntimeError, match=message):
        meet(server, 1)


def test_sizes_are_compared_before_ranks_are_counted(server):
    with ThreadPoolExecutor() as ranks:
        waiting = ranks.submit(meet, server, 0, limit_s=60)
        published(server, 0)
        server.put("ranks", "2", json.dumps({**THERE, "size": 3}).encode())
        with pytest.raises(ValueError, match=r"2 on rank 0 \(host0:1\), 3 on rank 2"):
            waiting.result(10)


@pytest.mark.parametrize("method", ["put_first", "all"])
@pytest.mark.parametrize("problem", [ConnectionResetError("reset"), TimeoutError("timed out")])
def test_a_request_that_fails_once_is_repeated(server, monkeypatch, method, problem):
    original, problems = getattr(rendezvous.Client, method), [problem]

    def fails_once(*arguments):
        answer = original(*arguments)
        if problems:
            raise problems.pop()
        return answer

    monkeypatch.setattr(rendezvous.Client, method, fails_once)
    assert len(meet(server, 0, size=1)) == 1
    assert not problems


def test_requests_that_keep_failing_end_the_start_at_its_deadline(server, monkeypatch):
    reached = rendezvous.connect(job(server), "secret", 5.0)
    monkeypatch.setattr(rendezvous.Client, "request", mock.Mock(side_effect=TimeoutError("silent")))
    with pytest.raises(RuntimeError, match=r"must answer until.*Received: silent at 127"):
        rendezvous.register_process(reached, "ranks", job(server), own(0), time.monotonic() + 0.3)


def is_reached(mine, token):
    return isinstance(rendezvous.reach(mine, token), Client)


def test_a_second_rank_0_uses_the_store_of_the_first(server, monkeypatch):
    """It does not start a second store, and the error names both processes."""
    monkeypatch.setattr(store, "start_process", None)
    server.put("ranks", "0", json.dumps({**THERE, "size": 2}).encode())
    message = rf"rank 0 \(host0:1\) is process 7 on there and process {os.getpid()} on "
    with pytest.raises(RuntimeError, match=message):
        rendezvous.register_ranks(job(server), "secret", 5.0)
    # If both start at the same time, the port is taken.
    answers = ["no answer", rendezvous.reach(job(server), "secret")]
    monkeypatch.setattr(rendezvous, "reach", lambda *_: answers.pop(0))
    with pytest.raises(RuntimeError, match=message):
        rendezvous.register_ranks(job(server), "secret", 5.0)


def test_a_job_without_a_store_finds_none(server):
    assert not is_reached(job(server, identity="second"), None)


def test_the_store_of_an_ending_job_is_not_used(server):
    server.wait_for_exit_statuses(2, limit_s=0.0)
    with pytest.raises(TimeoutError, match=r"no answer at .* \(its job is ending\)"):
        meet(server, 0, limit_s=0.1)
    # A new start has another token.
    assert not is_reached(job(server), "another")


def test_waiting_ranks_detect_the_end_of_rank_0_immediately(server):
    with ThreadPoolExecutor() as ranks:
        waiting = ranks.submit(meet, server, 1, limit_s=60)
        published(server, 1)
        server.wait_for_exit_statuses(2, limit_s=0.0)
        message = r"must answer until all ranks have registered.*rank 0 \(host0:1\), which show why"
        with pytest.raises(RuntimeError, match=message):
            waiting.result(10)


def test_a_wrong_token_is_refused(server):
    with pytest.raises(
        PermissionError, match=r"same token\. Received: .* refused\. Set TFPOSEIDON_TOKEN"
    ):
        rendezvous.connect(job(server, 1), "another", 5.0)


def test_the_store_of_another_job_is_ignored(server):
    second = store.listen("127.0.0.1", (0,), "other", None)
    with second.serving():
        ports = (second.server_address[1], server.server_address[1])
        assert rendezvous.connect(job(server, ports=ports), "secret", 5.0).port == ports[1]
    mine = job(server, 1, identity="third")
    with pytest.raises(TimeoutError, match=r"another job at .*\(test a:1; this job is third\)"):
        rendezvous.connect(mine, None, 0.1)


def test_a_missing_store_is_named(server):
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    message = rf"no answer at 127\.0\.0\.1:{port} .*refused.*Check that rank 0 \(host0:1\)"
    with pytest.raises(TimeoutError, match=message):
        rendezvous.connect(job(server, 1), "secret", 0.1)


def test_a_host_without_an_address_is_named(server):
    with pytest.raises(TimeoutError, match=r"no answer at no-such-host\.invalid"):
        rendezvous.connect(job(server, 1, host="no-such-host.invalid"), "secret", 0.1)


def test_a_store_answers_at_any_loopback_address(monkeypatch):
    """On Debian, a host's name resolves to 127.0.1.1, so its ranks must find the store there."""
    found = store.listen("127.0.1.1", (0,), IDENTITY, "secret")
    with found.serving():
        there = job(found, host="127.0.1.1")
        rendezvous.connect(there, "secret", 5.0)
        assert rendezvous.open_store(there, "secret", 5.0)[1] is None
    ports = found.server_address[1:]
    own = job(found, size=1, host="127.0.1.1", ports=ports, identity="alone")
    of_run = dataclasses.replace(own, identity="of run")
    reached, served = rendezvous.open_store(of_run, "secret", 5.0)
    with served.serving():
        reached.put_first("nodes", "0", "node 0")
    start, started = store.start_process, []

    def starting(*place):
        started.append(start(*place))
        return started[-1]

    monkeypatch.setattr(store, "start_process", starting)
    entries, reached = rendezvous.register_ranks(own, "secret", 5.0)
    for process in started:
        process.kill()
        process.wait()
    assert (len(entries), reached.host) == (1, "127.0.1.1")


def test_a_taken_port_is_named(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "BIND_S", 0.0)
    port = server.server_address[1]
    with pytest.raises(OSError, match=rf"port\(s\) {port}, which other programs use"):
        rendezvous.open_store(job(server, identity="second"), None, 5.0)
    second = store.listen("127.0.0.1", (port, 0), "second", None)
    assert second.server_address[1] != port
    second.server_close()


def request(server, method, path, body=None):
    """Sends a request like Horovod, whose prefix precedes the port that it appends."""
    url = f"http://127.0.0.1:{server.server_address[1]}/{path}"
    found = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(found) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_horovods_requests_put_get_and_delete_entries(server):
    path = f"{PREFIX}:0/global/0"
    assert request(server, "GET", path) == (404, b"")
    assert request(server, "PUT", path, b"\x00binary")[0] == 200
    assert request(server, "GET", path) == (200, b"\x00binary")
    assert request(server, "DELETE", path)[0] == 200
    assert request(server, "GET", path) == (404, b"")


@pytest.mark.parametrize("prefix", ["", "global", f"{PREFIX[:-1]}", f"{PREFIX}0:0"])
def test_requests_without_the_prefix_are_refused(server, prefix):
    server.put("global", "0", b"1")
    for method in ("GET", "PUT", "DELETE"):
        body = b"2" if method == "PUT" else None
        assert request(server, method, f"{prefix}/global/0", body) == (403, b"")
    assert server.get("global", "0") == b"1"


def test_failures_are_reported_through_the_store(server):
    reached = launcher.Store(f"127.0.0.1:{server.server_address[1]}/{PREFIX}", 0)
    reached.put("exit-status-of-rank-1", "ended")
    assert reached.get("exit-status-of-rank-1") == "ended"
    server.report_end(1, "not reported, because the rank has written its status")
    server.report_end(0, "rank 0 was killed")
    assert reached.get("first-failure") == "rank 0 was killed"


def test_a_store_waits_for_exit_statuses_within_its_limit(server):
    begin = time.monotonic()
    server.wait_for_exit_statuses(2, limit_s=0.2)
    assert 0.2 <= time.monotonic() - begin < 5
    for rank in range(2):
        server.put(store.FAILURES, store.EXIT_STATUS.format(rank), b'"ended"')
    server.wait_for_exit_statuses(2, limit_s=600)


def entries(*nodes, addresses=None):
    return [Entry(node, (addresses or {}).get(node, "")) for node in nodes]


def test_ranks_in_any_order_have_local_and_cross_ranks():
    found = entries("a", "b", "a", "c", "a", "b")
    reached = Client("10.0.0.1", 4711, "PREFIX")
    assert rendezvous.nodes_of([entry.node for entry in found]) == ((0, 2, 4), (1, 5), (3,))
    numbers = [
        [
            int(rendezvous.horovod_variables(found, rank, reached)[f"HOROVOD_{name}"])
            for name in ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        ]
        for rank in range(6)
    ]
    assert numbers == [
        [0, 3, 0, 3],
        [0, 2, 1, 3],
        [1, 3, 0, 2],
        [0, 1, 2, 3],
        [2, 3, 0, 1],
        [1, 2, 1, 2],
    ]
    variables = rendezvous.horovod_variables(found, 3, reached)
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1:4711/PREFIX"
    assert variables["HOROVOD_HOSTNAME"] == "node-2"


def test_interfaces_are_those_that_connect_the_nodes(monkeypatch):
    monkeypatch.setattr(rendezvous, "_interface_of", {"127.0.0.1": "lo", "10.0.0.2": "eth1"}.get)
    monkeypatch.setattr(
        rendezvous, "_address_towards", dict.fromkeys(["127.0.0.1", "10.0.0.2"], "127.0.0.1").get
    )
    one = entries("a", "a")
    assert rendezvous.interface_variables(one, 1)["HOROVOD_GLOO_IFACE"] == "lo"
    two = entries("a", "b", addresses={"a": "127.0.0.1", "b": "10.0.0.2"})
    assert rendezvous.interface_variables(two, 0) == dict.fromkeys(
        ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), "lo"
    )
    assert rendezvous.interface_variables(two, 1)["HOROVOD_GLOO_IFACE"] == "eth1"
    unknown = entries("a", "b", addresses={"b": "10.9.9.9"})
    assert rendezvous.interface_variables(unknown, 1) == {}


def test_one_process_and_launchers_need_no_rendezvous(monkeypatch):
    monkeypatch.setattr(rendezvous, "_nodes", None)
    for name in (rendezvous.LAUNCHER, rendezvous.MEMBER, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous.join(1.0, has_mpi=False) is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="torchrun lacks"):
        rendezvous.join(1.0, has_mpi=False)
    monkeypatch.setenv("PMIX_RANK", "0")
    assert rendezvous.join(1.0, has_mpi=True) is None
    monkeypatch.setenv(rendezvous.LAUNCHER, "0")
    assert rendezvous.join(1.0, has_mpi=False) is None


def test_a_child_of_a_rank_is_refused(monkeypatch):
    monkeypatch.setattr(rendezvous, "_nodes", None)
    monkeypatch.setenv(rendezvous.LAUNCHER, "3")
    monkeypatch.setenv(rendezvous.STORE_ADDRESS, "a:1/x")
    monkeypatch.setenv(rendezvous.MEMBER, "1 a:1/x")
    with pytest.raises(RuntimeError, match=rf"of rank 3, process 1, in process {os.getpid()}\."):
        rendezvous.join(1.0, has_mpi=False)
    # The rank has started this job with a launcher.
    monkeypatch.setenv(rendezvous.STORE_ADDRESS, "a:2")
    assert rendezvous.join(1.0, has_mpi=False) is None
