"""Saving of the global weights if a job ends early, by an error or by the launcher."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfposeidon.communication import failure
from tfposeidon.elastic_averaging.server import Server

log = logging.getLogger("tfposeidon")


class _Terminated(SystemExit):
    """Exit in response to SIGTERM."""


@contextlib.contextmanager
def saved_at_failure(
    server: Server, show: Callable[[], None], savers: Sequence[Callable[[], Any]], without: str
) -> Iterator[None]:
    """Saves the global weights before an error, or a launcher, ends the server.

    `show` assigns them to the server's variables, and `savers` save these. `without` is the log
    message for jobs without savers.
    """
    # If one rank has failed, launchers end all ranks by SIGTERM, and by SIGKILL seconds later.
    is_main = threading.current_thread() is threading.main_thread()
    # Python installs signal handlers in the main thread only.
    previous = signal.signal(signal.SIGTERM, _exit) if is_main else None
    try:
        yield
    except BaseException as error:
        if is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, _Terminated):
            failure.report_signal("SIGTERM")
        # If the script continues, workers must not train without a server.
        server.fall_silent()
        # A list, so that each saver runs, regardless of earlier failures.
        done = [_succeeds(save) for save in savers] if _succeeds(show) else []
        log.warning("tfposeidon: the job ends; %s.", _fate(done, savers, without))
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _exit(*_: Any) -> None:
    # Interrupts the current operation of the main thread.
    raise _Terminated(128 + signal.SIGTERM)


def _succeeds(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        # The error that ends the job must be the last one in the log.
        log.exception("tfposeidon: %s could not save the global weights.", _name(call))
        return False
    return True


def _name(call: Callable[[], Any]) -> str:
    owner = getattr(call, "__self__", None)
    return str(getattr(call, "__name__", call)) if owner is None else type(owner).__name__


def _fate(done: list[bool], savers: Sequence[Any], without: str) -> str:
    if any(done):
        return "the server has saved the global weights"
    return "the global weights could not be saved, for the reason above" if savers else without
