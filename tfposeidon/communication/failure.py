"""Reports in the last lines of a failed job's output which rank failed first, and why.

One rank's failure makes the collectives of all others fail. A rank that fails writes the cause to
the launcher's store, and ranks with a broken collective read it there before they exit. Without a
store (under MPI), each rank can only report its own error.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
import traceback
from types import TracebackType

import tensorflow as tf

from tfposeidon.communication.launcher import STORE_TIMEOUT_S, Store
from tfposeidon.peers.store import EXIT_STATUS, FIRST_FAILURE

PATIENCE_S = 3.0
"""Seconds that a rank with a broken collective waits for another rank to report the cause."""

_reporter: Reporter | None = None
"""Reporter of this process; `None` before `watch`."""
_BROKEN_COLLECTIVE = re.compile(
    r"Horovod has been shut down|HorovodInternalError|Connection (closed|reset)|gloo/transport|"
    r"Read timeout|Timed out waiting|Broken pipe|Socket closed|"
    # Horovod's process sets no longer exist after its shutdown.
    r"Process set provided does not exist"
)
# TensorFlow's messages contain the name of the op. A name with dots identifies a collective of this
# package (see `wire`).
_WAITING = re.compile(r"(?:node \S*?|name: )([\w-]+\.[\w.-]+)")


def watch(rank: int, size: int) -> None:
    """Registers hooks that report uncaught exceptions and the normal end of this process."""
    global _reporter
    reporter = _reporter = Reporter(rank, size, Store.of_launcher())
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Print the traceback first, so that the cause is on the last lines.
        previous(kind, error, trace)
        reporter.report(error)

    sys.excepthook = hook
    # Exit handlers run in reverse order, and Horovod registered its shutdown earlier. So the store
    # has the exit status before the shutdown breaks the collectives of other ranks.
    atexit.register(reporter.leave)


def report_signal(name: str) -> None:
    """Reports that a signal ends this process, which would otherwise look like a normal exit."""
    if _reporter is not None:
        _reporter.report_signal(name)


class Reporter:
    """Writes this rank's exit status to the store, and reads the statuses of other ranks.

    `store` is `None` under MPI, in a job of one rank, and once the store cannot be reached.
    """

    def __init__(self, rank: int, size: int, store: Store | None) -> None:
        self.rank, self.size, self.failed = rank, size, False
        self.store = store if size > 1 else None

    def report(self, error: BaseException) -> None:
        """Prints which rank failed first and why; stores the cause if this rank failed first."""
        self.failed = True
        if self.size == 1 or isinstance(error, KeyboardInterrupt):
            return
        if is_broken_collective(error):
            self._put(EXIT_STATUS.format(self.rank), "broken")
            _print(self._first_cause() or self._known_state(str(error)))
        else:
            text = "".join(traceback.format_exception_only(error)).strip()
            cause = f"rank {self.rank} failed first: {text}"
            self._put_cause(cause)
            _print(cause)

    def report_signal(self, name: str) -> None:
        """Stores the signal as the cause unless a rank failed earlier; prints the first cause."""
        self.failed = True
        if self.size == 1:
            return
        cause = (
            f"rank {self.rank} received {name}. Launchers send it after another rank has ended; "
            "batch systems send it when the job's time limit expires."
        )
        self._put_cause(cause)
        _print(str(self._get(FIRST_FAILURE) or cause))

    def _put_cause(self, cause: str) -> None:
        # Reading and writing is not atomic: if two ranks fail at once, either may be reported.
        if self._get(FIRST_FAILURE) is None:
            self._put(FIRST_FAILURE, cause)
        self._put(EXIT_STATUS.format(self.rank), "failed")

    def leave(self) -> None:
        """Records that this script has ended normally, for ranks that still wait for this rank."""
        if not self.failed:
            self._put(EXIT_STATUS.format(self.rank), "ended")

    def _first_cause(self) -> str | None:
        # Wait, because the failed rank may not have written the cause yet.
        with contextlib.suppress(TimeoutError):
            return self.store.wait_for(FIRST_FAILURE, PATIENCE_S) if self.store else None
        return None

    def _known_state(self, text: str) -> str:
        waiting = _WAITING.search(text)
        where = f" while it waited for tensor {waiting.group(1)!r}" if waiting else ""
        known = f"rank {self.rank} lost its peers{where}, and no rank reported a cause."
        if self.store is None:
            return known
        statuses = [self._get(EXIT_STATUS.format(rank)) for rank in range(self.size)]
        if silent := [rank for rank, status in enumerate(statuses) if status is None]:
            known += (
                f" Rank(s) {silent} reported no status: they may be late, stopped, killed (out of "
                "memory?) or disconnected."
            )
        if ended := [rank for rank, status in enumerate(statuses) if status == "ended"]:
            known += (
                f" Rank(s) {ended} had already finished their script, or called sys.exit: see "
                "their own messages, and check whether they have fewer batches or epochs."
            )
        return known

    def _get(self, key: str) -> object:
        return self.store.get(key) if self.store else None

    def _put(self, key: str, value: str) -> None:
        try:
            if self.store is not None:
                self.store.put(key, value, STORE_TIMEOUT_S)
        except OSError:
            # The launcher has exited, so no rank can read the store.
            self.store = None


def _print(text: str) -> None:
    print(f"\ntfposeidon: the job ends. {text}", file=sys.stderr, flush=True)


def is_broken_collective(error: BaseException) -> bool:
    """Returns whether another rank's failure caused this error of a collective."""
    # Check the type and the op, too: an error while reading a file over a network also contains
    # "Connection reset", but is itself a cause.
    text = str(error)
    ours = isinstance(error, tf.errors.OpError) and (_WAITING.search(text) or "[Op:Horovod" in text)
    return bool(ours and _BROKEN_COLLECTIVE.search(text))
