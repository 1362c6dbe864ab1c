"""Files whose locks a fork does not pass on: claims end with the process that made them.

A lock of `flock`, or of an open file description, is held until nobody has the description open
any more. A forked child has it open, too, and would hold its parent's locks after the parent was
killed. So a child closes such files at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

# Held while a fork happens, so that no file is open but not yet noted. Reentrant, as a signal
# handler may fork while this thread is opening a file.
_guard = threading.RLock()
_opened: dict[object, int] = {}


@contextlib.contextmanager
def closed_on_fork(open_file: Callable[[], int]) -> Iterator[int]:
    """Opens a file for locks, and closes it at the end of the context and in forked children.

    Yields:
      The descriptor.
    """
    _register()
    token = object()
    with _guard:
        handle = _opened[token] = open_file()
    try:
        yield handle
    finally:
        with _guard:
            # A child that was forked within the context comes here, too. It has closed the file,
            # and the number may be that of another file by now.
            if _opened.pop(token, None) is not None:
                os.close(handle)


def opened_again(handle: int) -> contextlib.AbstractContextManager[int]:
    """Opens an open file once more, for locks of its own; the file may have no name any more.

    Returns:
      A context as that of `closed_on_fork`.
    """
    return closed_on_fork(lambda: os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC))


@functools.cache
def _register() -> None:
    """Registers the handlers at the first use: nothing happens at import."""
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_all
    )


def _close_all() -> None:
    for handle in _opened.values():
        os.close(handle)
    _opened.clear()
    _guard.release()
