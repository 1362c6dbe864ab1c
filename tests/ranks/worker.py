"""Runs pytest on one rank of a job, and reports each step to the session.

Each rank writes lines of JSON into its own file: the start of a test, its report, and its end.
"""

import faulthandler
import gc
import json
import os
from pathlib import Path

import keras
import pytest

import tfposeidon as tp
from tests.ranks.world import LIMIT_S, limit_of
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

FOLDER = "TESTS_RANKS_FOLDER"
"""Environment variable with the folder of the job; only ranks have it."""


class Worker:
    """Plugin of pytest on one rank.

    Args:
      folder: Folder of the job, with `start`, `tests`, and a file of each rank.
    """

    def __init__(self, config, folder):
        start = json.loads((folder / "start").read_text())
        if start["processors"]:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: start["processors"]])
        tp.init(**start["init"])
        self._wire = runtime.wire()
        self._config = config
        nodeids = (folder / "tests").read_text().splitlines()
        self._order = {nodeid: place for place, nodeid in enumerate(nodeids)}
        self._lines = (folder / f"rank-{tp.rank()}").open("a", buffering=1)
        self._stacks = (folder / f"stacks-{tp.rank()}").open("w")
        self._limit_s = LIMIT_S
        config.option.basetemp = folder / f"tmp-{tp.rank()}"

    def _tell(self, **event):
        self._lines.write(json.dumps(event) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report):
        if report.failed:
            self._tell(broken=str(report.longrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self):
        # Exclude imported objects, which live as long as the rank, from garbage collections. The
        # thresholds are low, because freeing the graphs of several tests at once took a minute.
        gc.freeze()
        gc.set_threshold(5_000, 10, 10)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._tell(begun=item.nodeid)
        self._limit_s = limit_of(item)
        faulthandler.dump_traceback_later(self._limit_s, file=self._stacks)
        result = yield
        self._tell(left=item.nodeid)
        # No rank starts the next test while another rank may still be in a collective of this one.
        # If this exchange is matched with that collective, both ranks fail, and the session starts
        # a new job.
        exchange_objects(None, self._wire, "next test")
        faulthandler.cancel_dump_traceback_later()
        self._tell(ended=item.nodeid)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self):
        # pytest's own plugin cancels this timer at each failure.
        faulthandler.dump_traceback_later(self._limit_s, file=self._stacks)

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell(report=data)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        # The session receives each failure as a report, and a nonzero exit status would end the
        # other ranks.
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.fixture(autouse=True)
    def _anew(self):
        """Resets seeds, dtype policy and names of layers to those of a new process."""
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        keras.config.set_dtype_policy("float32")

    @pytest.fixture
    def wire(self):
        """Returns the communicator of the ranks."""
        return self._wire


def folder_of_job():
    """Returns the job's folder on a rank, or `None` in the session that starts jobs."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None
