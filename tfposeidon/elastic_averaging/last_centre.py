"""What becomes of the centre where a job ends before its end."""

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
    """The exit that SIGTERM asks for."""


@contextlib.contextmanager
def saved_at_failure(
    server: Server, show: Callable[[], None], savers: Sequence[Callable[[], Any]], without: str
) -> Iterator[None]:
    """Lets the centre be saved before an error, or a launcher, ends the server.

    Launchers end all ranks by SIGTERM where one has failed, and by SIGKILL seconds later.

    Args:
      server: The server, which then answers workers no more.
      show: Function that puts the centre into the server's variables.
      savers: Functions that save them.
      without: Text of the log about the centre, for jobs without savers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # Python sets handlers of signals in the main thread only.
    previous = signal.signal(signal.SIGTERM, _exit) if is_main else None
    try:
        yield
    except BaseException as error:
        if is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, _Terminated):
            failure.report_signal("SIGTERM")
        # Where the script goes on, workers are not to train for nobody.
        server.fall_silent()
        # A list, as each has its turn.
        done = [_succeeds(save) for save in savers] if _succeeds(show) else []
        log.warning("tfposeidon: the job ends; %s.", _fate(done, savers, without))
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _exit(*_: Any) -> None:
    # What is being done is interrupted here, in the main thread.
    raise _Terminated(128 + signal.SIGTERM)


def _succeeds(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        # The error that ends the job is to be the last on the screen.
        log.exception("tfposeidon: the centre could not be saved by %s.", _name(call))
        return False
    return True


def _name(call: Callable[[], Any]) -> str:
    owner = getattr(call, "__self__", None)
    return str(getattr(call, "__name__", call)) if owner is None else type(owner).__name__


def _fate(done: list[bool], savers: Sequence[Any], without: str) -> str:
    if any(done):
        return "the server has saved the centre"
    return "the centre could not be saved, for the reason above" if savers else without
