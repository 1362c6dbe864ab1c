"""Tests reports of the first failed rank, over a real key-value store."""

import pytest
import tensorflow as tf
from horovod.runner.http.http_server import KVStoreServer

from tfposeidon.communication.failure import Reporter, is_broken_collective
from tfposeidon.communication.launcher import ProcessRank, Store, node_sizes, process_rank

BROKEN = tf.errors.UnknownError(
    None, None, "Horovod has been shut down. [[{{node step/tp0.bucket_3.scatter}}]]"
)


@pytest.fixture
def store():
    server = KVStoreServer(verbose=0)
    port = server.start_server()
    yield Store("127.0.0.1", port)
    server.shutdown_server()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr("tfposeidon.communication.failure.PATIENCE_S", 0.0)


def test_survivors_name_the_rank_that_failed_first(store, monkeypatch, capsys):
    monkeypatch.setattr("tfposeidon.communication.failure.PATIENCE_S", 1.0)
    Reporter(2, 3, store).report(ValueError("out of paper"))
    Reporter(0, 3, store).report(BROKEN)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == ["tfposeidon: the job ends. rank 2 failed first: ValueError: out of paper"] * 2


def test_the_first_cause_is_not_overwritten(store, monkeypatch, capsys):
    monkeypatch.setattr("tfposeidon.communication.failure.PATIENCE_S", 1.0)
    Reporter(1, 3, store).report(ValueError("first"))
    Reporter(2, 3, store).report(ValueError("second"))
    capsys.readouterr()
    Reporter(0, 3, store).report(BROKEN)
    assert "rank 1 failed first: ValueError: first" in capsys.readouterr().err


def test_ranks_without_a_status_and_finished_ranks_are_named(store, capsys):
    Reporter(1, 4, store).leave()
    Reporter(3, 4, store).report(BROKEN)
    capsys.readouterr()
    Reporter(0, 4, store).report(BROKEN)
    said = capsys.readouterr().err
    assert "waited for tensor 'tp0.bucket_3.scatter'" in said
    assert "Rank(s) [2] reported no status" in said
    assert "Rank(s) [1] had already finished their script" in said


def test_a_signal_is_a_cause_of_failure(store, monkeypatch, capsys):
    monkeypatch.setattr("tfposeidon.communication.failure.PATIENCE_S", 1.0)
    ended = Reporter(1, 3, store)
    ended.report_signal("SIGTERM")
    ended.leave()
    Reporter(0, 3, store).report(BROKEN)
    Reporter(2, 3, store).report(BROKEN)
    said = capsys.readouterr().err
    assert said.count("rank 1 received SIGTERM") == 3
    assert "already finished" not in said


def test_a_failure_before_a_signal_is_the_cause(store, capsys):
    Reporter(2, 3, store).report(ValueError("first"))
    capsys.readouterr()
    Reporter(1, 3, store).report_signal("SIGTERM")
    assert "rank 2 failed first: ValueError: first" in capsys.readouterr().err


def test_without_a_store_each_rank_reports_its_own_error(capsys):
    Reporter(0, 4, None).report(BROKEN)
    assert "rank 0 lost its peers while it waited for tensor" in capsys.readouterr().err


def test_a_lost_store_causes_no_second_failure(capsys):
    Reporter(0, 2, Store("127.0.0.1", 9)).report(ValueError("x"))
    assert "rank 0 failed first: ValueError: x" in capsys.readouterr().err


def test_a_single_rank_reports_nothing(capsys):
    Reporter(0, 1, None).report(ValueError("x"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    ["Horovod has been shut down", "gloo/transport/tcp/pair.cc:598", "Connection closed by peer"],
)
def test_broken_collectives_are_recognized(text):
    assert is_broken_collective(
        tf.errors.UnknownError(None, None, f"{text} [[{{{{node step/tp0.samples}}}}]]")
    )
    assert is_broken_collective(
        tf.errors.AbortedError(None, None, f"{text} [Op:HorovodAllgather] name: tp.steps")
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3,) and (4,) differ"),
        ConnectionResetError(104, "Connection reset by peer"),
        OSError("Read timeout on /nfs/train/tp0.samples"),
        BrokenPipeError(32, "Broken pipe"),
        tf.errors.UnavailableError(
            None, None, "Connection reset by peer [[{{node ReadFile}}]] [Op:IteratorGetNext]"
        ),
        tf.errors.InvalidArgumentError(
            None, None, "Mismatched shapes [[{{node step/tp0.samples}}]]"
        ),
    ],
    ids=str,
)
def test_other_errors_are_causes(error):
    assert not is_broken_collective(error)


def test_node_sizes_come_from_the_first_rank_of_each_node(store):
    for rank, local_rank, local_size in ((0, 0, 2), (2, 0, 1), (3, 0, 3)):
        store.put(f"node-of-rank-{rank}", local_size) if local_rank == 0 else None
    assert node_sizes(store, ProcessRank(4, 6, 1, 3)) == [2, 1, 3]


def test_a_missing_node_is_named(store):
    with pytest.raises(TimeoutError, match="no value of 'node-of-rank-0'"):
        node_sizes(store, ProcessRank(1, 2, 1, 2), timeout_s=0.1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ProcessRank()),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ProcessRank()),
        (
            {
                "HOROVOD_RANK": "3",
                "HOROVOD_SIZE": "8",
                "HOROVOD_LOCAL_RANK": "1",
                "HOROVOD_LOCAL_SIZE": "2",
            },
            ProcessRank(3, 8, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            ProcessRank(1, 4, 1, 2),
        ),
        (
            {
                "PMIX_RANK": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_NTASKS_PER_NODE": "2",
            },
            ProcessRank(3, 4, 1, 2),
        ),
    ],
)
def test_the_launchers_variables_determine_rank_and_size(monkeypatch, variables, expected):
    for name in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        for suffix in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
            monkeypatch.delenv(f"{name}_{suffix}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_rank() == expected
