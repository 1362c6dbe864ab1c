"""The store and the meeting of ranks in it, as threads of this process."""

import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfposeidon.communication import launcher
from tfposeidon.peers import client, meeting, store
from tfposeidon.peers.client import Client
from tfposeidon.peers.meeting import Entry
from tfposeidon.peers.sources import Job

IDENTITY = "test a:1"
PREFIX = store.prefix_of(IDENTITY, "secret")


@pytest.fixture
def server():
    with store.Store(("127.0.0.1", 0), IDENTITY, PREFIX) as found, found.serving():
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
    return {"host": "here", "process": 100 + rank}


def meet(server, rank, size=2, limit_s=5.0, entry=None):
    mine = job(server, rank, size)
    reached = client.connect(mine, "secret", limit_s)
    return meeting.meet(reached, "ranks", mine, entry or own(rank), time.monotonic() + limit_s)


def test_all_ranks_get_the_entries_of_all(server):
    with ThreadPoolExecutor(8) as ranks:
        found = [*ranks.map(lambda rank: meet(server, rank, 8), range(8))]
    assert found == [[own(rank) for rank in range(8)]] * 8


def test_a_missing_rank_is_named(server):
    message = r"Received: rank 1 \(host1:1\) did not come to 127\.0\.0\.1:\d+"
    with pytest.raises(TimeoutError, match=message):
        meet(server, 0, limit_s=0.2)


def test_a_second_process_with_one_rank_is_an_error_with_both(server):
    with ThreadPoolExecutor() as ranks:
        first = ranks.submit(meet, server, 1)
        while server.get("ranks", "1") is None:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="process 101 on here and process 7 on there"):
            meet(server, 1, entry={"host": "there", "process": 7})
        meet(server, 0)
        first.result()


def test_the_store_of_an_ending_job_is_no_place_to_meet(server):
    server.wait_for_last_words(2, limit_s=0.0)
    with pytest.raises(TimeoutError, match=r"no answer at .* \(its job is ending\)"):
        meet(server, 0, limit_s=0.1)


def test_ranks_that_wait_hear_at_once_that_rank_0_has_ended(server):
    with ThreadPoolExecutor() as ranks:
        waiting = ranks.submit(meet, server, 1, limit_s=60)
        while server.get("ranks", "1") is None:
            time.sleep(0.01)
        server.wait_for_last_words(2, limit_s=0.0)
        message = r"must answer until all ranks have come.*rank 0 \(host0:1\) show why"
        with pytest.raises(RuntimeError, match=message):
            waiting.result(10)


def test_a_wrong_token_is_refused(server):
    with pytest.raises(
        PermissionError, match=r"same token\. Received: the store at .*TFPOSEIDON_TOKEN"
    ):
        client.connect(job(server, 1), "another", 5.0)


def test_the_store_of_another_job_is_passed_over(server):
    other = store.prefix_of("other", None)
    with store.Store(("127.0.0.1", 0), "other", other) as second, second.serving():
        ports = (second.server_address[1], server.server_address[1])
        assert client.connect(job(server, ports=ports), "secret", 5.0).port == ports[1]
    mine = job(server, 1, identity="third")
    with pytest.raises(TimeoutError, match=r"another job at .*\(test a:1; this job is third\)"):
        client.connect(mine, None, 0.1)


def test_a_store_that_never_comes_is_named(server):
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    message = rf"no answer at 127\.0\.0\.1:{port} .*refused.*Check that rank 0 \(host0:1\)"
    with pytest.raises(TimeoutError, match=message):
        client.connect(job(server, 1), "secret", 0.1)


def test_a_host_without_an_address_is_named(server):
    with pytest.raises(TimeoutError, match=r"no answer at no-such-host\.invalid"):
        client.connect(job(server, 1, host="no-such-host.invalid"), "secret", 0.1)


def test_a_taken_port_is_named(server, monkeypatch):
    monkeypatch.setattr(store, "BIND_S", 0.0)
    port = server.server_address[1]
    with pytest.raises(OSError, match=rf"port\(s\) {port}, which other programs use"):
        store.listen("127.0.0.1", (port,), "second", None)
    second = store.listen("127.0.0.1", (port, 0), "second", None)
    assert second.server_address[1] != port
    second.server_close()


