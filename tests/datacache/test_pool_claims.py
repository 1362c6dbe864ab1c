"""Claims and locks have one owner, and end with the owner's process, even if it is killed."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest

from datacache.errors import CacheError
from datacache.pool import heap
from datacache.pool.pool import Pool
from tests.datacache.pools import (
    LAYOUT,
    SAMPLES,
    check_samples,
    claimed,
    drawn_sample,
    new_pool,
    varying_pool,
    varying_sample,
)


def _fill(folder, die_at):
    """Writes samples until the step `die_at`, at which the process kills itself."""
    steps = iter(range(10**6))

    class Mortal(np.ndarray):
        def __setitem__(self, key, value):
            if next(steps) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super().__setitem__(key, value)

    pool = new_pool(folder)
    pool._words = pool._words.view(Mortal)
    pool._columns = [column.view(Mortal) for column in pool._columns]
    for index in range(4):
        with pool.claim(np.array([index])) as mine:
            assert mine.tolist() == [index]
            pool.put(index, drawn_sample(index))


@pytest.mark.slow
def test_a_kill_at_every_step_leaves_only_complete_samples(tmp_path):
    context = multiprocessing.get_context("spawn")
    steps = 4 * (2 + len(LAYOUT.components))
    for die_at in range(steps):
        folder = tmp_path / str(die_at)
        filler = context.Process(target=_fill, args=(folder, die_at))
        filler.start()
        filler.join()
        assert filler.exitcode == -signal.SIGKILL
        pool = new_pool(folder)
        ready = np.flatnonzero(pool.ready(np.arange(SAMPLES)))
        assert ready.tolist() == list(range(die_at // (steps // 4)))
        assert pool.find_corrupt(ready).size == 0
        check_samples(pool, ready)
        with pool.claim(np.array([len(ready)])) as mine:
            assert mine.size, "the kernel must release the claims of the killed process"


def test_a_claim_has_one_owner(tmp_path):
    pool, other = new_pool(tmp_path), new_pool(tmp_path)
    other.put(5, drawn_sample(5))
    with pool.claim(np.array([2, 3, 5])) as mine, other.claim(np.array([3, 4])) as theirs:
        assert (mine.tolist(), theirs.tolist()) == ([2, 3], [4])
        with pool.claim_all() as everything, other.claim_all() as again:
            assert (everything, again) == (True, False)
    with other.claim(np.array([3])) as mine:
        assert mine.tolist() == [3]
        found = []
        thread = threading.Thread(target=lambda: found.extend(claimed(other, 3)))
        thread.start()
        thread.join()
        assert found == []


def _open(folder, found):
    try:
        found.put(new_pool(folder).filled)
    except CacheError as error:
        found.put(str(error))


@pytest.mark.slow
def test_many_processes_create_a_store_concurrently(tmp_path):
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=_open, args=(tmp_path, found)) for _ in range(8)]
    for process in processes:
        process.start()
    assert [found.get(timeout=300) for _ in processes] == [0] * 8
    for process in processes:
        process.join()


def test_a_store_is_created_after_a_kill_during_creation(tmp_path):
    new_pool(tmp_path)
    (tmp_path / "datacache.store").rename(tmp_path / "datacache.part")
    os.truncate(tmp_path / "datacache.part", 99)
    pool = new_pool(tmp_path)
    pool.put(1, drawn_sample(1))
    check_samples(pool, np.array([1]))


def _within_a_claim(pool, act):
    with pool.claim(np.array([3])):
        act()


def _within_a_claim_of_everything(pool, act):
    with pool.claim_all():
        act()


def _while_the_heap_grows(pool, act):
    heap.reserve = lambda *_: act()
    pool.put(3, varying_sample(3))


def _while_a_pool_is_made(pool, act):
    Pool(pool.folder.with_name("another"), act)


HOLDS = [
    _within_a_claim,
    _within_a_claim_of_everything,
    _while_the_heap_grows,
    _while_a_pool_is_made,
]


def _hold_and_fork(folder, hold, forked):
    """Acquires a claim or lock, forks a child that stays alive, and waits to be killed."""

    def fork():
        if not os.fork():
            forked.send(os.getpid())
        signal.pause()

    hold(varying_pool(folder / "pool"), fork)


@pytest.mark.parametrize("hold", HOLDS)
def test_claims_end_with_the_owner_despite_a_forked_child(tmp_path, hold):
    pool = varying_pool(tmp_path / "pool")
    context = multiprocessing.get_context("spawn")
    forked, end = context.Pipe()
    filler = context.Process(target=_hold_and_fork, args=(tmp_path, hold, end))
    filler.start()
    child = forked.recv()
    try:
        filler.kill()
        filler.join()
        with pool.claim(np.array([3])) as mine, pool.claim_all() as everything:
            assert (mine.tolist(), everything) == ([3], True)
            # If the child inherited claims or locks, these calls would fail or wait forever.
            assert pool.put(3, varying_sample(3))
        assert varying_pool(tmp_path / "another").filled == 0
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


# JAX, which the tests of optax import, warns of any fork; this child does not use JAX.
@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
def test_a_claim_survives_the_end_of_a_forked_child(tmp_path):
    pool, other = new_pool(tmp_path), new_pool(tmp_path)
    with pool.claim(np.array([3])):
        child = multiprocessing.get_context("fork").Process(target=claimed, args=(other, 4))
        child.start()
        child.join()
        assert child.exitcode == 0
        with other.claim(np.array([3])) as theirs:
            assert not theirs.size
