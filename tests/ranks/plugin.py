"""Tests marked `@pytest.mark.ranks` run on real ranks: one job for all that a world is asked for.

The session collects, selects and reports them as any test. It runs none of them itself: when the
first of a world has its turn, it starts a job in which each rank runs pytest (`worker.py`). One
more job runs beside what the session waits for, which leaves processors idle: that of the world
that comes next.
"""

import itertools

import pytest

from tests.ranks.job import Job
from tests.ranks.world import limit_of, world_of

PHASES = ("setup", "call", "teardown")


class Session:
    """The plugin of the session that starts jobs."""

    def __init__(self, config):
        self._config = config
        self._job = None
        # World -> its job, which has started before its turn; and the first tests of those to come.
        self._early, self._for_early = {}, []
        self._not_started = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Tests of one world stand together, where the first of them stands."""
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
        """Starts the next job, once the one before has ended."""
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
        # What tests before this one set up may be shared with it, but not with those after it.
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
        """Starts a job for this test of a world and those after it."""
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
    """Of pytest on a rank: as in the session, where it changes what a failure shows."""
    option = config.option
    return [
        *("-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider", "--strict-markers"),
        # What Keras tells users of their data and gradients is no fault of a test.
        *("-W", "default::UserWarning", "--no-header", f"--verbosity={option.verbose}"),
        *(f"--tb={option.tbstyle}", *(["-l"] if option.showlocals else [])),
        *(["--runxfail"] if option.runxfail else []),
    ]


def merged(item, ranks):
    """One report for each phase from those of all ranks: that of the rank that failed first."""
    reports = []
    for phase in PHASES:
        of_phase = {
            rank: report
            for rank, reports_of_rank in enumerate(ranks)
            for report in reports_of_rank
            if report.when == phase
        }
        # Where a rank was not set up, what others ran is no outcome.
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
    """Adds to what a failure shows, in junit's files too."""
    if hasattr(report.longrepr, "addsection"):
        report.longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n--- {title} ---\n{text}"
    return report


def _with_trouble(item, reports, trouble):
    """A job that had to be ended fails the test, unless it has failed by itself."""
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