def request(server, method, path, body=None):
    """A request as Horovod makes it: the prefix precedes the port that it appends."""
    url = f"http://127.0.0.1:{server.server_address[1]}/{path}"
    found = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(found) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_horovods_requests(server):
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


def test_failures_are_written_through_the_same_store(server):
    reached = launcher.Store(f"127.0.0.1:{server.server_address[1]}/{PREFIX}", 0)
    reached.put("fate-of-rank-1", "ended")
    assert reached.get("fate-of-rank-1") == "ended"
    server.report_death(1, "not said, because the rank has written its status")
    server.report_death(0, "rank 0 was killed")
    assert reached.get("first-failure") == "rank 0 was killed"


def test_a_store_waits_for_last_words_within_its_limit(server):
    begin = time.monotonic()
    server.wait_for_last_words(2, limit_s=0.2)
    assert 0.2 <= time.monotonic() - begin < 5
    for rank in range(2):
        server.put(store.FAILURES, store.EXIT_STATUS.format(rank), b'"ended"')
    server.wait_for_last_words(2, limit_s=600)


def entries(*nodes, addresses=None):
    return [
        Entry(
            node=node,
            host=node,
            process=1,
            address=(addresses or {}).get(node, ""),
            size=len(nodes),
        )
        for node in nodes
    ]


def test_ranks_in_any_order_have_local_and_cross_ranks():
    found = entries("a", "b", "a", "c", "a", "b")
    reached = Client("10.0.0.1", 4711, "PREFIX")
    assert meeting.nodes_of(found) == ((0, 2, 4), (1, 5), (3,))
    numbers = [
        [
            int(meeting.horovod_variables(found, rank, reached)[f"HOROVOD_{name}"])
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
    variables = meeting.horovod_variables(found, 3, reached)
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1:4711/PREFIX"
    assert variables["HOROVOD_HOSTNAME"] == "node-2"


def test_interfaces_are_those_between_nodes(monkeypatch):
    monkeypatch.setattr(meeting, "_interface_of", {"127.0.0.1": "lo", "10.0.0.2": "eth1"}.get)
    monkeypatch.setattr(meeting, "_address_towards", {"10.0.0.2": "127.0.0.1"}.get)
    one = entries("a", "a")
    assert meeting.interface_variables(one, 1)["HOROVOD_GLOO_IFACE"] == "lo"
    two = entries("a", "b", addresses={"a": "127.0.0.1", "b": "10.0.0.2"})
    assert meeting.interface_variables(two, 0) == dict.fromkeys(
        ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), "lo"
    )
    assert meeting.interface_variables(two, 1)["HOROVOD_GLOO_IFACE"] == "eth1"
    unknown = entries("a", "b", addresses={"b": "10.9.9.9"})
    assert meeting.interface_variables(unknown, 1) == {}


def test_one_process_and_launchers_need_no_meeting(monkeypatch):
    monkeypatch.setattr(meeting, "_nodes", None)
    for name in (meeting.LAUNCHER, meeting.MEMBER, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert meeting.join(1.0, has_mpi=False) is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="torchrun lacks"):
        meeting.join(1.0, has_mpi=False)
    monkeypatch.setenv("PMIX_RANK", "0")
    assert meeting.join(1.0, has_mpi=True) is None
    monkeypatch.setenv(meeting.LAUNCHER, "0")
    assert meeting.join(1.0, has_mpi=False) is None


def test_a_child_of_a_rank_is_refused(monkeypatch):
    monkeypatch.setattr(meeting, "_nodes", None)
    monkeypatch.setenv(meeting.LAUNCHER, "3")
    monkeypatch.setenv(meeting.STORE_ADDRESS, "a:1/x")
    monkeypatch.setenv(meeting.MEMBER, "1 a:1/x")
    with pytest.raises(RuntimeError, match=rf"of rank 3, process {os.getpid()} beside process 1\."):
        meeting.join(1.0, has_mpi=False)
    # A job that the rank has started with a launcher.
    monkeypatch.setenv(meeting.STORE_ADDRESS, "a:2")
    assert meeting.join(1.0, has_mpi=False) is None
