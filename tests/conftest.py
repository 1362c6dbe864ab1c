"""Marks tests by their folder: those in `tests/jobs` start ranks, labs or compilers.

All others are fast, unless they are marked slow: these take seconds each. Tests run in three turns:
those without jobs; those whose jobs were started ahead and ran beside the fast ones; then the rest,
whose jobs have the machine to themselves.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import launch

JOBS = Path(__file__).parent / "jobs"
JOB_LIMIT_S = launch.LIMIT_S + 60
LANES = 3
"""Jobs that run beside the fast tests at a time."""
SLOWEST = 10


class Ahead:
    """Runs jobs of tests marked by `launch.ahead` on threads, in the order of the tests."""

    def __init__(self):
        self._lanes = ThreadPoolExecutor(LANES)
        self._outcomes = {}

    def start(self, item):
        (job,) = item.get_closest_marker("ahead").args
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        self._outcomes[item.nodeid] = self._lanes.submit(job, *parameters)

    def outcome(self, item):
        return self._outcomes[item.nodeid].result()

    def close(self):
        self._lanes.shutdown(wait=False, cancel_futures=True)
        launch.kill_all()


AHEAD = pytest.StashKey[Ahead]()


def pytest_collection_modifyitems(items):
    for item in items:
        if JOBS in item.path.parents:
            item.add_marker("jobs")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(JOB_LIMIT_S))
        elif not item.get_closest_marker("slow"):
            item.add_marker("fast")
    items.sort(key=_turn)


def _turn(item):
    if not item.get_closest_marker("jobs"):
        return 0
    return 1 if item.get_closest_marker("ahead") else 2


def pytest_collection_finish(session):
    """Starts what runs ahead; a listing (`--collect-only`) starts nothing."""
    if session.config.option.collectonly:
        return
    # What imports made lives to the end: no garbage collection needs to look at it.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    session.config.stash[AHEAD] = Ahead()
    for item in session.items:
        if item.get_closest_marker("ahead") and not any(
            mark.args[0] for mark in item.iter_markers("skipif")
        ):
            session.config.stash[AHEAD].start(item)


@pytest.fixture
def outcome(request):
    """What the test's job, started ahead, has returned; an error of the job is raised here."""
    return request.config.stash[AHEAD].outcome(request.node)


def pytest_terminal_summary(terminalreporter):
    if launch.durations:
        terminalreporter.section(f"slowest jobs of {len(launch.durations)}")
        for label, seconds in sorted(launch.durations, key=lambda job: -job[1])[:SLOWEST]:
            terminalreporter.line(f"{seconds:6.1f} s  {label}")


def pytest_sessionfinish(session):
    if ahead := session.config.stash.get(AHEAD, None):
        ahead.close()
