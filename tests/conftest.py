"""Marks tests, and orders them so that jobs overlap with fast tests.

Tests in `tests/jobs` and those marked `ranks` start ranks, labs or compilers. All others are fast,
unless they are marked slow because they take seconds each. Tests run in this order: tests without
jobs; tests whose jobs started ahead, in parallel with the fast tests; tests on ranks; and tests
whose jobs, such as labs, need the whole machine.
"""

import gc
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import launch
from tests.ranks import plugin, worker
from tests.ranks.world import prepare, pytest_generate_tests  # noqa: F401, a hook

collect_ignore = ["clusters", "examples/ported", "without"]
JOBS = Path(__file__).parent / "jobs"
JOB_LIMIT_S = launch.LIMIT_S + 60
LANES = 2
"""Jobs that run in parallel with the fast tests; `ranks/plugin.py` adds one."""
SLOWEST = 10


class Ahead:
    """Runs the jobs of tests marked by `launch.ahead` on threads, in the order of the tests."""

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


def pytest_configure(config):
    if folder := worker.folder_of_job():
        ranks = worker.Worker(config, folder)
    else:
        # Handle SIGTERM like Ctrl-C, so that the session ends its jobs.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        ranks = plugin.Session(config)
    config.pluginmanager.register(ranks, "ranks")


def pytest_collection_modifyitems(items):
    for item in items:
        if JOBS in item.path.parents:
            item.add_marker("jobs")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(JOB_LIMIT_S))
        elif item.get_closest_marker("ranks"):
            item.add_marker("jobs")
            prepare(item)
        elif not item.get_closest_marker("slow"):
            item.add_marker("fast")
    items.sort(key=_turn)


def _turn(item):
    if not item.get_closest_marker("jobs"):
        return 0
    if item.get_closest_marker("ahead"):
        return 1
    return 2 if item.get_closest_marker("ranks") else 3


def pytest_collection_finish(session):
    """Starts the jobs that run ahead, unless tests are only listed (`--collect-only`)."""
    if session.config.option.collectonly:
        return
    # Exclude imported objects, which live until the end, from garbage collections.
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
    """Returns the result of the job, which started ahead of the test, or raises its error."""
    return request.config.stash[AHEAD].outcome(request.node)


def pytest_terminal_summary(terminalreporter):
    if launch.durations:
        terminalreporter.section(f"slowest jobs of {len(launch.durations)}")
        for label, seconds in sorted(launch.durations, key=lambda job: -job[1])[:SLOWEST]:
            terminalreporter.line(f"{seconds:6.1f} s  {label}")


def pytest_sessionfinish(session):
    if ahead := session.config.stash.get(AHEAD, None):
        ahead.close()
