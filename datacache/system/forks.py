"""Files whose locks a fork does not pass on: what a process has claimed ends with it, whoever it has forked.

A lock of `flock`, or of an open file description, is held until nobody has the description open any more. A forked
child has it, too, and would keep what its parent held when it was killed. So a child closes such files at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

# No fork between opening a file and noting it. Reentrant, for a handler of signals may fork in between.
_guard = threading.RLock()
_opened: dict[object, int] = {}


@contextlib.contextmanager
def unshared(open_file: Callable[[], int]) -> Iterator[int]:
    """A descriptor for locks.

    Args:
      open_file: Opens the file, and returns its descriptor.

    Yields:
      The descriptor, which is closed at the end, and in each child that is forked before.
    """
    _watch()
    token = object()
    with _guard:
        handle = _opened[token] = open_file()
    try:
        yield handle
    finally:
        with _guard:
            # In a child that was forked within it, the number may be another file's by now.
            if _opened.pop(token, None) is not None:
                os.close(handle)


@functools.cache
def _watch() -> None:
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_all
    )


def _close_all() -> None:
    for handle in _opened.values():
        os.close(handle)
    _opened.clear()
    _guard.release()
