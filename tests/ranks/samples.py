"""Tests that pass, fail or hang, for tests/jobs/test_ranks.py; pytest must receive their path."""

import os
import signal
import time

import pytest
import tensorflow as tf

import tfposeidon as tp
from tfposeidon.communication.wire import exchange_objects

pytestmark = pytest.mark.ranks("2")


def test_that_passes(wire):
    assert wire.topology.size == 2


@pytest.mark.ranks("2x1")
@pytest.mark.parametrize("wrong", [1])
def test_that_fails_on_one_rank(wire, wrong, tmp_path):
    print(f"rank {tp.rank()} was here, in {tmp_path}")
    assert tp.rank() != wrong, f"rank {tp.rank()} is wrong"


@pytest.mark.ranks("2x1")
def test_after_a_failure(wire):
    assert wire.topology.nodes == ((0,), (1,))


def test_that_waits_for_a_failed_rank(wire):
    assert tp.rank() != 1, "rank 1 left first"
    wire.all_reduce(tf.constant([1.0]), wire.topology.world, "waits")


def test_that_leaves_others_in_an_exchange(wire):
    """The other rank is at the end of the test: both ranks fail, but the next test passes."""
    assert tp.rank() != 1, "rank 1 left first"
    exchange_objects(None, wire, "done")


def test_after_an_exchange_that_failed(wire):
    assert exchange_objects(tp.rank(), wire, "ranks") == [0, 1]


def test_that_disagrees():
    if tp.rank() == 0:
        pytest.skip("only on rank 0")


@pytest.mark.timeout(3)
def test_that_hangs():
    _sleep_long()


def _sleep_long():
    time.sleep(1000)


def test_that_dies():
    if tp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def test_after_a_death():
    assert tp.size() == 2


@pytest.mark.ranks("1", environment={"SAMPLE": "given"}, processors=1, network="unknown")
def test_that_a_mark_sets_options():
    assert os.environ["SAMPLE"] == "given"
    assert len(os.sched_getaffinity(0)) == 1
