"""An exchange that runs beside steps, and is waited for at a step that all ranks know."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

LONGEST_WAIT_S = 0.01
"""Seconds that a look takes at most: TensorFlow may have one thread for it and the exchange."""


class Background:
    """Runs a function in a thread, one call at a time, and no further than steps allow.

    Args:
      function: Function that is given another one, which it calls with a number of steps, to go on
        once so many have passed since its call began. It lets go of Python's lock while it waits
        for others.
    """

    def __init__(self, function: Callable[[Callable[[int], None]], Any]) -> None:
        self._function = function
        self._number: int | None = None
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._steps, self._passed = 0.0, threading.Condition()
        # Before Horovod ends, which would take the exchange along.
        atexit.register(_end, weakref.ref(self))

    def go_on(self, number: Any, steps: Any) -> None:
        """Lets a call go on, and begins it where it is not under way.

        That is in a run that was resumed since the call was begun, or that went back to an earlier
        snapshot.

        Args:
          number: Number of the round that it is for.
          steps: Steps that have passed since its begin.
        """
        if self._number != int(number):
            self._start(int(number))
        self._allow(float(steps))

    def _start(self, number: int) -> None:
        self.discard()
        self._number, self._steps = number, 0.0
        # A daemon: a job that ends with an error does not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, daemon=True, name="tfposeidon-round")
        self._thread.start()

    def _allow(self, steps: float) -> None:
        with self._passed:
            self._steps = max(steps, self._steps)
            self._passed.notify_all()

    def _run(self) -> None:
        try:
            self._result = self._function(self._wait_for)
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            self._error = error

    def _wait_for(self, steps: int) -> None:
        with self._passed:
            self._passed.wait_for(lambda: self._steps >= steps)

    def is_done(self, number: Any) -> bool:
        """Lets the call for a round come to its end, and returns whether its result is there.

        It waits a moment.

        Args:
          number: Number of the round.
        """
        self.go_on(number, math.inf)
        assert self._thread is not None
        self._thread.join(LONGEST_WAIT_S)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Returns the result of the call, once `is_done`.

        Raises:
          Exception: What the function raised.
        """
        result, error = self._result, self._error
        self.discard()
        if error is not None:
            raise error
        return result

    def discard(self) -> None:
        """Lets a call that was begun come to its end, and forgets it."""
        if self._thread is not None:
            self._allow(math.inf)
            self._thread.join()
        self._number = self._thread = self._result = self._error = None


def _end(reference: weakref.ref[Background]) -> None:
    # The others may be gone where a script has failed: Python notes what nobody caught.
    background = reference()
    if background is not None and not hasattr(sys, "last_value"):
        background.discard()
