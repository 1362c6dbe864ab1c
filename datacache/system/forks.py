"""Files whose locks a fork does not inherit: claims end with the process that made them.

A lock of `flock`, or of an open file description, is held until all copies of the description are
closed. A forked child has a copy, and would hold its parent's locks after the parent was killed. A
child therefore closes such files at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

# Held during a fork, so that no file is open but not yet registered. Reentrant, because a signal
# handler may fork while this thread is opening a file.
_guard = threading.RLock()
_opened: dict[object, int] = {}


@contextlib.contextmanager
def closed_on_fork(open_file: Callable[[], int]) -> Iterator[int]:
    """Opens a file for locks; closes it at the end of the context and in forked children."""
    _register()
    token = object()
    with _guard:
        handle = _opened[token] = open_file()
    try:
        yield handle
    finally:
        with _guard:
            # A child that was forked within the context also reaches this line. It has closed the
            # file, and the number may be that of another file by now.
            if _opened.pop(token, None) is not None:
                os.close(handle)


def opened_again(handle: int) -> contextlib.AbstractContextManager[int]:
    """Opens an open file again, for locks of its own; the file may have been unlinked."""
    return closed_on_fork(lambda: os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC))


@functools.cache
def _register() -> None:
    """Registers the handlers at the first use, because imports have no side effects."""
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_all
    )


def _close_all() -> None:
    for handle in _opened.values():
        os.close(handle)
    _opened.clear()
    _guard.release()
