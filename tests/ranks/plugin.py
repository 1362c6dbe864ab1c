"""Runs tests marked `@pytest.mark.ranks` on real ranks, with one job for all tests of a world.

The session collects, selects and reports these tests, but does not run them. Before the first test
of a world, it starts a job, in which each rank runs pytest (`worker.py`). The job of the next world
starts early, in parallel, because jobs mostly leave processors idle.
"""

import itertools

import pytest

from tests.ranks.job import Job
from tests.ranks.world import limit_of, world_of

PHASES = ("setup", "call", "teardown")


class Session:
    """Plugin of the session, which starts the jobs."""

    def __init__(self, config):
        self._config = config
        self._job = None
        # World -> its job that has started early; and the first test of each later world.
        self._early, self._for_early = {}, []
        self._not_started = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Moves all tests of a world to the position of the first of them."""
        first = {}
        places = {
            item: first.setdefault(world_of(item) or item, place)
            for place, item in enumerate(items)
        }
        items.sort(key=places.get)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        if session.config.option.collectonly or session.testsfailed:
            return
        first = {}
        for item in session.items:
            first.setdefault(world_of(item), item)
        first.pop(None, None)
        self._for_early = [item for world, item in first.items() if not world.why_not()]

    def _start_early(self):
        """Starts the job of the next world if no early job is running."""
        if self._for_early and all(job.has_ended for job in self._early.values()):
            item = self._for_early.pop(0)
            world = world_of(item)
            self._early[world] = self._start(item, world)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        world = world_of(item)
        self._for_early = [other for other in self._for_early if world_of(other) != world]
        self._start_early()
        if world is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, world, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Tear down fixtures that later tests do not share.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _reports(self, item, world, nextitem):
        if reason := world.why_not():
            path, line, _ = item.location
            skipped = _report(item, "setup", "skipped", (path, line, f"Skipped: {reason}"))
            return [skipped, _report(item, "teardown", "passed", None)]
        if trouble := self._not_started.get(world):
            return _with_trouble(item, [], trouble)
        if self._job is None:
            self._job = self._early.pop(world, None) or self._start(item, world)
        ranks, trouble = self._job.wait(item.nodeid, limit_of(item))
        read = self._config.hook.pytest_report_from_serializable
        ranks = [[read(config=self._config, data=data) for data in reports] for reports in ranks]
        reports = merged(item, ranks)
        if trouble:
            reports = _with_trouble(item, reports, trouble)
            if not self._job.has_started:
                self._not_started[world] = trouble
            self._close()
        elif nextitem is None or world_of(nextitem) != world:
            if trouble := self._job.end():
                reports = [r for r in reports if r.when != "teardown"]
                reports.append(_report(item, "teardown", "failed", trouble))
            self._job = None
        return reports

    def _start(self, item, world):
        """Starts a job for this test and all later tests of its world."""
        rest = itertools.dropwhile(lambda other: other is not item, item.session.items)
        left = [o.nodeid for o in itertools.takewhile(lambda o: world_of(o) == world, rest)]
        return Job(world, left, _options(self._config))

    def pytest_sessionfinish(self):
        self._close()
        for job in self._early.values():
            job.kill()

    def _close(self):
        if self._job:
            self._job.kill()
        self._job = None


def _options(config):
    """Returns pytest's options on a rank: those of the session that affect reports of failures."""
    option = config.option
    return [
        *("-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider", "--strict-markers"),
        # Keras's warnings about data and gradients are not faults of a test.
        *("-W", "default::UserWarning", "--no-header", f"--verbosity={option.verbose}"),
        *(f"--tb={option.tbstyle}", *(["-l"] if option.showlocals else [])),
        *(["--runxfail"] if option.runxfail else []),
    ]


def merged(item, ranks):
    """Merges the reports of all ranks into one per phase: that of the rank that failed first."""
    reports = []
    for phase in PHASES:
        of_phase = {
            rank: report
            for rank, reports_of_rank in enumerate(ranks)
            for report in reports_of_rank
            if report.when == phase
        }
        # If the setup failed on a rank, omit the test's report from other ranks.
        done = phase == "call" and not all(report.passed for report in reports)
        if of_phase and not done:
            reports.append(_merge(item, of_phase, len(ranks)))
    return reports


def _merge(item, by_rank, size):
    expected = [report for report in by_rank.values() if hasattr(report, "wasxfail")]
    failed = {rank: report for rank, report in by_rank.items() if report.failed}
    outcomes = {rank: report.outcome for rank, report in by_rank.items()}
    if expected and expected[0].skipped:
        return expected[0]
    if failed:
        first = min(failed, key=lambda rank: failed[rank].stop)
        lines = [f"rank {rank}: {_crash(report)}" for rank, report in failed.items()]
        title = f"failed on {len(failed)} of {size} ranks; above is rank {first}, the first"
        return _with_note(failed[first], title, "\n".join(lines))
    if len(set(outcomes.values())) > 1:
        when = next(iter(by_rank.values())).when
        return _report(item, when, "failed", f"ranks disagree on the outcome: {outcomes}")
    return max(by_rank.values(), key=lambda report: report.duration)


def _crash(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else str(report.longrepr)[:200]


def _with_note(report, title, text):
    """Adds a section to the report of a failure, also for junit files."""
    if hasattr(report.longrepr, "addsection"):
        report.longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n--- {title} ---\n{text}"
    return report


def _with_trouble(item, reports, trouble):
    """Fails the test whose job had to be ended, or adds the reason to its failure."""
    for report in reports:
        if report.failed:
            _with_note(report, "the job was ended", trouble)
            return reports
    return [
        *(report for report in reports if report.when == "setup" and report.passed),
        _report(item, "call", "failed", trouble),
        _report(item, "teardown", "passed", None),
    ]


def _report(item, when, outcome, longrepr):
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, when)
